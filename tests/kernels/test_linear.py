"""Linear layers of a few rows against float64."""

from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from _variants import variants
from conftest import INTERPRET
from tridraft.kernels.linear import linear, linear_config, linear_reference, uses_cublas

# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
CPU = torch.device("cpu")
# (M, K) of Gemma 4's E2B and 12B assistants, then of EAGLE, EAGLE-3 and MTP heads of SmolLM2-135M.
E2B = [(256, 3072), (1024, 256), (2048, 256), (256, 1024), (256, 2048), (4096, 256), (1536, 256)]
LARGE = [(1024, 7680), (4096, 1024), (8192, 1024), (1024, 4096), (1024, 8192), (16384, 1024), (3840, 1024)]
SMOLLM2 = [(576, 1152), (576, 1728), (960, 1152), (576, 576), (3072, 576), (576, 1536)]


def inputs(rows, shape, device, dtype=torch.float32, *, bias=False) -> Any:
    """A random weight of `shape`, then x: what the kernel in front of a linear layer wrote is its input."""
    out_features, in_features = shape
    weight = (torch.randn(out_features, in_features) * max(in_features, 1) ** -0.5).to(device, dtype)
    offsets = torch.randn(out_features).to(device, dtype) if bias else None
    return torch.randn(rows, in_features).to(device, dtype), weight, offsets


def exact_linear(x, weight, bias):
    exact = x.double() @ weight.double().t()
    return exact if bias is None else exact + bias.double()


def assert_exact(out, x, weight, bias=None):
    assert out.dtype == x.dtype
    assert_close_to_float64(out, exact_linear(x, weight, bias), linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17, 32, 33, 65])
def test_rows(rows, dtype, impl, device):
    x, weight, bias = inputs(rows, (100, 320), device, dtype, bias=rows % 2 == 0)
    assert_exact(linear(x, weight, bias=bias, impl=impl), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 7), (3, 16), (17, 31), (16, 33), (129, 255), (40, 257), (5, 1000), (33, 1025), (2, 10752)]
)
def test_ragged_shapes(shape, rows, dtype, impl, device):
    x, weight, bias = inputs(rows, shape, device, dtype, bias=True)
    assert_exact(linear(x, weight, bias=bias, impl=impl), x, weight, bias)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("shape", [E2B[0], E2B[1], E2B[4], *SMOLLM2[2:4]], ids=str)
def test_shapes_of_drafters(shape, rows, impl, device):
    x, weight, _ = inputs(rows, shape, device, torch.float16)
    assert_exact(linear(x, weight, impl=impl), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 16, 32, 33, 128, 130])
@pytest.mark.parametrize("shape", [*E2B, *LARGE, *SMOLLM2, (30720, 1024)], ids=str)
def test_every_shape_of_every_drafter(shape, rows, dtype, device):
    x, weight, _ = inputs(rows, shape, device, dtype)
    for impl in ("auto", "triton"):
        assert_exact(linear(x, weight, impl=impl), x, weight)


@pytest.mark.parametrize("rows", [3, 12])
def test_strides_and_out(rows, impl, device):
    """Views inside NaN: nothing around them is read, nothing around the result is written."""
    x, weight, bias = inputs(rows, (37, 50), device, bias=True)
    wide_x, wide_weight = (torch.full(size, torch.nan, device=device) for size in ((2 * rows, 70), (37, 90)))
    wide_x[::2, 3:53], wide_weight[:, 11:61] = x, weight
    buffer = torch.full((rows, 64), 7.0, device=device)
    out = linear(wide_x[::2, 3:53], wide_weight[:, 11:61], bias=bias, out=buffer[:, 9:46], impl=impl)
    assert out.data_ptr() == buffer[:, 9:].data_ptr()
    assert_exact(out, x, weight, bias)
    assert (buffer[:, :9] == 7).all()
    assert (buffer[:, 46:] == 7).all()


