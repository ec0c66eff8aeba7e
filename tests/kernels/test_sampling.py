"""Draft sampling: token tables, the definition on the same uniforms, and the distribution itself."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from _aot import TARGETS, assert_compiles, record_launches
from conftest import INTERPRET
from tridraft.kernels import sampling
from tridraft.kernels._op import Impl, next_power_of_2
from tridraft.kernels._sampling_kernels import most_score, slack_below
from tridraft.kernels.random import gumbel_of_word
from tridraft.kernels.sampling import SampleConfig, draft_sample, sample_config

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def sampler(logits, temperature, *, impl, idx_mapping=None, seeds=None, positions=None, **options):
    """`draft_sample` with a slot a row."""
    rows, device = logits.shape[0], logits.device
    return draft_sample(
        logits,
        torch.arange(rows, device=device) if idx_mapping is None else idx_mapping,
        torch.tensor(temperature, dtype=torch.float32, device=device).expand(rows).contiguous(),
        torch.arange(rows, device=device) * 7919 - 3 if seeds is None else seeds,
        torch.arange(rows, device=device) + 2**32 - 1 if positions is None else positions,
        impl=impl,
        **options,
    )


@pytest.fixture(params=["walk"] if INTERPRET else ["ladder", "narrow", "wide", "walk", "pairs"])
def config(request, monkeypatch):
    """The ladder's choice, and each way of cutting a row into tiles."""
    choices = {
        "narrow": SampleConfig(256, 1, 2),
        "wide": SampleConfig(1024, 1, 4),
        "walk": SampleConfig(1024 if INTERPRET else 128, 3, 1),
        "pairs": SampleConfig(256, 2, 1),
    }
    if request.param != "ladder":
        monkeypatch.setattr(sampling, "sample_config", lambda *args: choices[request.param])
    return request.param


def test_c28_ties_go_to_the_lowest_id(config, impl, device):
    logits = torch.zeros(5, 12_345, device=device)
    logits[1, [8191, 8192]] = 1
    logits[2, [4000, 12_344]] = 1
    logits[3, [1023, 1024]] = INF
    logits[4, [12_343, 12_344]] = 1
    assert sampler(logits, 0.0, impl=impl).tolist() == [0, 8191, 4000, 1023, 12_343]
    logits[2] = INF
    assert sampler(logits[2:4], 0.7, impl=impl).tolist() == [0, 1023]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_c28_nan_never_wins_and_no_candidate_gives_the_lowest_eligible_id(temperature, config, impl, device):
    logits = torch.full((5, 5000), NAN, device=device)
    logits[1, 4321] = -INF
    logits[2, 4097] = -1e30
    logits[3] = -INF
    logits[4, [0, 1, 2]] = 5.0
    flag = torch.zeros(5, dtype=torch.int32, device=device)
    suppress = torch.tensor([0, 2, 1], device=device)
    assert sampler(logits, temperature, impl=impl, nan_flag=flag).tolist()[:4] == [0, 0, 4097, 0]
    assert flag.tolist() == [1, 0, 0, 0, 0]
    got = sampler(logits, temperature, impl=impl, nan_flag=flag, suppress_ids=suppress)
    assert got.tolist() == [3, 3, 4097, 3, 3]
    assert flag.tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0.1, 1.0] if INTERPRET else [0.1, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16], ids=str)
def test_c28_the_lowest_finite_logits_are_looked_at(dtype, temperature, config, impl, device):
    """As masked logits are written elsewhere. What they are divided by may leave nothing above −inf."""
    lowest = torch.finfo(dtype).min
    logits = torch.full((5, 5000), lowest, device=device, dtype=dtype)
    logits[1] = -INF
    logits[1, 4321] = lowest
    logits[2] = -1e38
    logits[2, 4500] = -3e37
    logits[3] = NAN
    logits[3, [0, 4999]] = lowest
    logits[4, 4200] = -2e4
    suppress = torch.tensor([0], device=device)
    flag, there = (torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2))
    got = sampler(logits, temperature, impl=impl, nan_flag=flag, suppress_ids=suppress)
    assert (got != 0).all()
    assert got[4] == 4200
    assert got.tolist() == sampler(logits, temperature, impl="eager", nan_flag=there, suppress_ids=suppress).tolist()
    assert flag.tolist() == there.tolist()


