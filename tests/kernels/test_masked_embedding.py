"""Masked embedding against float64, transformers and the noise of `random.py`."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from _aot import TARGETS, assert_compiles
from _compare import ROUNDING
from _variants import variants
from conftest import INTERPRET
from tridraft.kernels import masked_embedding
from tridraft.kernels._masked_embedding_kernels import masked_embedding_launch
from tridraft.kernels.masked_embedding import masked_embedding_logits, masked_embedding_sample
from tridraft.kernels.random import DRAFT, gumbel

MINUS_INF = float("-inf")
# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
# N, H, C, V, top_k: one tile a centroid, three of them (the last in part), every centroid, one candidate a centroid
SHAPES = [(1, 16, 8, 32, 2), (3, 40, 12, 480, 3), (2, 32, 4, 80, 4), (2, 64, 40, 40, 1)]


@pytest.fixture(params=["search", "row", "centroid"])
def order(request, monkeypatch):
    """All ways of reading candidates, in small pieces, whatever the ladder prefers."""

    def launch(*args):
        return dataclasses.replace(masked_embedding_launch(*args), order=request.param, tile=16)

    monkeypatch.setattr(masked_embedding, "masked_embedding_launch", launch)


def model(device, num_rows, hidden_size, num_centroids, vocab_size, dtype=torch.float32):
    """hidden, centroids, token_ordering and weight; hidden and weight are views with wide rows."""
    hidden = torch.randn(num_rows, hidden_size + 7, device=device).to(dtype)[:, :hidden_size]
    centroids = torch.randn(num_centroids, hidden_size, device=device).to(dtype)
    weight = torch.randn(vocab_size, 2 * hidden_size, device=device).to(dtype)[:, hidden_size:]
    return hidden, centroids, torch.randperm(vocab_size, device=device), weight


def exact_logits(hidden, centroids, token_ordering, weight, top_k, suppressed=()):
    """Float64 logits, row by row; the scores' order is exact."""
    out = torch.full((hidden.shape[0], weight.shape[0]), MINUS_INF, dtype=torch.float64, device=hidden.device)
    clusters = token_ordering.view(centroids.shape[0], -1)
    for n, row in enumerate(hidden.double()):
        scores = (centroids.double() @ row).tolist()
        best = sorted(range(len(scores)), key=lambda c: (-scores[c], c))[:top_k]
        ids = torch.cat([clusters[c] for c in best])
        out[n, ids] = weight[ids].double() @ row
    out[:, list(suppressed)] = MINUS_INF
    return out


def rows_of(device, num_rows, temperature=0.0) -> dict[str, Any]:
    """Sampling arguments with a slot of its own for each row, in reverse order."""
    return {
        "idx_mapping": torch.arange(num_rows, device=device).flip(0).int(),
        "temperature": torch.full((num_rows,), temperature, device=device),
        "seeds": torch.arange(num_rows, device=device) * 7919 - 3,
        "positions": torch.arange(num_rows, device=device) * 5 + 2**33,
    }


def assert_sums_of_float32(logits, exact, hidden, weight):
    """Each logit is as near to float64 as any order of float32 additions brings its products.

    A sum of H products rounds each of them and each partial sum once, and Σ|h · w| bounds a partial sum: H · 2⁻²⁴ ·
    Σ|h · w| in all, twice that where tensor cores add, which cut digits off. At H = 40, 97% of sums of tf32 products
    miss it, and 99.9% of sums without the last column. The error of PyTorch's own sum is no bound: it is one draw.
    """
    outside = exact.isinf()
    assert torch.equal(logits.double()[outside], exact[outside]), "infinities differ"
    unit = ROUNDING[torch.float32] * (1 if hidden.dtype == torch.float32 else 2)
    allowed = hidden.shape[1] * unit * (hidden.double().abs() @ weight.double().abs().T)
    error = (logits.double() - exact).masked_fill(outside, 0).abs()
    assert (error <= allowed).all(), f"error up to {(error / allowed).max():.2f} of what sums explain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_logits(shape, dtype, impl, device):
    *sizes, top_k = shape
    tensors = model(device, *sizes, dtype=dtype)
    suppress_ids = torch.tensor([0, 5, 5], device=device)
    out = masked_embedding_logits(*tensors, top_k, suppress_ids=suppress_ids, impl=impl)
    assert out.dtype == torch.float32
    assert_sums_of_float32(out, exact_logits(*tensors, top_k, (0, 5)), tensors[0], tensors[3])