def exact_gated(x, weight, bias, activation):
    gate, up = exact_linear(x, weight, bias).chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize(
    ("rows", "shape"), [(1, (74, 50)), (3, (130, 1025)), (5, (66, 320)), (8, (34, 257)), (9, (6, 8))]
)
def test_activation(rows, shape, activation, dtype, impl, device):
    x, weight, bias = inputs(rows, shape, device, dtype, bias=rows != 5)
    out = linear(x, weight, bias=bias, activation=activation, impl=impl)
    assert out.shape == (rows, shape[0] // 2)
    expected = linear_reference(x, weight, bias, activation)
    assert_close_to_float64(out, exact_gated(x, weight, bias, activation), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 32, 64, 128])
@pytest.mark.parametrize("shape", [(4096, 256), (16384, 1024), (3072, 576)], ids=str)
def test_every_gated_shape_of_every_drafter(shape, rows, dtype, device):
    x, weight, _ = inputs(rows, shape, device, dtype)
    for impl in ("auto", "triton"):
        out = linear(x, weight, activation="gelu_tanh", impl=impl)
        expected = linear_reference(x, weight, None, "gelu_tanh")
        assert_close_to_float64(out, exact_gated(x, weight, None, "gelu_tanh"), expected)


@pytest.mark.parametrize("rows", [2, 9])
def test_nan_and_infinity_stay_in_their_row(rows, impl, device):
    x, weight, _ = inputs(rows, (20, 300), device)
    x[0, 299], x[1, 0] = torch.nan, torch.inf
    out = linear(x, weight, impl=impl)
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.inf * weight[:, 0].sign())
    assert out[2:].isfinite().all()


@pytest.mark.parametrize(("rows", "out_features"), [(0, 8), (3, 0)])
def test_nothing_to_do(rows, out_features, impl, device):
    x, weight, _ = inputs(rows, (out_features, 16), device)
    assert linear(x, weight, impl=impl).shape == (rows, out_features)


def test_no_columns_leave_the_bias(impl, device):
    x, weight, bias = inputs(2, (5, 0), device, bias=True)
    assert torch.equal(linear(x, weight, bias=bias, impl=impl), bias.expand(2, 5))
    assert not linear(x, weight, impl=impl).any()


