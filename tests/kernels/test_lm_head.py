"""The fused head: float64 logits, the definition on the same uniforms, and one result however many rows there are."""

import itertools

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels import lm_head
from tridraft.kernels._lm_head_kernels import LmHeadConfig, lm_head_config
from tridraft.kernels._op import Impl, cdiv, next_power_of_2
from tridraft.kernels.lm_head import lm_head_sample

NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn
# The interpreter's tl.dot reads raw bfloat16 bits.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])


def head(hidden, weight, temperature=0.0, *, impl, slots=None, **options):
    """`lm_head_sample` with a slot a row."""
    rows, device = hidden.shape[0], hidden.device
    return lm_head_sample(
        hidden,
        weight,
        torch.arange(rows, device=device) if slots is None else slots,
        torch.tensor(temperature, dtype=torch.float32, device=device).expand(rows).contiguous(),
        torch.arange(rows, device=device) * 104729 + 11,
        torch.arange(rows, device=device) + 2**32 - 2,
        impl=impl,
        **options,
    )


def logits_of(hidden, weight, *, impl, columns=None, **options):
    """The logits the head drew from, `[N, columns]` float32."""
    rows, device = hidden.shape[0], hidden.device
    kept = torch.empty(rows, 2, columns or weight.shape[0], device=device)
    head(hidden, weight, impl=impl, draft_logits_out=kept, draft_step=torch.tensor(1, device=device), **options)
    return kept[:, 1]


def exact_logits(hidden, weight, scale=None, softcap=None):
    logits = hidden.double() @ weight.double().T
    if scale is not None:
        logits = logits * scale.double()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def float32_logits(hidden, weight):
    """The same in float32, summed in order of H, as a kernel does."""
    products = hidden.float()[:, None] * weight.float()[None]
    return sum(products.unbind(-1), torch.zeros((), device=hidden.device))


def offsets(draft_size, target_size, device):
    """`d2t` of a random subset of the target's vocabulary."""
    targets = torch.randperm(target_size)[:draft_size].sort().values
    return (targets - torch.arange(draft_size)).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab_size", "hidden_size"), [(1, 300, 64), (5, 129, 40), (17, 33, 200), (2, 40, 1)])
def test_logits_are_float64s(rows, vocab_size, hidden_size, dtype, impl, device):
    hidden = torch.randn(rows, hidden_size, device=device).to(dtype)
    weight = torch.randn(vocab_size, hidden_size, device=device).to(dtype)
    exact, same = exact_logits(hidden, weight), float32_logits(hidden, weight)
    assert_close_to_float64(logits_of(hidden, weight, impl=impl), exact, same)
    for softcap in (0.5, 30.0):
        got = logits_of(hidden, weight, impl=impl, softcap=softcap)
        exact = exact_logits(hidden, weight, softcap=softcap)
        assert_close_to_float64(got, exact, softcap * torch.tanh(same / softcap))


@pytest.mark.parametrize("per_row", [True, False])
def test_fp8_weights_are_scaled(per_row, impl, device):
    hidden = torch.randn(3, 200, device=device).to(torch.bfloat16)
    weight = (torch.randn(200, 200, device=device) * 50).to(FP8)
    scale = torch.rand(200 if per_row else 1, device=device) * 0.1
    exact = exact_logits(hidden, weight.float(), scale)
    same = float32_logits(hidden, weight) * scale
    assert_close_to_float64(logits_of(hidden, weight, impl=impl, weight_scale=scale), exact, same)
    got = head(hidden, weight, impl=impl, weight_scale=scale)
    assert got.tolist() == exact.argmax(-1).tolist()