def test_logits_are_those_of_transformers(impl, device, monkeypatch):
    monkeypatch.undo()  # Dynamo, which transformers imports, would remember the poisoned torch.empty
    modeling = pytest.importorskip("transformers.models.gemma4_assistant.modeling_gemma4_assistant")
    text = SimpleNamespace(vocab_size=96, hidden_size=32)
    config = SimpleNamespace(get_text_config=lambda: text, num_centroids=24, centroid_intermediate_top_k=5)
    embedder = modeling.Gemma4AssistantMaskedEmbedder(config).to(device)
    hidden, centroids, token_ordering, weight = model(device, 3, 32, 24, 96)
    with torch.no_grad():
        embedder.centroids.weight.copy_(centroids)
        embedder.token_ordering.copy_(token_ordering)
        theirs = embedder(hidden[:, None], weight)[:, 0]
    ours = masked_embedding_logits(hidden, centroids, token_ordering, weight, 5, impl=impl)
    outside = ours.isinf()
    assert outside.sum(dim=1).tolist() == [96 - 5 * 4] * 3
    torch.testing.assert_close(ours.masked_fill(outside, 0), theirs.masked_fill(outside, 0))
    assert theirs[outside].unique().numel() == 1  # their finite fill


SCORES = {
    "all equal": [1.0] * 12,
    "ties at the last place": [3, 1, 2, 2, 2, 5, 2, 1, 2, 0, 2, 2],
    "both zeros are equal": [-0.0, 0.0, -1, 0.0, -0.0, -2, 0.0, -3, 0.0, -4, -0.0, 0.0],
    "thirty decades": [1e-30, -1e30, 1e30, 0, 1e-20, -1e-20, 1e10, 1, -1, 1e-38, 1e-45, -1e-45],
    "neighbouring floats": [1.0 + i % 7 * 2**-23 for i in range(12)],
    "infinities": [float("inf"), 0, MINUS_INF, 1, float("inf"), MINUS_INF, -5, float("inf"), 3, MINUS_INF, 2, -1],
    "mostly −inf": [MINUS_INF] * 7 + [0.0, 1.0] + [MINUS_INF] * 3,
    "NaN loses": [float("nan"), 1, float("nan"), 7, 2, float("nan"), 3, 4, float("nan"), 0, -1, float("nan")],
    "only NaN": [float("nan")] * 12,
    "the best lie eight apart": [100.0 - c if c % 8 == 3 else -c for c in range(64)],
    "the best lie side by side": [100.0 - c if 20 < c < 30 else -c for c in range(64)],
}


def best_centroids(scores):
    """Indices by falling score, NaN as −inf, ties by index."""
    value = [score if score == score else MINUS_INF for score in scores]  # noqa: PLR0124
    return sorted(range(len(value)), key=lambda c: (-value[c], c))


@pytest.mark.parametrize("top_k", [1, 7])
@pytest.mark.parametrize("case", SCORES)
def test_centroids_are_selected_exactly(case, top_k, impl, device):
    """With hidden size 1 the scores are the centroids; each has one token, so the finite logits are the selection."""
    scores = torch.tensor(SCORES[case], device=device, dtype=torch.float32)[:, None]
    one, token_ordering = torch.ones(1, 1, device=device), torch.arange(len(scores), device=device)
    logits = masked_embedding_logits(one, scores, token_ordering, torch.ones_like(scores), top_k, impl=impl)
    expected = best_centroids(scores[:, 0].tolist())[:top_k]
    assert logits.isfinite()[0].nonzero()[:, 0].tolist() == sorted(expected)


