"""Rejection sampling: token tables, the target's distribution, and the field's cases."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from scipy import stats

from _aot import TARGETS, assert_compiles
from _variants import variants
from conftest import INTERPRET
from tridraft.kernels import rejection
from tridraft.kernels._rejection_kernels import rejection_launch
from tridraft.kernels.random import ACCEPT, uniform
from tridraft.kernels.rejection import rejection_sample
from tridraft.kernels.sampling import draft_sample

MINUS_INF, NAN = float("-inf"), float("nan")
DRAWS = 20000
# Statistics need more draws than the interpreter makes; there the kernel is compared with the definition exactly.
drawn = pytest.mark.parametrize("impl", ["eager", *(["triton"] if torch.cuda.is_available() else [])])


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of statistics and several programs to draw, at any size."""

    def launch(vocab_size):
        return dataclasses.replace(rejection_launch(vocab_size), block=16, width=8, num_warps=1)

    monkeypatch.setattr(rejection, "rejection_launch", launch)


def requests(device, counts, *, temperature=0.0, slots=None) -> dict[str, Any]:
    """Everything but logits and drafts: `counts` rows each, slots in reverse order, seeds and positions differ."""
    num_reqs = len(counts)
    starts = torch.tensor([0, *itertools.accumulate(counts)], device=device, dtype=torch.int32)
    idx_mapping = torch.arange(num_reqs).flip(0).tolist() if slots is None else slots
    return {
        "query_start_loc": starts,
        "idx_mapping": torch.tensor(idx_mapping, device=device, dtype=torch.int32),
        "temperature": torch.full((num_reqs,), temperature, device=device),
        "seeds": torch.arange(num_reqs, device=device) * 7919 - 5,
        "positions": torch.arange(sum(counts), device=device) + 2**33,
    }


def peaked(device, tokens, vocab_size=8):
    """Logits whose argmax is `tokens`."""
    return torch.eye(vocab_size, device=device)[tokens] * 4 - 1


TABLES = {  # drafts, the target's argmax at each row, output, num_sampled, num_rejected
    "perfect match": ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 4, 0),
    "early mismatch": ([5, 2, 3], [1, 2, 3, 4], [1, -1, -1, -1], 1, 3),
    "late mismatch": ([1, 2, 0], [1, 2, 3, 4], [1, 2, 3, -1], 3, 1),
    "a match behind a mismatch": ([1, 0, 3], [1, 2, 3, 4], [1, 2, -1, -1], 2, 2),
    "fewer drafts": ([1, 2, 7], [1, 2], [1, 2, -1, -1], 2, 0),
    "no draft": ([1, 2, 3], [6], [6, -1, -1, -1], 1, 0),
    "no row": ([1, 2, 3], [], [-1, -1, -1, -1], 0, 0),
    "a placeholder ends the chain": ([1, -1, 3], [1, 2, 3, 4], [1, 2, -1, -1], 2, 2),
    "token zero": ([0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], 4, 0),
    "out of the vocabulary": ([8, 2, 3], [1, 2, 3, 4], [1, -1, -1, -1], 1, 3),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_greedy_tables(dtype, impl, device):
    """All tables in one ragged batch, with a row of padding that owns logits."""
    tables = [*TABLES.values(), ([1, 2, 3], [1, 2], [-1] * 4, 0, 0)]
    drafts = torch.tensor([table[0] for table in tables], device=device, dtype=dtype)
    rows = requests(device, [len(table[1]) for table in tables])
    rows["idx_mapping"][-1] = -1
    logits = peaked(device, [token for table in tables for token in table[1]])
    flag = torch.full((logits.shape[0],), 9, device=device, dtype=torch.int32)
    result = rejection_sample(logits, drafts, **rows, nan_flag=flag, impl=impl)
    assert result.output_ids.tolist() == [table[2] for table in tables]
    assert result.num_sampled.tolist() == [table[3] for table in tables]
    assert result.num_rejected.tolist() == [table[4] for table in tables]
    last = [table[2][table[3] - 1] if table[3] else 0 for table in tables]
    assert result.last_sampled.tolist() == last
    assert flag.tolist() == [0] * (logits.shape[0] - 2) + [9, 9]