def test_fp8_takes_hidden_states_of_any_magnitude(impl, device):
    """bfloat16's range is far beyond float16's, in which products with 8-bit weights are made."""
    scales = torch.tensor([1e-35, 1e-30, 1e-6, 1.0, 1e6, 1e30, 0.0], device=device)
    hidden = (torch.randn(7, 72, device=device) * scales[:, None]).to(torch.bfloat16)
    hidden[3, ::2] *= 1e-6
    weight = torch.randn(130, 72, device=device).to(FP8)
    got, exact = logits_of(hidden, weight, impl=impl), exact_logits(hidden, weight.float())
    assert ((got - exact).abs() <= 2**-18 * exact.abs().amax(1, keepdim=True)).all()
    hidden[:5, 0] = torch.tensor([INF, -INF, NAN, 3e38, 0.0], device=device)
    weight[:3] = torch.tensor([[NAN], [1.0], [0.0]], device=device).to(FP8)
    logits = logits_of(hidden, weight, impl=impl)
    exact = exact_logits(hidden, weight.float())
    assert (logits[:3].isinf() == (exact[:3].isinf() | exact[:3].isnan())).all()
    if not INTERPRET:  # it converts an 8-bit NaN to 480
        assert (logits[:, 0] == -INF).all(), "NaN is kept as −inf"
    assert logits[3, 1].item() == pytest.approx(exact[3, 1].item(), rel=2**-7)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_are_the_definitions(dtype, temperature, device):
    rows, vocab_size, hidden_size, target_size = 6, 300, 48, 700
    hidden = torch.randn(rows, hidden_size, device=device).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, device=device) * 0.5).to(dtype)
    d2t, scale = offsets(vocab_size, target_size, device), torch.rand(vocab_size, device=device)
    few, many = torch.randperm(target_size, device=device)[:5], torch.randperm(target_size, device=device)[:600]
    slots = torch.tensor([1, 0, -1, 5, 3, 2], dtype=torch.int32, device=device)
    impls: list[Impl] = ["eager", "triton"] if INTERPRET or device.type == "cuda" else ["eager"]
    for options in (
        {},
        {"softcap": 2.0, "suppress_ids": few % vocab_size},
        {"d2t": d2t, "suppress_ids": many, "weight_scale": scale},
        {"d2t": d2t, "suppress_ids": d2t[:1].repeat(70)},
    ):
        results = []
        for impl in impls:
            out, kept = torch.full((rows,), -5, device=device), torch.full((rows, 2, 720), 7.0, device=device)
            flag = torch.ones(rows, dtype=torch.bool, device=device)
            step = torch.tensor(0, device=device)
            head(
                hidden,
                weight,
                temperature,
                impl=impl,
                slots=slots,
                out=out,
                draft_logits_out=kept,
                draft_step=step,
                nan_flag=flag,
                **options,
            )
            assert out[2] == -5
            assert flag.tolist() == [False, False, True, False, False, False]
            assert (kept[4] == 7).all(), "no row uses slot 4"
            assert (kept[:, 1] == 7).all()
            results.append((out, kept))
        for other in results[1:]:
            assert torch.equal(other[0], results[0][0])
            assert torch.equal(other[1].isinf(), results[0][1].isinf())
            torch.testing.assert_close(other[1], results[0][1])


def test_d2t_gives_target_ids_everywhere(impl, device):
    """Ids, suppression, noise and the columns of kept logits are all the target's (C2)."""
    hidden = torch.ones(1, 1, device=device)
    weight = torch.tensor([[1.0], [4.0], [9.0], [2.0]], device=device)
    d2t = torch.tensor([3, 3, 6, 6], device=device)  # target ids 3, 4, 8, 9
    assert head(hidden, weight, impl=impl, d2t=d2t).tolist() == [8]
    suppress = torch.tensor([8, 2], device=device)
    assert head(hidden, weight, impl=impl, d2t=d2t, suppress_ids=suppress).tolist() == [4]
    kept = logits_of(hidden, weight, impl=impl, d2t=d2t, suppress_ids=suppress, columns=12)
    assert kept.tolist() == [[-INF, -INF, -INF, 1, 4, -INF, -INF, -INF, -INF, 2, -INF, -INF]]
    full = torch.full((12, 1), -INF, device=device)
    full[[3, 4, 8, 9]] = weight
    for step in range(5):
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        args = (slots, torch.full((1,), 3.0, device=device), slots + 5, slots + step)
        subset = lm_head_sample(hidden, weight, *args, d2t=d2t, impl=impl)
        assert torch.equal(subset, lm_head_sample(hidden, full, *args, impl=impl)), "a draft vocabulary moves no noise"