@pytest.mark.parametrize("top_k", [1, 7])
@pytest.mark.parametrize("case", SCORES)
def test_samples_come_from_exactly_those(case, top_k, impl, order, device):
    """The worse a centroid's score, the better its only token: the last of the selected ones wins."""
    scores = torch.tensor(SCORES[case], device=device, dtype=torch.float32)[:, None]
    one, token_ordering = torch.ones(1, 1, device=device), torch.arange(len(scores), device=device)
    best = best_centroids(scores[:, 0].tolist())
    weight = torch.empty_like(scores)
    weight[best, 0] = torch.arange(1.0, len(scores) + 1, device=device)
    out = masked_embedding_sample(one, scores, token_ordering, weight, top_k, **rows_of(device, 1), impl=impl)
    assert out.item() == best[top_k - 1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_sample(shape, temperature, impl, order, device):
    """The argmax of float64 logits and the noise at each vocabulary id; row 1 is greedy, the last is padding."""
    num_rows, _, _, vocab_size, top_k = shape
    tensors = model(device, *shape[:-1])
    suppress_ids = torch.tensor([3, 17], device=device)
    rows = rows_of(device, num_rows, temperature)
    slots = rows["idx_mapping"].long()
    rows["temperature"][slots[1]] = 0
    scale = rows["temperature"][slots, None]
    scores = exact_logits(*tensors, top_k, suppress_ids.tolist())
    token_ids = torch.arange(vocab_size, device=device)
    noise = gumbel(rows["seeds"][slots, None], rows["positions"][:, None], token_ids, DRAFT)
    expected = torch.where(scale > 0, scores / scale.where(scale > 0, 1) + noise, scores).argmax(dim=1)
    if num_rows > 2:
        rows["idx_mapping"][-1] = -1
        expected[-1] = 4321
    out = torch.full((num_rows, 2), 4321, device=device, dtype=torch.int32)
    flag = torch.full((num_rows,), 9, device=device, dtype=torch.int32)
    result = masked_embedding_sample(
        *tensors, top_k, **rows, suppress_ids=suppress_ids, nan_flag=flag, out=out[:, 0], impl=impl
    )
    assert result.tolist() == expected.tolist()
    assert out[:, 1].tolist() == [4321] * num_rows
    assert flag.tolist() == ([0, 0, 9] if num_rows > 2 else [0, 0])
    if num_rows == 2:
        assert torch.equal(
            masked_embedding_sample(*tensors, top_k, **rows, suppress_ids=suppress_ids, impl=impl), expected
        )


def test_ties_give_the_lowest_id(impl, order, device):
    """Equal logits in different tiles and centroids: the ordering lists high ids first."""
    token_ordering = torch.arange(32, device=device).flip(0)
    centroids, weight = torch.arange(8.0, device=device)[:, None], torch.zeros(32, 1, device=device)
    weight[[29, 11, 7]] = 2  # 7 and 29 are candidates of centroids 6 and 0
    one = torch.ones(1, 1, device=device)
    for top_k, expected in ((8, 7), (2, 7), (1, 0)):
        out = masked_embedding_sample(one, centroids, token_ordering, weight, top_k, **rows_of(device, 1), impl=impl)
        assert out.item() == expected
    weight[[0, 1]] = torch.tensor([[-0.0], [0.0]], device=device)
    weight[2:] = -1
    out = masked_embedding_sample(one, centroids, token_ordering, weight, 1, **rows_of(device, 1), impl=impl)
    assert out.item() == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_never_wins(temperature, impl, order, device):
    hidden, centroids, token_ordering, weight = (tensor.clone() for tensor in model(device, 3, 16, 8, 32))
    hidden[1] = float("nan")
    rows = rows_of(device, 3, temperature)
    logits = masked_embedding_logits(hidden, centroids, token_ordering, weight, 3, impl="eager")
    winner = logits[0].argmax()
    weight[winner] = float("nan")
    flag = torch.ones(3, dtype=torch.bool, device=device)
    suppress_ids = torch.tensor([0, 1, 3], device=device)
    args = (hidden, centroids, token_ordering, weight, 3)
    out = masked_embedding_sample(*args, **rows, suppress_ids=suppress_ids, nan_flag=flag, impl=impl)
    assert out[0] != winner
    assert out[1] == 2  # the lowest eligible id
    assert flag.tolist() == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("outside", [[0, 1, 2], [2]])
def test_all_candidates_suppressed(outside, temperature, impl, order, device):
    """The lowest eligible id of the vocabulary, candidate or not: the dense head's rule."""
    tensors = model(device, 2, 16, 8, 32)
    candidates = masked_embedding_logits(*tensors, 2, impl="eager").isfinite().any(dim=0).nonzero()[:, 0]
    suppressed = sorted({*candidates.tolist(), *outside})
    flag = torch.ones(2, dtype=torch.int32, device=device)
    out = masked_embedding_sample(
        *tensors,
        2,
        **rows_of(device, 2, temperature),
        suppress_ids=torch.tensor(suppressed, device=device),
        nan_flag=flag,
        impl=impl,
    )
    assert out.tolist() == [min(set(range(32)) - set(suppressed))] * 2
    assert flag.tolist() == [0, 0]


def test_candidates_hold_all_the_probability(impl, device):
    """C3: mass exactly 0 outside the candidates, and no NaN where a candidate is −inf."""
    hidden, centroids, token_ordering, weight = (tensor.clone() for tensor in model(device, 2, 16, 8, 32))
    selected = masked_embedding_logits(hidden, centroids, token_ordering, weight, 2, impl="eager").isfinite()
    candidate = selected[0].nonzero()[0, 0]
    weight[candidate] = 0
    weight[candidate, 0] = MINUS_INF
    hidden[:, 0] = hidden[:, 0].abs() + 0.1
    centroids[:, 0] = 0
    selected = masked_embedding_logits(
        hidden, centroids, token_ordering, torch.ones_like(weight), 2, impl="eager"
    ).isfinite()
    weight[selected[0].nonzero()[0, 0]] = weight[candidate]
    probability = masked_embedding_logits(hidden, centroids, token_ordering, weight, 2, impl=impl).softmax(dim=1)
    assert probability.isfinite().all()
    assert not probability[~selected].any()
    assert probability[0][selected[0]].eq(0).sum() >= 1
    torch.testing.assert_close(probability.sum(dim=1), torch.ones(2, device=device))


def test_a_row_does_not_depend_on_its_batch(impl, order, device):
    """Alone, among others, beside padding: the same bits."""
    tensors = model(device, 4, 48, 16, 64)
    rows = rows_of(device, 4, 0.9)
    together = masked_embedding_sample(*tensors, 4, **rows, impl=impl)
    logits = masked_embedding_logits(*tensors, 4, impl=impl)
    for n in (0, 3):
        part = (tensors[0][n : n + 1], *tensors[1:])
        alone = rows | {name: rows[name][n : n + 1] for name in ("idx_mapping", "positions")}
        assert masked_embedding_sample(*part, 4, **alone, impl=impl).item() == together[n]
        assert impl == "eager" or torch.equal(masked_embedding_logits(*part, 4, impl=impl)[0], logits[n])


@pytest.mark.parametrize(("num_rows", "num_centroids", "top_k"), [(40, 4, 2), (2, 2**15 - 1, 2)])
def test_many_rows_of_a_centroid_and_many_centroids(num_rows, num_centroids, top_k, impl, order, device):
    """More members than a product has rows, rows of padding among them, and as many centroids as there may be."""
    vocab_size = 8 * num_centroids if num_centroids < 100 else num_centroids
    tensors = model(device, num_rows, 16, num_centroids, vocab_size)
    rows = rows_of(device, num_rows)
    rows["temperature"][::2] = 0.7
    rows["idx_mapping"][5::11] = -1  # of the first case
    tokens = torch.full((num_rows,), -7, device=device)
    masked_embedding_sample(*tensors, top_k, **rows, out=tokens, impl=impl)
    logits = exact_logits(*tensors, top_k)
    ids = torch.arange(vocab_size, device=device)
    for row, slot in enumerate(rows["idx_mapping"].tolist()):
        scores = logits[row]
        if rows["temperature"][slot] > 0:
            scores = scores / 0.7 + gumbel(rows["seeds"][slot], rows["positions"][row], ids, DRAFT)
        assert tokens[row] == (scores.argmax() if slot >= 0 else -7)


def test_samples_follow_the_softmax(impl, device):
    """Chi-square of draws at one row's logits, one seed each."""
    draws = 30 if INTERPRET and impl == "triton" else 20000
    hidden, centroids, token_ordering, weight = model(device, 1, 16, 4, 12)
    logits = masked_embedding_logits(hidden, centroids, token_ordering, weight * 0.3, 2, impl="eager")
    tensors = (hidden.expand(draws, -1), centroids, token_ordering, weight * 0.3)
    tokens = masked_embedding_sample(*tensors, 2, **rows_of(device, draws, 0.8), impl=impl)
    counts = torch.bincount(tokens, minlength=12)
    expected = draws * (logits[0].double() / 0.8).softmax(dim=0)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert stats.chisquare(counts[kept].cpu(), expected[kept].cpu()).pvalue > 1e-4


def test_empty_batch(impl, device):
    tensors = model(device, 0, 16, 8, 32)
    assert masked_embedding_sample(*tensors, 2, **rows_of(device, 0), impl=impl).shape == (0,)
    assert masked_embedding_logits(*tensors, 2, impl=impl).shape == (0, 32)


def test_refusals_name_the_argument():
    hidden, centroids, token_ordering, weight = model(torch.device("cpu"), 2, 16, 8, 32)
    with pytest.raises(ValueError, match="top_k: got 9"):
        masked_embedding_logits(hidden, centroids, token_ordering, weight, 9)
    with pytest.raises(ValueError, match="weight: got 30 rows, needs a multiple of the 8 centroids"):
        masked_embedding_logits(hidden, centroids, token_ordering[:30], weight[:30], 2)
    with pytest.raises(TypeError, match="centroids: got float16, needs float32"):
        masked_embedding_logits(hidden, centroids.half(), token_ordering, weight, 2)
    with pytest.raises(ValueError, match=r"token_ordering: got shape \[31\], needs \[32\]"):
        masked_embedding_logits(hidden, centroids, token_ordering[1:], weight, 2)
    with pytest.raises(ValueError, match="weight: got strides"):
        masked_embedding_logits(hidden, centroids, token_ordering, torch.zeros(16, 32).t(), 2)
    rows = rows_of(torch.device("cpu"), 2)
    with pytest.raises(ValueError, match=r"positions: got shape \[1\], needs \[2\]"):
        masked_embedding_sample(
            hidden, centroids, token_ordering, weight, 2, **(rows | {"positions": rows["positions"][:1]})
        )
    with pytest.raises(ValueError, match="hidden: got 1048576 rows"):
        masked_embedding_logits(hidden[:1].expand(2**20, -1), centroids, token_ordering, weight, 2)
    with pytest.raises(TypeError, match="suppress_ids: got int32"):
        masked_embedding_logits(hidden, centroids, token_ordering, weight, 2, suppress_ids=torch.zeros(1).int())


@pytest.mark.compiled
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_opcheck(shape, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    num_rows, _, _, vocab_size, top_k = shape
    tensors, triton = model(device, *shape[:-1]), device.type == "cuda"
    rows = rows_of(device, num_rows, 1.0)
    suppress_ids = torch.tensor([1], device=device)
    for suppressed, flag in ((suppress_ids, torch.zeros(num_rows, device=device).bool()), (None, None)):
        out = torch.zeros(num_rows, device=device).long()
        args = (*tensors, top_k, *rows.values(), suppressed, flag, out, triton)
        torch.library.opcheck(torch.ops.tridraft.masked_embedding_sample.default, args)
        logits = torch.zeros(num_rows, vocab_size, device=device)
        args = (*tensors, top_k, suppressed, logits, triton)
        torch.library.opcheck(torch.ops.tridraft.masked_embedding_logits.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty
    tensors, rows = model(device, 3, 16, 8, 32), rows_of(device, 3, 1.0)

    def head(hidden):
        tokens = masked_embedding_sample(hidden, *tensors[1:], 2, **rows)
        return tokens + 1, masked_embedding_logits(hidden, *tensors[1:], 2)

    got = torch.compile(head, fullgraph=True, backend="aot_eager")(tensors[0])
    assert all(torch.equal(one, other) for one, other in zip(got, head(tensors[0]), strict=True))


def test_launch_ladder():
    for _, arch in TARGETS.values():
        for num_rows in (1, 2, 8, 9, 32, 33, 128, 1024):
            launch = masked_embedding_launch(num_rows, 2048, 262144, 32)
            assert launch.order == ("centroid" if num_rows > 16 else "row" if num_rows > 2 else "search")
            for hidden_size, element_size in itertools.product((16, 256, 1024, 4096), (2, 4)):
                assert launch.shared_memory(hidden_size, element_size) <= arch.shared_memory
        assert masked_embedding_launch(4, 16, 64, 4).tile == 16  # the smallest of a dot


@pytest.mark.compiled
def test_the_batch_reaches_no_variant():
    """One set of kernels for a few rows, for more, by centroid, and with many rows' scores."""
    centroids, token_ordering = torch.zeros(2048, 256), torch.zeros(262144).long()
    head = (centroids, token_ordering, torch.zeros(1, 256).expand(262144, -1), 32)
    for batch, num_kernels in ((1, 2), 2), ((3, 8, 16), 4), ((17, 33, 64), 4), ((65, 70, 128), 4):
        found = set()
        for num_rows in batch:
            rows, hidden = rows_of(torch.device("cpu"), num_rows), torch.zeros(num_rows, 256)
            found |= variants(lambda: masked_embedding_sample(hidden, *head, **rows))  # noqa: B023
        assert len(found) == num_kernels


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("target", "num_rows", "dtype"),
    [
        *itertools.product(TARGETS, (1, 16, 128), [torch.bfloat16]),
        ("sm_90", 8, torch.float32),
        ("sm_120", 33, torch.float32),  # the least shared memory, on either vendor's side
        ("gfx942", 33, torch.float32),
    ],
)
def test_compiles_ahead_of_time(target, num_rows, dtype):
    """With every optional argument, and for a few rows with none."""
    hidden, centroids = torch.zeros(num_rows, 256, dtype=dtype), torch.zeros(2048, 256, dtype=dtype)
    weight = torch.zeros(1, 256, dtype=dtype).expand(262144, -1)
    head = (hidden, centroids, torch.zeros(262144).long(), weight, 32)
    suppress: dict[str, Any] = {} if num_rows == 16 else {"suppress_ids": torch.tensor([1, 2])}
    flag: dict[str, Any] = {} if num_rows == 16 else {"nan_flag": torch.zeros(num_rows).bool()}
    rows = rows_of(torch.device("cpu"), num_rows)
    assert_compiles(lambda: masked_embedding_sample(*head, **rows, **suppress, **flag), target)
    if num_rows == 1:
        assert_compiles(lambda: masked_embedding_logits(*head, **suppress), target)


def assistant(device, num_rows):
    """The shapes of Gemma 4's E2B and E4B assistants."""
    hidden = torch.randn(num_rows, 256, device=device, dtype=torch.bfloat16)
    centroids = torch.randn(2048, 256, device=device, dtype=torch.bfloat16)
    weight = torch.randn(262144, 256, device=device, dtype=torch.bfloat16)
    return hidden, centroids, torch.randperm(262144, device=device), weight


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 24, 33, 130])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_at_real_size(num_rows, temperature, device):
    tensors, rows = assistant(device, num_rows), rows_of(device, num_rows, temperature)
    rows["idx_mapping"][num_rows // 2 + 1 :: 7] = -1
    suppress_ids = torch.tensor([258882, 258883], device=device)
    outs = [
        masked_embedding_sample(
            *tensors, 32, **rows, suppress_ids=suppress_ids, out=torch.zeros(num_rows, device=device).long(), impl=impl
        )
        for impl in ("triton", "eager")
    ]
    assert torch.equal(*outs)
    for n in (0, num_rows // 2):
        alone = rows | {name: rows[name][n : n + 1] for name in ("idx_mapping", "positions")}
        one = masked_embedding_sample(tensors[0][n : n + 1], *tensors[1:], 32, **alone, suppress_ids=suppress_ids)
        assert one.item() == outs[0][n]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 20, 100])