def test_greedy_ties_and_nan(impl, small_blocks, device):
    """C28: the lowest id, across blocks too; NaN never wins; an all-NaN row gives the lowest eligible id and a flag."""
    logits = torch.zeros(6, 40, device=device)
    logits[0, [39, 15, 16]] = 2
    logits[1] = NAN
    logits[2] = MINUS_INF
    logits[3, 3:] = NAN
    logits[4, [20, 30]] = float("inf")
    logits[5, [0, 1, 5]] = 7
    drafts = torch.tensor([[15, 2, 2, 1, 20]], device=device)
    flag = torch.zeros(6, dtype=torch.bool, device=device)
    rows = requests(device, [6])
    suppress_ids = torch.tensor([0, 1, 40 - 1], device=device)
    drafts[0, 3] = 2
    result = rejection_sample(logits, drafts, **rows, suppress_ids=suppress_ids, nan_flag=flag, impl=impl)
    assert result.output_ids.tolist() == [[15, 2, 2, 2, 20, 5]]
    assert flag.tolist() == [False, True, False, False, False, False]
    result = rejection_sample(logits, drafts * 0, **rows, impl=impl)
    assert result.output_ids.tolist() == [[15, -1, -1, -1, -1, -1]]


def test_no_drafts_at_all(impl, device):
    """K = 0: the bonus token only."""
    drafts = torch.empty(2, 0, device=device, dtype=torch.int64)
    result = rejection_sample(peaked(device, [3, 5]), drafts, **requests(device, [1, 1]), impl=impl)
    assert result.output_ids.tolist() == [[3], [5]]
    assert result.num_rejected.tolist() == [0, 0]


def test_empty_batch(impl, device):
    drafts = torch.empty(0, 3, device=device, dtype=torch.int64)
    result = rejection_sample(torch.empty(0, 8, device=device), drafts, **requests(device, []), impl=impl)
    assert [tuple(one.shape) for one in result] == [(0, 4), (0,), (0,), (0,)]
    drafts = torch.zeros(2, 3, device=device, dtype=torch.int64)
    result = rejection_sample(torch.empty(0, 8, device=device), drafts, **requests(device, [0, 0]), impl=impl)
    assert result.output_ids.tolist() == [[-1] * 4] * 2