TILINGS = [
    LmHeadConfig(16, 64, 32, 2, 4, 1),
    LmHeadConfig(32, 32, 64, 3, 4, 2),
    LmHeadConfig(16, 64, 16, 2, 4, 1, resident=80),
    LmHeadConfig(16, 128, 32, 2, 4, 1, fold=4),
]


@pytest.mark.parametrize("config", TILINGS, ids=str)
def test_c28_ties_in_a_tile_go_to_the_lowest_id(config, monkeypatch, impl, device):
    """Of any two rows, a thread's own or not, that a soft cap makes equal."""
    ids = [0, 8, 9, 17, 63, 64, 72, 127, 128, 136, 192, 199]
    pairs = list(itertools.combinations(ids, 2))
    weight = torch.zeros(200, len(pairs), device=device)
    for row, (low, high) in enumerate(pairs):
        weight[low, row], weight[high, row] = 100.0, 200.0
    hidden = torch.eye(len(pairs), device=device)
    monkeypatch.setattr(lm_head, "lm_head_config", lambda *args: config)
    assert head(hidden, weight, softcap=5.0, impl=impl).tolist() == [low for low, _ in pairs]


@pytest.mark.gpu
def test_equal_rows_of_the_weight_in_batches_of_any_size(device):
    """A soft cap and equal rows make scores equal, in tiles of every shape that the ladder has for 16 bits."""
    weight = torch.randn(1000, 1024, device=device).bfloat16()
    weight[500:] = weight[:500]
    hidden = 3 * torch.randn(200, 1024, device=device).bfloat16()
    expected = head(hidden, weight, softcap=2.0, impl="eager")
    assert (expected < 500).all()
    whole = head(hidden, weight, softcap=2.0, impl="triton")
    for n in (1, 32, 33, 64, 65, 200):
        tokens = head(hidden[:n], weight, softcap=2.0, impl="triton")
        assert (tokens < 500).all()
        assert torch.equal(tokens, whole[:n])