def test_refusals_name_the_argument():
    x, weight, bias = inputs(2, (5, 8), CPU, bias=True)
    with pytest.raises(TypeError, match="x: got float64"):
        linear(x.double(), weight)
    with pytest.raises(ValueError, match=r"x: got shape \[8\], needs \[N, K\]"):
        linear(x[0], weight)
    with pytest.raises(ValueError, match=r"weight: got shape \[5, 7\], needs \[M, 8\]"):
        linear(x, weight[:, :7])
    with pytest.raises(TypeError, match="weight: got float16, needs float32"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match=r"weight: got strides \[1, 5\]"):
        linear(x, weight.t().contiguous().t())
    with pytest.raises(ValueError, match=r"bias: got shape \[4\], needs \[5\]"):
        linear(x, weight, bias=bias[:4])
    with pytest.raises(ValueError, match=r"out: got shape \[2, 4\], needs \[2, 5\]"):
        linear(x, weight, out=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        linear(x, weight, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight: got 5 rows, needs an even number"):
        linear(x, weight, activation="silu")


@pytest.mark.compiled
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_and_full_graph(bias, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    x, weight, offsets = inputs(3, (20, 40), device, bias=bias)
    arguments = (x[:, 4:36], weight[:, 4:36], offsets)
    out = torch.zeros(3, 20, device=device)
    operation, triton = torch.ops.tridraft.linear.default, device.type == "cuda"
    torch.library.opcheck(operation, (*arguments, None, out, triton))
    torch.library.opcheck(operation, (*arguments, "silu", out[:, :10], triton))
    compiled = torch.compile(lambda x: linear(x * 2, weight, bias=offsets) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), linear_reference(x * 2, weight, offsets) + 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_config(target, dtype):
    arch = TARGETS[target][1]
    warp = 64 if arch.backend == "hip" else 32
    for out_features, in_features in [*E2B, *LARGE, *SMOLLM2, (1, 1), (30720, 5376)]:
        for rows in (1, 2, 3, 8, 31, 64, 100):
            config = linear_config(rows, out_features, in_features, dtype, arch)
            assert config.block_n <= 64
            assert config.num_warps * warp <= 1024
            assert config.shared_memory(in_features, dtype.itemsize) < arch.shared_memory
            if config.split:
                assert config.block_k >= 16 * config.split
    assert uses_cublas(129, 256, 256, dtype)
    assert uses_cublas(32, 1024, 8192, dtype)
    for rows in (8, 9, 128):
        assert uses_cublas(rows, 256, 256, dtype) == (dtype == torch.float32)
    assert not uses_cublas(4, 1024, 7680, dtype)
    assert uses_cublas(1, 262144, 1024, dtype)
    assert not uses_cublas(1, 16384, 1024, dtype)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, dtype):
    plain = {1: [(1024, 256), (1024, 7680)], 8: [(256, 3072)], 32: [(960, 1152), (4096, 1024)], 128: [(256, 2048)]}
    gated = {1: [(16384, 1024)], 4: [(576, 1728)], 8: [(4096, 256)], 16: [(16384, 1024)], 128: [(4096, 256)]}
    for activation, shapes in ((None, plain), ("silu", gated)):
        for rows in shapes if dtype != torch.float32 else (1, 4):  # more float32 rows run what 4 do
            for shape in shapes.get(rows, ()):
                x, weight, bias = inputs(rows, shape, CPU, dtype, bias=rows == 8)
                options: dict[str, Any] = {"bias": bias, "activation": activation, "impl": "triton"}
                assert_compiles(lambda x=x, w=weight, o=options: linear(x, w, **o), target)


@pytest.mark.compiled
@pytest.mark.parametrize(("rows", "others"), [(3, (4,)), (5, (6, 8)), (17, (24, 32)), (65, (128,))])
def test_rows_of_one_bucket_share_a_variant(rows, others):
    """So a row's sum is the same in a padded batch: the order depends on the variant alone."""

    def of(count):
        x, weight, _ = inputs(count, (1024, 256), CPU, torch.bfloat16)
        return variants(lambda: linear(x, weight))

    assert all(of(count) == of(rows) for count in others)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (5, 8), (17, 32), (33, 64), (100, 128)])
def test_a_row_is_the_same_in_a_padded_batch(rows, padded, device):
    x, weight, _ = inputs(padded, (256, 3072), device, torch.bfloat16)
    assert torch.equal(linear(x, weight)[:rows], linear(x[:rows], weight))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 32, 128])
def test_captured_at_its_first_call(rows, device):
    """A chain, each linear layer right behind the kernel whose result it reads; replayed on other inputs."""
    _, first, _ = inputs(rows, (4096, 256), device, torch.bfloat16)
    x, second, bias = inputs(rows, (256, 4096), device, torch.bfloat16, bias=True)
    x = x[:, :256].contiguous()
    out = torch.zeros(rows, 256, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            state = x
            for _ in range(8):
                state = linear(linear(state, first), second, bias=bias, out=out)
        for _ in range(20):
            graph.replay()
        x.normal_()
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager, exact = x, x.double()
    for _ in range(8):
        hidden = linear_reference(eager, first)
        eager = linear_reference(hidden, second, bias)
        exact = exact_linear(exact_linear(exact, first, None), second, bias)
    assert_close_to_float64(out, exact, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_offsets_past_2_to_31(rows, device):
    weight = torch.zeros(2**20 + 4, 2048, device=device, dtype=torch.bfloat16)
    weight[-2:] = torch.randn(2, 2048, device=device)
    x = torch.randn(rows, 2048, device=device).bfloat16()
    assert_exact(linear(x, weight, impl="triton")[:, -2:], x, weight[-2:])