def test_c29_whole_groups_and_what_is_kept_of_them(config, impl, device):
    """A vocabulary of whole groups is loaded without masks; what lies behind it in a row stays as it is."""
    logits = torch.randn(3, 8192, device=device)
    logits[:, 5000] = NAN
    kept, step = torch.full((3, 1, 8200), 7.0, device=device), torch.zeros((), dtype=torch.int64, device=device)
    options: dict[str, Any] = {"suppress_ids": torch.tensor([3, 8191], device=device), "draft_step": step}
    got = sampler(logits, [0.0, 1.0, 0.7], impl=impl, draft_logits_out=kept, **options)
    there = kept.clone()
    assert got.tolist() == sampler(logits, [0.0, 1.0, 0.7], impl="eager", draft_logits_out=there, **options).tolist()
    assert torch.equal(kept, there)
    assert (kept[:, 0, [3, 5000, 8191]] == -INF).all()
    assert (kept[:, 0, 8192:] == 7).all()


def test_nan_flag_is_bool_or_int_and_is_cleared(impl, device):
    logits = torch.zeros(2, 8, device=device)
    for dtype in (torch.bool, torch.int32):
        wide = torch.ones(2, 3, device=device).to(dtype)
        sampler(logits, 0.0, impl=impl, nan_flag=wide[:, 1])
        assert wide[:, 1].tolist() == [0, 0]
        assert wide[:, [0, 2]].all()


def test_c29_each_row_has_its_own_temperature(impl, device):
    row = torch.tensor([-8.0, -3, -2, -1, 0, 9, 1, 2], device=device)
    temperatures = torch.tensor([0.0, 0.7], device=device)
    draws = []
    for step in range(20):
        got = draft_sample(
            row.expand(2, 8),
            torch.arange(2, device=device),
            temperatures,
            torch.tensor([11, 12], device=device),
            torch.full((2,), step, device=device),
            impl=impl,
        )
        assert got[0] == 5
        draws.append(got[1].item())
    flat = torch.zeros(3, 4096, device=device)
    flat[:, 17] = 4.0
    for step in range(3):
        slots = torch.tensor([2, 0, 1], device=device)
        temperatures = torch.tensor([0.0, 1.0, 0.5], device=device)
        seeds, positions = torch.arange(3, device=device), torch.full((3,), step, device=device)
        together = draft_sample(flat, slots, temperatures, seeds, positions, impl=impl)
        for i in range(3):
            slot = int(slots[i])
            alone = sampler(
                flat[i : i + 1],
                temperatures[slot].item(),
                impl=impl,
                seeds=seeds[slot : slot + 1],
                positions=positions[:1],
            )
            assert together[i] == alone[0]
        assert together[1] == 17


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 37, 1024, 4096, 9001])
def test_greedy_is_argmax(vocab_size, dtype, config, impl, device):
    logits = torch.randn(3, vocab_size, device=device).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sampler(logits, 0.0, impl=impl).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [2, 1023, 4100, 9001])