def conditional(device, vocab_size, steps, seed):
    """Logits of the next token by step and previous token: `[steps, V, V]`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(steps, vocab_size, vocab_size, generator=generator) * 1.5).to(device)


def speculate(p_table, q_table, counts, temperature, impl, *, sampled=True):
    """Complete sequences of K + 1 tokens, one a request: drafts from q, judged against p, the rest drawn from p.

    Drafts come from `draft_sample` with the same seeds and positions, as in a decoding loop; `sampled=False` takes
    q's argmax and passes no draft logits.
    """
    num_drafts, draws, device = len(q_table), counts, p_table.device
    rows = requests(device, [num_drafts + 1] * draws, temperature=temperature)
    slots = rows["idx_mapping"].long()
    positions = rows["positions"].view(draws, -1)
    vocab_size = p_table.shape[-1]
    previous = torch.zeros(draws, dtype=torch.long, device=device)
    drafts = torch.zeros(draws, num_drafts, dtype=torch.long, device=device)
    draft_logits = torch.zeros(draws, num_drafts, vocab_size, device=device)
    target = [p_table[0][previous]]
    for k in range(num_drafts):
        logits = q_table[k][previous]
        draft_logits[slots, k] = logits
        scale = rows["temperature"] if sampled else torch.zeros_like(rows["temperature"])
        drafts[:, k] = draft_sample(
            logits, rows["idx_mapping"], scale, rows["seeds"], positions[:, k].contiguous(), impl="eager"
        )
        previous = drafts[:, k]
        target.append(p_table[k + 1][previous])
    logits = torch.stack(target, dim=1).flatten(0, 1)
    result = rejection_sample(logits, drafts, **rows, draft_logits=draft_logits if sampled else None, impl=impl)
    tokens = result.output_ids.clone()
    for step in range(num_drafts + 1):
        before = tokens[:, step - 1] if step else torch.zeros_like(tokens[:, 0])
        drawn = torch.multinomial((p_table[step][before] / temperature).softmax(dim=1), 1)[:, 0]
        tokens[:, step] = torch.where(step < result.num_sampled, tokens[:, step], drawn)
    return tokens, result


def assert_distributed_as(tokens, p_table, temperature):
    """Chi-square of whole sequences against the target's joint distribution."""
    vocab_size, length = p_table.shape[-1], tokens.shape[1]
    cells = vocab_size**length
    expected = torch.ones(1, dtype=torch.float64)
    last = torch.zeros(1, dtype=torch.long)
    for step in range(length):
        p = (p_table[step].double().cpu() / temperature).softmax(dim=1)
        expected = (expected[:, None] * p[last]).flatten()
        last = torch.arange(vocab_size).repeat(len(last))
    index = torch.zeros(tokens.shape[0], dtype=torch.long, device=tokens.device)
    for step in range(length):
        index = index * vocab_size + tokens[:, step]
    counts = torch.bincount(index, minlength=cells).cpu()
    expected = expected * tokens.shape[0]
    rare = expected < 5  # pooled: the statistic wants at least five a cell
    assert not counts[expected == 0].any()
    observed, wanted = [*counts[~rare].tolist()], [*expected[~rare].tolist()]
    if expected[rare].sum() > 0:
        observed.append(counts[rare].sum().item())
        wanted.append(expected[rare].sum().item())
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