def test_c28_ties_go_to_the_lowest_id(impl, device):
    weight = torch.zeros(700, 2, device=device)
    weight[[127, 128, 650], 0] = 2.0
    assert head(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], device=device), weight, impl=impl).tolist() == [
        127,
        0,
        0,
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_c28_nan_gives_the_lowest_eligible_id(temperature, impl, device):
    weight = torch.ones(700, 1, device=device)
    hidden = torch.tensor([[1.0], [NAN]], device=device)
    flag = torch.zeros(2, dtype=torch.bool, device=device)
    d2t = torch.full((700,), 10, device=device)
    suppress = torch.tensor([10, 11, 13], device=device)
    assert head(hidden, weight, temperature, impl=impl, nan_flag=flag)[1] == 0
    assert flag.tolist() == [False, True]
    assert head(hidden, weight, temperature, impl=impl, nan_flag=flag, d2t=d2t, suppress_ids=suppress)[1] == 12
    assert flag.tolist() == [False, True]
    weight[3] = NAN
    assert head(
        hidden[:1], weight[:5], temperature, impl=impl, suppress_ids=suppress - 10, nan_flag=flag[:1]
    ).tolist() in ([[2], [4]] if temperature else [[2]])


def test_one_row_of_minus_inf_gives_the_lowest_eligible_id(impl, device):
    hidden, weight = torch.ones(1, 1, device=device), torch.full((6, 1), -INF, device=device)
    flag = torch.ones(1, dtype=torch.bool, device=device)
    assert head(hidden, weight, impl=impl, suppress_ids=torch.tensor([1, 0], device=device), nan_flag=flag).item() == 2
    assert not flag.item()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("hidden_size", [136] if INTERPRET else [136, 1000, 1024, 1032])
def test_c26_a_row_does_not_depend_on_the_others(hidden_size, fp8, impl, device):
    """Bit for bit: the kept logits of a row are the same alone, in a batch of any size, and beside padding."""
    dtype = torch.float16 if INTERPRET else torch.bfloat16
    rows, vocab_size = (18, 130) if INTERPRET else (200, 260)
    hidden = torch.randn(rows, hidden_size, device=device).to(dtype)
    weight = torch.randn(vocab_size, hidden_size, device=device).to(dtype)
    if impl == "eager":  # PyTorch's own products promise nothing
        hidden, weight = hidden.round(), weight.round()
    weight = weight.to(FP8) if fp8 else weight
    whole = logits_of(hidden, weight, impl=impl)
    for n in (1, 17) if INTERPRET else (1, 2, 16, 17, 33, 65):
        assert torch.equal(logits_of(hidden[:n], weight, impl=impl), whole[:n])
    slots = torch.arange(rows, device=device)
    slots[1::2] = -1
    kept = torch.empty(rows, 1, vocab_size, device=device)
    step = torch.tensor(0, device=device)
    head(hidden, weight, impl=impl, slots=slots, draft_logits_out=kept, draft_step=step)
    assert torch.equal(kept[::2, 0], whole[::2])
    tokens = head(hidden, weight, 1.0, impl=impl)
    assert torch.equal(head(hidden, weight, 1.0, impl=impl, slots=slots, out=tokens.clone())[::2], tokens[::2])
    assert torch.equal(head(hidden[:3], weight, 1.0, impl=impl), tokens[:3])


@pytest.mark.parametrize("config", TILINGS, ids=str)
def test_any_tiling_gives_the_same_tokens(config, monkeypatch, impl, device):
    hidden, weight = torch.randn(3, 72, device=device), torch.randn(333, 72, device=device)
    expected = head(hidden, weight, 0.7, impl="eager")
    monkeypatch.setattr(lm_head, "lm_head_config", lambda *args: config)
    assert torch.equal(head(hidden, weight, 0.7, impl=impl), expected)


def test_strided_arguments(impl, device):
    hidden = torch.randn(4, 2, 64, device=device)[:, 1, :48]
    weight = torch.randn(100, 64, device=device)[:, 8:56]
    out = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    head(hidden, weight, impl=impl, out=out[:, 1])
    assert out[:, 1].tolist() == exact_logits(hidden, weight).argmax(-1).tolist()
    assert (out[:, 0] == -1).all()


def test_no_rows(impl, device):
    assert head(torch.zeros(0, 4, device=device), torch.zeros(3, 4, device=device), impl=impl).shape == (0,)


BAD = [
    ({"hidden": torch.zeros(4)}, ValueError, "hidden"),
    ({"hidden": torch.zeros(4, 2).T}, ValueError, "hidden"),
    ({"weight": torch.zeros(9, 5)}, ValueError, "weight"),
    ({"weight": torch.zeros(0, 4)}, ValueError, "weight"),
    ({"weight": torch.zeros(9, 4, dtype=torch.float16)}, TypeError, "weight"),
    ({"weight_scale": torch.zeros(3)}, ValueError, "weight_scale"),
    ({"weight_scale": 0.5}, TypeError, "weight_scale"),
    ({"softcap": 0.0}, ValueError, "softcap"),
    ({"softcap": NAN}, ValueError, "softcap"),
    ({"d2t": torch.zeros(8, dtype=torch.int64)}, ValueError, "d2t"),
    ({"d2t": torch.zeros(9)}, TypeError, "d2t"),
    ({"idx_mapping": torch.zeros(3, dtype=torch.int64)}, ValueError, "idx_mapping"),
    ({"suppress_ids": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, "suppress_ids"),
    ({"draft_logits_out": torch.zeros(2, 1, 8), "draft_step": torch.tensor(0)}, ValueError, "draft_logits_out"),
    ({"impl": ""}, ValueError, "impl"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_named(change, error, message):
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(9, 4),
        "idx_mapping": zeros,
        "temperature": torch.zeros(2),
        "seeds": zeros,
        "positions": zeros,
    }
    with pytest.raises(error, match=message):
        lm_head_sample(**{**arguments, **change})


def test_fp8_is_refused_where_it_does_not_exist():
    zeros = torch.zeros(1, dtype=torch.int64)
    weight = torch.zeros(16, 16).to(FP8)
    call = lambda: lm_head_sample(torch.zeros(1, 16), weight, zeros, zeros.float(), zeros, zeros, impl="triton")  # noqa: E731
    with pytest.raises(TypeError, match="weight: got float8_e4m3fn on sm_80"):
        assert_compiles(call, "sm_80")


@pytest.mark.parametrize("hidden", [torch.randn(2, 16), torch.randn(3, 40)[:, 3:35]], ids=["contiguous", "view"])
@pytest.mark.compiled
def test_opcheck(hidden, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember a poisoned torch.empty
    rows, hidden_size = hidden.shape
    weight = torch.randn(20, hidden_size, device=device)
    zeros, triton = torch.zeros(rows, dtype=torch.int64, device=device), device.type == "cuda"
    d2t = torch.arange(20, device=device)
    kept, flag = torch.zeros(rows, 2, 64, device=device), torch.zeros(rows, dtype=torch.bool, device=device)
    scale = torch.ones(1, device=device)
    for optional in ((None,) * 8, (scale, 3.0, zeros[:1], d2t, kept, zeros[0], flag, zeros.float())):
        args = (hidden.to(device), weight, zeros, zeros.float(), zeros, zeros, *optional, zeros.clone(), triton)
        torch.library.opcheck(torch.ops.tridraft.lm_head_sample.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def step(hidden, weight, slots, temperature, seeds, positions):
        return lm_head_sample(hidden * 2, weight, slots, temperature, seeds, positions, softcap=30.0) + 1

    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    args = (torch.randn(3, 16, device=device), torch.randn(40, 16, device=device), zeros, zeros.float(), zeros, zeros)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*args), step(*args))


AOT = [  # rows, H, hidden dtype, weight dtype, with everything optional
    (1, 256, torch.bfloat16, torch.bfloat16, True),
    (1, 1000, torch.bfloat16, torch.bfloat16, False),
    (8, 1024, torch.bfloat16, FP8, True),
    (64, 1024, torch.bfloat16, FP8, False),
    (64, 1024, torch.bfloat16, torch.bfloat16, False),
    (256, 1024, torch.float16, torch.float16, False),
    (32, 256, torch.float32, torch.float32, True),
]


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "hidden_size", "dtype", "weight_dtype", "optional"), AOT, ids=str)
def test_aot(rows, hidden_size, dtype, weight_dtype, optional, target):
    if weight_dtype == FP8 and target == "sm_80":
        weight_dtype = dtype  # refused there
    hidden, weight = torch.zeros(rows, hidden_size, dtype=dtype), torch.zeros(512, hidden_size).to(weight_dtype)
    zeros = torch.zeros(rows, dtype=torch.int64)
    options = {}
    if optional:
        options = {
            "weight_scale": torch.ones(512),
            "softcap": 30.0,
            "suppress_ids": torch.arange(100),
            "d2t": torch.arange(512),
            "draft_logits_out": torch.zeros(rows, 1, 1024, dtype=dtype),
            "draft_step": torch.tensor(0),
            "nan_flag": torch.zeros(rows, dtype=torch.bool),
        }
    call = lambda: lm_head_sample(hidden, weight, zeros, zeros.float(), zeros, zeros, impl="triton", **options)  # noqa: E731
    assert_compiles(call, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("hidden_bytes", "weight_bytes"), [(4, 4), (2, 2), (2, 1)])
def test_ladder(hidden_bytes, weight_bytes, target):
    arch = TARGETS[target][1]
    for hidden_size in (1, 40, 256, 1024, 5376):
        orders = set()
        for rows in (1, 8, 16, 17, 32, 64, 128, 256):
            config = lm_head_config(rows, hidden_size, hidden_bytes, weight_bytes, arch)
            assert config.programs_per_sm * config.shared_memory(hidden_bytes, weight_bytes, arch) <= arch.shared_memory
            assert config.block_n * cdiv(rows, config.block_n) >= rows
            assert all(next_power_of_2(x) == x >= 16 for x in (config.block_n, config.block_v, config.block_k))
            if config.fold == 1:  # in wide tiles too, sums go 16 columns after 16: c26, on a GPU
                orders.add((config.block_k, config.resident))
        assert len(orders) == 1, "how a row's sum rounds must not depend on the number of rows"


def test_two_programs_share_the_noise_of_a_narrow_head():
    hopper = TARGETS["sm_90"][1]
    assert [lm_head_config(rows, 256, 2, 2, hopper).programs_per_sm for rows in (1, 16, 17)] == [2, 2, 1]
    assert lm_head_config(16, 1024, 2, 2, hopper).programs_per_sm == 1


@pytest.mark.gpu
def test_c11_replays_on_changed_inputs(device):
    """Captured by the first ever call of this shape, on the stream it is then replayed on."""
    rows = 5
    hidden = torch.randn(rows, 256, device=device).bfloat16()
    weight = torch.randn(32_000, 256, device=device).bfloat16() / 4
    slots, seeds = torch.arange(rows, device=device), torch.arange(rows, device=device)
    positions, temperature = torch.arange(rows, device=device), torch.zeros(rows, device=device)
    options = {"softcap": 30.0, "suppress_ids": torch.tensor([5, 31_999], device=device)}
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            out = lm_head_sample(hidden, weight, slots, temperature, seeds, positions, **options)
        for i in range(3):
            hidden.normal_(generator=torch.Generator(device).manual_seed(i))
            temperature.copy_(torch.arange(rows, device=device) * 0.4 * i)
            positions.add_(3)
            slots[:1].fill_(-1)
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    args = (hidden, weight, slots, temperature, seeds, positions)
    assert torch.equal(out, lm_head_sample(*args, **options, out=out.clone(), impl="eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize("hidden_size", [256, 1024])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, FP8], ids=str)
def test_real_sizes(weight_dtype, hidden_size, rows, device):
    """Against float64 products of the same operands: the token's logit may miss the best by rounding only."""
    hidden = torch.randn(rows, hidden_size, device=device).bfloat16()
    weight = torch.randn(262_144, hidden_size, device=device).to(weight_dtype)
    suppress = torch.tensor([258_882, 258_883], device=device)
    got = head(hidden, weight, impl="triton", suppress_ids=suppress)
    for first in range(0, rows, 8):
        exact = exact_logits(hidden[first : first + 8], weight.float()).index_fill(1, suppress, -INF)
        best, chosen = exact.max(-1).values, exact.gather(1, got[first : first + 8, None])[:, 0]
        assert (best - chosen <= 2**-20 * best.abs()).all()


@pytest.mark.gpu
def test_weights_beyond_two_to_the_31st_element(device):
    hidden = torch.ones(1, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.zeros(2**19 + 2**12, 4096, device=device, dtype=torch.bfloat16)
    weight[-3] = 1
    assert head(hidden, weight, impl="triton").item() == weight.shape[0] - 3