def test_samples_are_the_definitions(vocab_size, dtype, config, device):
    rows = 6
    logits = (torch.randn(rows, vocab_size, device=device) * 3).to(dtype)
    slots = torch.tensor([3, 0, -1, 2, 1, 4], device=device)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.7], device=device)
    seeds = torch.tensor([-1, 2**40, 5, -(2**62), 9], device=device)
    positions = torch.arange(rows, device=device) * 2**31
    suppress = torch.randperm(vocab_size, device=device)[: vocab_size // 2]
    impls: list[Impl] = ["eager", "triton"] if INTERPRET or device.type == "cuda" else ["eager"]
    for ids in (None, suppress, suppress[:1].repeat(2)):
        results = []
        for impl in impls:
            out = torch.full((rows,), -5, device=device)
            kept = torch.full((5, 3, vocab_size + 28), 7.0, device=device)
            step = torch.tensor(1, device=device, dtype=torch.int32)
            draft_sample(
                logits,
                slots,
                temperature,
                seeds,
                positions,
                suppress_ids=ids,
                draft_logits_out=kept,
                draft_step=step,
                out=out,
                impl=impl,
            )
            results.append((out, kept))
        out = results[0][0]
        assert out[2] == -5
        if ids is not None:
            assert not torch.isin(out, ids).any()
        for other in results[1:]:
            assert torch.equal(other[0], out)
            assert torch.equal(other[1], results[0][1])


def test_samples_follow_the_formula_in_float64(config, impl, device):
    """Not against the definition: against −log(−log(1 − u)) of plain integers, in float64."""
    from kernels.test_random import python_gumbel

    logits = torch.randn(2, 2100, device=device) * 2
    got = sampler(
        logits,
        0.9,
        impl=impl,
        seeds=torch.tensor([3, -9], device=device),
        positions=torch.tensor([7, 2**33], device=device),
    )
    for row, (seed, position) in enumerate([(3, 7), (-9, 2**33)]):
        scores = [x / 0.9 + python_gumbel(seed, position, i, 0) for i, x in enumerate(logits[row].tolist())]
        assert got[row] == scores.index(max(scores))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_have_the_softmax_distribution(temperature, impl, device):
    """Chi-square over 12 tokens; one draw a row. Seeds are fixed: this fails for a wrong sampler, not by luck."""
    draws = 100 if INTERPRET and impl == "triton" else 20_000
    logits = torch.linspace(-2, 1.5, 12, device=device)[torch.randperm(12, device=device)]
    suppressed = torch.tensor([4], device=device)
    got = draft_sample(
        logits.expand(draws, 12),
        torch.zeros(draws, dtype=torch.int64, device=device),
        torch.tensor([temperature], device=device),
        torch.tensor([99], device=device),
        torch.arange(draws, device=device),
        suppress_ids=suppressed,
        impl=impl,
    )
    exact = (logits.double() / temperature).index_fill(0, suppressed, -INF).softmax(0).cpu()
    counts = torch.bincount(got.cpu(), minlength=12)
    assert counts[4] == 0
    keep = exact > 0
    expected = exact[keep] / exact[keep].sum() * draws
    assert stats.chisquare(counts[keep].numpy(), expected.numpy()).pvalue > 1e-4


def test_c26_a_row_depends_on_its_request_and_position_only(config, impl, device):
    logits = torch.randn(4, 5000, device=device)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0], device=device)
    seeds, positions = torch.tensor([5, 6, 7, 8], device=device), torch.tensor([10, 20, 30, 40], device=device)
    slots = torch.arange(4, device=device)
    whole = draft_sample(logits, slots, temperature, seeds, positions, impl=impl)
    torch.rand(100, device=device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    shuffled = draft_sample(logits[order], slots[order], temperature, seeds, positions[order], impl=impl)
    assert torch.equal(shuffled, whole[order])
    padded = torch.cat([logits[1:2], torch.full((2, 5000), NAN, device=device), logits[3:]])
    rows = torch.tensor([1, -1, -1, 3], device=device)
    got = draft_sample(padded, rows, temperature, seeds, positions, impl=impl)
    assert (
        got[[0, 3]].tolist()
        == draft_sample(logits[[1, 3]], slots[[1, 3]], temperature, seeds, positions[[0, 3]], impl=impl).tolist()
    )
    alone = draft_sample(logits[2:3], slots[2:3], temperature, seeds, positions[2:3], impl=impl)
    assert alone[0] == whole[2]


def test_padding_rows_are_inert(impl, device):
    logits = torch.randn(3, 300, device=device)
    out, flag = torch.full((3,), -9, device=device), torch.full((3,), 4, dtype=torch.int32, device=device)
    kept = torch.full((2, 2, 300), 7.0, device=device)
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32, device=device)
    step = torch.tensor(1, device=device)
    draft_sample(
        logits,
        slots,
        torch.zeros(2, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
        out=out,
        nan_flag=flag,
        draft_logits_out=kept,
        draft_step=step,
        impl=impl,
    )
    assert out.tolist() == [-9, logits[1].argmax().item(), -9]
    assert flag.tolist() == [4, 0, 4]
    assert torch.equal(kept[1, 1], logits[1])
    kept[1, 1] = 7
    assert (kept == 7).all()


def test_c27_copied_logits_keep_their_columns(impl, device):
    """V = 100 in rows of 128: step 1 lands at offset 128, the pad columns stay, what cannot be drawn is −inf."""
    logits = torch.randn(2, 100, device=device)
    logits[1, 7] = NAN
    kept = torch.full((4, 2, 128), 3.0, device=device)
    slots = torch.tensor([3, 0], device=device)
    suppress = torch.tensor([99, 5], device=device)
    draft_sample(
        logits,
        slots,
        torch.tensor([0.0, 0, 0, 2.5], device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
        slots,
        suppress_ids=suppress,
        draft_logits_out=kept,
        draft_step=torch.tensor(1, device=device),
        impl=impl,
    )
    expected = torch.full((4, 2, 128), 3.0, device=device)
    expected[slots, 1, :100] = logits.masked_fill(logits.isnan(), -INF).index_fill(1, suppress, -INF)
    assert torch.equal(kept, expected)
    mass = kept[slots, 1, :100].softmax(-1)
    assert mass[:, suppress].sum() == 0, "C3: what was not drawn from has no mass"
    assert not mass.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_strided_arguments(dtype, impl, device):
    wide = torch.randn(5, 2, 600, device=device).to(dtype)
    logits = wide[:, 1, 3:503]
    out = torch.full((2, 5, 3), -1, dtype=torch.int32, device=device)
    kept = torch.zeros(6, 4, 2, 512, device=device)[:, :, 1]
    step = torch.tensor(3, device=device)
    slots = torch.tensor([5, 4, 3, 2, 1], device=device)
    zeros = torch.zeros(6, dtype=torch.int64, device=device)
    draft_sample(
        logits,
        slots,
        zeros.float(),
        zeros,
        zeros[:5],
        out=out[1, :, 2],
        draft_logits_out=kept,
        draft_step=step,
        impl=impl,
    )
    assert out[1, :, 2].tolist() == logits.argmax(-1).tolist()
    assert (out[0] == -1).all()
    assert torch.equal(kept[slots, 3, :500], logits.float())
    assert (kept[:, :3] == 0).all()


def test_no_rows(impl, device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    got = draft_sample(torch.zeros(0, 9, device=device), none, none.float(), none, none, impl=impl)
    assert (got.shape, got.dtype) == ((0,), torch.int64)


BAD = [
    ({"logits": torch.zeros(8)}, ValueError, "logits"),
    ({"logits": torch.zeros(8, 2).T}, ValueError, "logits"),
    ({"logits": torch.zeros(2, 0)}, ValueError, "logits"),
    ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, TypeError, "logits"),
    ({"idx_mapping": torch.zeros(3, dtype=torch.int64)}, ValueError, "idx_mapping"),
    ({"idx_mapping": torch.zeros(2)}, TypeError, "idx_mapping"),
    ({"temperature": torch.zeros(4, dtype=torch.float64)}, TypeError, "temperature"),
    ({"seeds": torch.zeros(4, dtype=torch.int32)}, TypeError, "seeds"),
    ({"seeds": torch.zeros(3, dtype=torch.int64)}, ValueError, "seeds"),
    ({"positions": [1, 2]}, TypeError, "positions"),
    ({"suppress_ids": [1]}, TypeError, "suppress_ids"),
    ({"suppress_ids": torch.tensor([1.0])}, TypeError, "suppress_ids"),
    ({"draft_logits_out": torch.zeros(4, 2, 7), "draft_step": torch.tensor(0)}, ValueError, "draft_logits_out"),
    ({"draft_logits_out": torch.zeros(4, 2, 8)}, ValueError, "draft_step"),
    ({"draft_logits_out": torch.zeros(4, 2, 8), "draft_step": 1}, TypeError, "draft_step"),
    ({"nan_flag": torch.zeros(2)}, TypeError, "nan_flag"),
    ({"out": torch.zeros(3, dtype=torch.int64)}, ValueError, "out"),
    ({"impl": "reference"}, ValueError, "impl"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_named(change, error, message):
    arguments = {
        "logits": torch.zeros(2, 8),
        "idx_mapping": torch.zeros(2, dtype=torch.int64),
        "temperature": torch.zeros(4),
        "seeds": torch.zeros(4, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        draft_sample(**{**arguments, **change})


@pytest.mark.parametrize("logits", [torch.randn(2, 16), torch.randn(3, 40)[:, 3:35]], ids=["contiguous", "view"])
@pytest.mark.compiled
def test_opcheck(logits, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember a poisoned torch.empty
    rows, vocab_size = logits.shape
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    temperature = torch.rand(rows, device=device)
    triton = device.type == "cuda"
    for optional in (
        (None, None, None, None),
        (
            zeros[:1],
            torch.zeros(rows, 2, vocab_size, device=device),
            zeros[0],
            torch.zeros(rows, dtype=torch.bool, device=device),
        ),
    ):
        args = (logits.to(device), zeros, temperature, zeros, zeros, *optional, zeros.clone(), triton)
        torch.library.opcheck(torch.ops.tridraft.draft_sample.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def step(logits, slots, temperature, seeds, positions):
        return draft_sample(logits * 2, slots, temperature, seeds, positions) + 1

    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    args = (torch.randn(3, 64, device=device), zeros, torch.ones(1, device=device), zeros[:1], zeros)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*args), step(*args))


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype", "optional"),
    [
        (1, 262_144, torch.bfloat16, False),
        (64, 262_144, torch.bfloat16, True),
        (64, 262_144, torch.float32, True),
        (8, 151_936, torch.float16, True),
    ],
    ids=str,
)
def test_aot(rows, vocab_size, dtype, optional, target):
    logits, zeros = torch.zeros(rows, vocab_size, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    options = {}
    if optional:
        options = {
            "suppress_ids": zeros[:1] + 1,
            "draft_logits_out": torch.zeros(1, 1, vocab_size, dtype=dtype),
            "draft_step": zeros[0],
            "nan_flag": torch.zeros(rows, dtype=torch.bool),
        }
    assert_compiles(
        lambda: draft_sample(logits, zeros, zeros[:1].float(), zeros[:1], zeros, impl="triton", **options), target
    )


@pytest.mark.parametrize("target", TARGETS)
def test_ladder(target):
    arch = TARGETS[target][1]
    for rows, itemsize in itertools.product((1, 2, 8, 32, 128, 1024), (2, 4)):
        for vocab_size in (1, 100, 32_000, 129_280, 262_144, 2**23):
            config = sample_config(rows, vocab_size, itemsize, arch)
            groups = -(-vocab_size // 4096)
            parts = -(-groups // config.groups_per_program) * (1024 // config.width)
            assert next_power_of_2(config.width) == config.width <= 1024
            assert next_power_of_2(parts) <= 2048, "the second stage reduces a row in one block"
            if rows * vocab_size >= 2**18 and vocab_size >= 2**18:
                assert rows * parts >= 64


@pytest.mark.compiled
def test_batch_sizes_share_their_kernels():
    variants = set()
    for rows in range(1, 65):
        logits = torch.zeros(1, 262_144, dtype=torch.bfloat16).expand(rows, -1)
        zeros = torch.zeros(rows, dtype=torch.int64)
        with record_launches(TARGETS["sm_90"][1]) as launches:
            draft_sample(logits, zeros, zeros[:1].float(), zeros[:1], zeros, impl="triton")
        for launch in launches:
            constexprs = {name: value for name, value in launch.arguments.items() if name.isupper()}
            variants.add((launch.kernel.__name__, str(constexprs), str(launch.options)))
    assert len(variants) <= 7, variants  # two widths, and the blocks their pairs are reduced in


@pytest.mark.gpu
def test_c11_replays_on_changed_inputs(device):
    """Captured by the first ever call of this shape, on the stream it is then replayed on."""
    rows, vocab_size = 5, 262_144
    logits = torch.randn(rows, vocab_size, device=device).bfloat16()
    slots, positions = torch.arange(rows, device=device), torch.arange(rows, device=device)
    temperature, seeds = torch.zeros(rows, device=device), torch.arange(rows, device=device)
    suppress = torch.tensor([258_882, 258_883], device=device)
    kept, step = torch.zeros(rows, 3, vocab_size, device=device), torch.zeros((), dtype=torch.int64, device=device)
    flag = torch.zeros(rows, dtype=torch.bool, device=device)
    options: dict[str, Any] = {"suppress_ids": suppress, "draft_logits_out": kept, "draft_step": step, "nan_flag": flag}
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            out = draft_sample(logits, slots, temperature, seeds, positions, **options)
        for i in range(3):
            logits.normal_(generator=torch.Generator(device).manual_seed(i)).mul_(4)
            logits[:, 258_882] = 100
            logits[2] = NAN
            temperature.copy_(torch.arange(rows, device=device) * 0.3 * i)
            slots.copy_(torch.arange(rows, device=device).roll(i))
            slots[:1].fill_(-1)
            positions.add_(17)
            step.fill_(i)
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, kept_there = out.clone(), kept.clone()
    draft_sample(logits, slots, temperature, seeds, positions, **options, out=expected, impl="eager")
    assert torch.equal(out, expected)
    assert torch.equal(kept, kept_there)
    assert flag.tolist() == [False, False, True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_real_sizes_are_the_definition(rows, temperature, device):
    logits = (torch.randn(rows, 262_144, device=device) * 2).bfloat16()
    suppress = torch.randint(262_144, (10,), device=device)
    got = sampler(logits, temperature, impl="triton", suppress_ids=suppress)
    assert torch.equal(got, sampler(logits, temperature, impl="eager", suppress_ids=suppress))


@triton.jit
def _bounds_kernel(wrong_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    word = (program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    noise = gumbel_of_word(word)
    x = tl.zeros((BLOCK,), tl.float32)
    left_out = most_score(x, word, 1.0) <= slack_below(noise)
    tl.store(wrong_ptr + program, tl.sum(left_out.to(tl.int32), axis=0))


@pytest.mark.gpu
def test_no_words_noise_escapes_its_bounds(device):
    block = 4096
    wrong = torch.zeros(2**32 // block, dtype=torch.int32, device=device)
    _bounds_kernel[(wrong.shape[0],)](wrong, BLOCK=block)
    assert wrong.sum() == 0


@pytest.mark.gpu
def test_c25_rare_tokens_are_drawn(device):
    """One logit at 20.5, 262,144 at 0: 32.8 of 100,000 draws hit the tail. Noise of 24-bit uniforms never would."""
    logits = torch.zeros(1, 262_145, device=device)
    logits[0, 131_072] = 20.5
    draws = 100_000
    zeros = torch.zeros(draws, dtype=torch.int64, device=device)
    temperature, seeds = torch.ones(1, device=device), torch.tensor([2024], device=device)
    got = draft_sample(logits.expand(draws, -1), zeros, temperature, seeds, torch.arange(draws, device=device))
    assert 10 <= (got != 131_072).sum() <= 60


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31st_element(device):
    logits = torch.zeros(8_200, 262_144, device=device, dtype=torch.bfloat16)
    logits[-1, 262_143] = 1
    logits[-2, 262_142] = 1
    got = sampler(logits, 0.0, impl="triton", suppress_ids=torch.tensor([0], device=device))
    assert got[-2:].tolist() == [262_142, 262_143]
    assert (got[:-2] == 1).all()