@drawn
@pytest.mark.parametrize("sampled", [True, False], ids=["drafts sampled", "drafts greedy"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_lossless(num_drafts, sampled, impl, device):
    """Sequences are distributed as the target's own, whatever the drafter."""
    p, q = conditional(device, 3, num_drafts + 1, 1), conditional(device, 3, num_drafts, 2)
    tokens, result = speculate(p, q, DRAWS, 0.8, impl, sampled=sampled)
    assert_distributed_as(tokens, p, 0.8)
    if num_drafts:
        assert result.num_rejected.float().mean() > 0.1


@drawn
@pytest.mark.parametrize("sampled", [True, False], ids=["drafts sampled", "drafts greedy"])
def test_lossless_with_disjoint_supports(sampled, impl, device):
    p, q = conditional(device, 4, 3, 1), conditional(device, 4, 2, 2)
    p[..., 2:] = MINUS_INF
    q[..., :2] = MINUS_INF
    tokens, result = speculate(p, q, DRAWS, 1.0, impl, sampled=sampled)
    assert (result.num_sampled == 1).all()
    assert_distributed_as(tokens, p, 1.0)


@drawn
def test_lossless_with_the_target_as_drafter(impl, device):
    """C32: p == q is always accepted, and the bonus token is the target's."""
    p = conditional(device, 3, 3, 1)
    tokens, result = speculate(p, p[:2], DRAWS, 1.0, impl)
    assert (result.num_sampled == 3).all()
    assert_distributed_as(tokens, p, 1.0)


def test_temperature_to_zero(impl, device):
    """The limit is the greedy rule."""
    p, q = conditional(device, 5, 4, 1), conditional(device, 5, 3, 2)
    _, cold = speculate(p, q, 10, 1e-4, impl)
    rows = requests(device, [4] * 10, temperature=0.0)
    previous, target, drafts = torch.zeros(10, dtype=torch.long, device=device), [], []
    for k in range(4):
        target.append(p[k][previous])
        previous = q[k][previous].argmax(dim=1) if k < 3 else previous
        drafts.append(previous)
    logits, drafts = torch.stack(target, dim=1).flatten(0, 1), torch.stack(drafts[:3], dim=1)
    greedy = rejection_sample(logits, drafts, **rows, impl=impl)
    assert all(torch.equal(one, other) for one, other in zip(cold, greedy, strict=True))


def test_an_impossible_token_is_never_accepted(impl, device):
    """C30: for every seed and every u, with and without draft logits."""
    draws = 10 if INTERPRET else 10000
    target = torch.tensor([0.0, 1.0, MINUS_INF, 2.0], device=device).repeat(2 * draws, 1)
    drafts = torch.full((draws, 1), 2, device=device)
    rows = requests(device, [2] * draws, temperature=1.0)
    draft_logits = torch.tensor([0.0, 0.0, 30.0, 0.0], device=device).expand(draws, 1, 4)
    for kwargs in ({}, {"draft_logits": draft_logits}):
        result = rejection_sample(target, drafts, **rows, **kwargs, impl=impl)
        assert (result.num_rejected == 1).all()
        assert not (result.output_ids == 2).any()


@drawn
def test_greedy_drafts_are_not_softmax_samples(impl, device):
    """C31: p = (.5, .3, .2), draft 0 picked: accepted half the time, residual (0, .6, .4), marginal p.

    Taking softmax (.6, .3, .1) for q instead gives (.833, 0, .167), and must be told apart.
    """
    draws = DRAWS
    p = torch.tensor([0.5, 0.3, 0.2], device=device)
    target = p.log().repeat(2 * draws, 1)
    rows = requests(device, [2] * draws, temperature=1.0)
    drafts = torch.zeros(draws, 1, device=device, dtype=torch.long)
    result = rejection_sample(target, drafts, **rows, impl=impl)
    first = torch.bincount(result.output_ids[:, 0], minlength=3).cpu()
    rejected = result.num_rejected.sum().item()
    assert stats.binomtest(rejected, draws, 0.5).pvalue > 1e-4
    assert stats.chisquare(first, draws * p.cpu().double()).pvalue > 1e-4
    recovered = result.output_ids[result.num_rejected == 1, 0]
    assert not (recovered == 0).any()
    assert stats.binomtest(int((recovered == 1).sum()), rejected, 0.6).pvalue > 1e-4
    wrong_q = torch.tensor([0.6, 0.3, 0.1], device=device).log().expand(draws, 1, 3)
    wrong = rejection_sample(target, drafts, **rows, draft_logits=wrong_q, impl=impl).output_ids[:, 0]
    assert not (wrong == 1).any()
    assert stats.chisquare(torch.bincount(wrong, minlength=3).cpu(), draws * p.cpu().double()).pvalue < 1e-6


def test_acceptance_uses_the_drafts_own_draw(impl, device):
    """The draw is keyed by the position before the draft and the draft itself: accepted where it is ≤ p / q."""
    draws = 20
    p, q = torch.tensor([0.1, 0.6, 0.3], device=device), torch.tensor([0.5, 0.3, 0.2], device=device)
    rows = requests(device, [2] * draws, temperature=1.0)
    drafts = torch.zeros(draws, 1, device=device, dtype=torch.long)
    result = rejection_sample(
        p.log().repeat(2 * draws, 1), drafts, **rows, draft_logits=q.log().expand(draws, 1, 3), impl=impl
    )
    u = uniform(rows["seeds"][rows["idx_mapping"].long()], rows["positions"][::2], drafts[:, 0], ACCEPT)
    assert torch.equal(result.num_rejected == 0, u * 0.5 <= 0.1)


def test_nearly_equal_distributions(impl, device):
    """C32: |p / q − 1| = 1e-6: whatever is recovered is a possible token, no NaN, and the padding is right."""
    draws = 10 if INTERPRET else DRAWS
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(6, generator=generator).to(device)
    q[3] = MINUS_INF
    p = q + torch.tensor([1e-6, -1e-6, 1e-6, 0, -1e-6, 1e-6], device=device)
    drafts = torch.multinomial(q.softmax(dim=0), draws, replacement=True)[:, None]
    rows = requests(device, [2] * draws, temperature=1.0)
    result = rejection_sample(p.repeat(2 * draws, 1), drafts, **rows, draft_logits=q.expand(draws, 1, 6), impl=impl)
    emitted = result.output_ids >= 0
    assert torch.equal(emitted.sum(dim=1), result.num_sampled.long())
    assert torch.equal(emitted.long().cumprod(dim=1).sum(dim=1), result.num_sampled.long())
    assert ((result.output_ids < 6) & (result.output_ids != 3)).all()


def test_suppressed_tokens_are_neither_accepted_nor_emitted(impl, device):
    draws = 20
    rows = requests(device, [2] * draws, temperature=1.0)
    rows["temperature"][::2] = 0
    target = torch.tensor([5.0, 1.0, 5.0, 0.0], device=device).repeat(2 * draws, 1)
    drafts = torch.zeros(draws, 1, device=device, dtype=torch.long)
    suppress_ids = torch.tensor([0, 2], device=device)
    for draft_logits in (None, torch.zeros(draws, 1, 4, device=device)):
        result = rejection_sample(
            target, drafts, **rows, draft_logits=draft_logits, suppress_ids=suppress_ids, impl=impl
        )
        assert (result.num_rejected == 1).all()
        assert ((result.last_sampled == 1) | (result.last_sampled == 3)).all()
        assert (result.last_sampled[rows["temperature"][rows["idx_mapping"].long()] == 0] == 1).all()


def ragged(device, vocab_size, seed=0, dtype=torch.float32):
    """A hard batch: ragged rows, mixed temperatures, padding, NaN, infinities, ties, placeholders, strided logits."""
    counts, num_drafts, num_slots = [3, 1, 4, 0, 2, 4], 3, 8
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(sum(counts), vocab_size + 5, generator=generator).mul(2).to(dtype)
    target[1, 4] = NAN
    target[2] = MINUS_INF
    target[4, 3] = float("inf")
    target[5] = NAN
    target[7, :] = target[7].round()
    draft_logits = torch.randn(num_slots, num_drafts + 1, vocab_size + 3, generator=generator).mul(2)
    draft_logits[2, 1] = MINUS_INF
    draft_logits[3, 0, :4] = NAN
    rows = requests(device, counts, slots=[5, 2, 3, 0, 7, -1])
    rows["temperature"] = torch.tensor([0.5, 0, 1.2, 0.6, 1, 0.9, 0, 0], device=device)
    rows["seeds"] = torch.randint(-(2**62), 2**62, (num_slots,), generator=generator).to(device)
    drafts = torch.randint(-1, vocab_size, (len(counts), 2 * num_drafts), generator=generator)[:, :num_drafts]
    likely = target[:, :vocab_size].nan_to_num(nan=-9).topk(2, dim=1).indices
    starts = rows["query_start_loc"].tolist()
    for r, count in enumerate(counts):
        for i in range(count - 1):
            if (r + i + seed) % 3:
                drafts[r, i] = likely[starts[r] + i, (r + seed) % 2]
    return target.to(device)[:, :vocab_size], drafts.to(device), rows, draft_logits.to(device)


@pytest.mark.skipif(not (INTERPRET or torch.cuda.is_available()), reason="no kernel to compare with")
@pytest.mark.parametrize("vocab_size", [37, 4200])
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_kernel_is_the_definition(seed, with_logits, vocab_size, request, device):
    """Exactly, with several blocks; 4,200 ids reach the second strip and the second group of one random number."""
    if vocab_size < 100:
        request.getfixturevalue("small_blocks")
    target, drafts, rows, draft_logits = ragged(device, vocab_size, seed)
    suppress_ids = torch.tensor([0, 2, vocab_size - 1], device=device)
    results, flags = [], []
    for impl in ("triton", "eager"):
        flags.append(torch.full((target.shape[0],), 9, device=device, dtype=torch.int32))
        results.append(
            rejection_sample(
                target,
                drafts,
                **rows,
                draft_logits=draft_logits if with_logits else None,
                suppress_ids=suppress_ids,
                nan_flag=flags[-1],
                impl=impl,
            )
        )
    assert all(torch.equal(kernel, eager) for kernel, eager in zip(*results, strict=True))
    assert torch.equal(*flags)


def test_a_request_does_not_depend_on_its_batch(impl, small_blocks, device):
    """C26: alone or among others in another order, the same tokens."""
    target, drafts, rows, draft_logits = ragged(device, 37)
    together = rejection_sample(target, drafts, **rows, draft_logits=draft_logits, impl=impl)
    starts = rows["query_start_loc"].tolist()
    for r in (4, 2, 0):
        part = slice(starts[r], starts[r + 1])
        alone = rows | {
            "query_start_loc": torch.tensor([0, starts[r + 1] - starts[r]], device=device),
            "idx_mapping": rows["idx_mapping"][r : r + 1],
            "positions": rows["positions"][part],
        }
        one = rejection_sample(target[part], drafts[r : r + 1], **alone, draft_logits=draft_logits, impl=impl)
        assert torch.equal(one.output_ids[0], together.output_ids[r])


def test_refusals_name_the_argument():
    device = torch.device("cpu")
    logits, drafts, rows = torch.zeros(3, 8), torch.zeros(1, 2).long(), requests(device, [3])
    with pytest.raises(TypeError, match="draft_tokens: got float32"):
        rejection_sample(logits, drafts.float(), **rows)
    with pytest.raises(ValueError, match=r"draft_tokens: got shape \[2\]"):
        rejection_sample(logits, drafts[0], **rows)
    with pytest.raises(ValueError, match=r"query_start_loc: got shape \[2\], needs \[3\]"):
        rejection_sample(logits, drafts.expand(2, 2), **rows)
    with pytest.raises(ValueError, match=r"draft_logits: got shape \[1, 1, 8\], needs at least \[1, 2, 8\]"):
        rejection_sample(logits, drafts, **rows, draft_logits=torch.zeros(1, 1, 8))
    with pytest.raises(ValueError, match=r"nan_flag: got shape \[2\], needs \[3\]"):
        rejection_sample(logits, drafts, **rows, nan_flag=torch.zeros(2).bool())
    with pytest.raises(ValueError, match="target_logits: got strides"):
        rejection_sample(torch.zeros(8, 3).t(), drafts, **rows)
    with pytest.raises(ValueError, match="target_logits: got 0 columns"):
        rejection_sample(torch.zeros(3, 0), drafts, **rows)


@pytest.mark.compiled
@pytest.mark.parametrize("with_logits", [False, True])
def test_opcheck(with_logits, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    target, drafts, rows, draft_logits = ragged(device, 20)
    num_reqs, num_drafts = drafts.shape
    flag = torch.zeros(target.shape[0], device=device).bool()
    inputs = (
        target,
        drafts,
        *rows.values(),
        *((draft_logits, drafts[:1, 0].clamp(min=0), flag) if with_logits else (None,) * 3),
    )
    outputs = (torch.zeros(num_reqs, num_drafts + 1, device=device).long(), torch.zeros(num_reqs, device=device).int())
    outputs = (*outputs, outputs[1].clone(), torch.zeros(num_reqs, device=device).long())
    args = (*inputs, *outputs, device.type == "cuda")
    torch.library.opcheck(torch.ops.tridraft.rejection_sample.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty
    target, drafts, rows, draft_logits = ragged(device, 20)

    def verify(target, drafts):
        result = rejection_sample(target, drafts, **rows, draft_logits=draft_logits)
        return result.output_ids, result.num_sampled + 1

    compiled = torch.compile(verify, fullgraph=True, backend="aot_eager")
    got, want = compiled(target, drafts), verify(target, drafts)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_launch_ladder():
    for vocab_size in (1, 37, 1024, 4095, 4097, 5120, 32000, 262144):
        launch = rejection_launch(vocab_size)
        assert launch.block // (32 * launch.num_warps) <= 32
        drawn = {
            counter // 1024 * 4096 + counter % 1024 + strip * 1024
            for counter in range(launch.draw_blocks(vocab_size) * launch.width)
            for strip in range(4)
        }
        assert set(range(vocab_size)) <= drawn
    assert rejection_launch(262144).draw_blocks(262144) == 64


@pytest.mark.compiled
def test_the_batch_reaches_no_variant():
    found = set()
    for num_reqs in (1, 2, 16, 33, 64):
        rows = requests(torch.device("cpu"), [4] * num_reqs)
        logits, drafts = torch.zeros(1, 4096).expand(4 * num_reqs, -1), torch.zeros(num_reqs, 3).long()
        found |= variants(lambda: rejection_sample(logits, drafts, **rows))  # noqa: B023
    assert len(found) == 2


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "dtype", "with_logits"),
    [
        (262144, 3, torch.bfloat16, True),
        (1000, 16, torch.float32, False),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, vocab_size, num_drafts, dtype, with_logits):
    rows = requests(torch.device("cpu"), [num_drafts + 1] * 2)
    logits = torch.zeros(2 * num_drafts + 2, vocab_size, dtype=dtype)
    drafts = torch.zeros(2, num_drafts, dtype=torch.long)
    if with_logits:
        flag, suppress_ids = torch.zeros(len(logits)).bool(), torch.tensor([1])
        draft_logits = torch.zeros(2, num_drafts, vocab_size)
        rows |= {"draft_logits": draft_logits, "nan_flag": flag, "suppress_ids": suppress_ids}
    assert_compiles(lambda: rejection_sample(logits, drafts, **rows), target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gemmas_vocabulary(dtype, device):
    vocab_size = 262144
    target, drafts, rows, draft_logits = ragged(device, vocab_size, dtype=dtype)
    suppress_ids = torch.tensor([258882, 258883], device=device)
    kwargs = {**rows, "draft_logits": draft_logits, "suppress_ids": suppress_ids}
    kernel, eager = (rejection_sample(target, drafts, **kwargs, impl=impl) for impl in ("triton", "eager"))
    assert all(torch.equal(one, other) for one, other in zip(kernel, eager, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("with_logits", [False, True])
def test_replays_on_changed_inputs(with_logits, device):
    target, drafts, rows, draft_logits = ragged(device, 5000)
    kwargs = {**rows, "draft_logits": draft_logits if with_logits else None}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    seen = []
    try:
        with torch.cuda.graph(graph):
            result = rejection_sample(target, drafts, **kwargs)
        for step in range(3):
            target.normal_()
            drafts.copy_(torch.roll(drafts, 1, dims=0))
            rows["temperature"].fill_(step / 2)
            rows["positions"] += 9
            graph.replay()
            seen.append(([one.clone() for one in result], rejection_sample(target, drafts, **kwargs)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for replayed, again in seen:
        assert all(torch.equal(one, other) for one, other in zip(replayed, again, strict=True))
    assert not torch.equal(seen[0][0][0], seen[1][0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_logits_beyond_two_to_the_31st_element(temperature, device):
    """C22: the last request's rows lie past the 2³¹st element."""
    num_reqs, vocab_size = 4200, 262144
    logits = torch.zeros(2 * num_reqs, vocab_size, device=device, dtype=torch.bfloat16)
    logits[-2, 77], logits[-1, 88] = 9, 9
    drafts = torch.full((num_reqs, 1), 77, device=device)
    result = rejection_sample(logits, drafts, **requests(device, [2] * num_reqs, temperature=temperature))
    assert result.output_ids[-1].tolist() == [77, 88]