def test_replays_on_changed_inputs(num_rows, device):
    tensors, rows = assistant(device, num_rows), rows_of(device, num_rows, 1.0)
    suppress_ids = torch.tensor([258882, 258883], device=device)
    args, kwargs = (*tensors, 32), {**rows, "suppress_ids": suppress_ids}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            tokens = masked_embedding_sample(*args, **kwargs)
            logits = masked_embedding_logits(*args, suppress_ids=suppress_ids)
        seen = []
        for step in range(3):
            tensors[0].normal_()
            rows["temperature"].fill_(step % 2)
            rows["positions"] += 1
            graph.replay()
            again = masked_embedding_sample(*args, **kwargs), masked_embedding_logits(*args, suppress_ids=suppress_ids)
            seen.append((tokens.clone(), logits.clone(), *again))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for replayed, replayed_logits, again, again_logits in seen:
        assert torch.equal(replayed, again)
        assert torch.equal(replayed_logits, again_logits)
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.gpu
def test_weights_and_logits_beyond_two_to_the_31st_element(device):
    vocab_size = 2**21 + 64
    hidden = torch.ones(1, 1024, device=device, dtype=torch.bfloat16)
    weight = torch.zeros(vocab_size, 1024, device=device, dtype=torch.bfloat16)
    weight[-5] = 1
    centroids = torch.zeros(32, 1024, device=device, dtype=torch.bfloat16)
    centroids[31] = 1
    args = (hidden, centroids, torch.arange(vocab_size, device=device), weight)
    assert masked_embedding_sample(*args, 1, **rows_of(device, 1)).item() == vocab_size - 5
    many = (hidden.expand(1030, -1), *args[1:])
    assert masked_embedding_logits(*many, 1)[-1].argmax().item() == vocab_size - 5
