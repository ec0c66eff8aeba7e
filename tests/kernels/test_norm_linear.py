"""Linear layers behind a norm, against float64."""

from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels.linear import fuses_norm, linear_reference, norm_linear
from tridraft.kernels.norm import add_rms_norm_reference, rms_norm_reference

# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
CPU = torch.device("cpu")
EPS = 1e-6
# (M, K) of the linear layers behind norms: queries, then gate and up, of Gemma 4's E2B and 12B assistants; SmolLM2's.
DRAFTERS = [(1024, 256), (2048, 256), (4096, 256), (4096, 1024), (8192, 1024), (16384, 1024), (3072, 576)]
FORMS = ["norm", "add", "add, post, scale"]


def inputs(rows, shape, device, dtype, form) -> Any:
    """x, the two weights, and the options of a form."""
    out_features, in_features = shape

    def random(*size):
        return torch.randn(size, device=device).to(dtype)

    weight = (random(out_features, in_features) * in_features**-0.5).to(dtype)
    options = {} if form == "norm" else {"residual": random(rows, in_features)}
    if form == "add, post, scale":
        options |= {"post_weight": random(in_features), "scale": torch.tensor([0.7], device=device, dtype=dtype)}
    return random(rows, in_features), random(in_features), weight, options


def exact(x, norm_weight, weight, bias=None, activation=None, *, residual=None, post_weight=None, scale=None):
    """The formulas in float64; the stream is that of the dtype, which is what the norm reads."""

    def rms(value):
        return value * (value.square().mean(-1, keepdim=True) + EPS).rsqrt()

    stream = branch = x.double()
    if residual is not None:
        if post_weight is not None:
            branch = rms(branch) * post_weight.double()
        stream = residual.double() + branch
        stream = stream if scale is None else stream * scale.double()
    out = rms(stream.to(x.dtype).double()) * norm_weight.double() @ weight.double().t()
    out = out if bias is None else out + bias.double()
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = up * (
            torch.nn.functional.silu(gate)
            if activation == "silu"
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
    return out, stream


def composed(x, norm_weight, weight, bias=None, activation=None, *, residual=None, post_weight=None, scale=None):
    """The definitions of the operations it stands for, each rounding its result."""
    if residual is None:
        normed = rms_norm_reference(x, norm_weight, EPS)
    else:
        normed, x = add_rms_norm_reference(x, residual, norm_weight, post_weight, scale, EPS)
    return linear_reference(normed, weight, bias, activation), x


def assert_exact(x, norm_weight, weight, options, impl, bias=None, activation=None):
    out, stream = norm_linear(x, norm_weight, weight, bias=bias, activation=activation, eps=EPS, impl=impl, **options)
    wanted, same = (f(x, norm_weight, weight, bias, activation, **options) for f in (exact, composed))
    assert out.dtype == stream.dtype == x.dtype
    assert_close_to_float64(stream, wanted[1], same[1])
    assert_close_to_float64(out, wanted[0], same[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_rows(rows, form, dtype, impl, device):
    x, norm_weight, weight, options = inputs(rows, (36, 320), device, dtype, form)
    bias = torch.randn(36, device=device).to(dtype) if rows % 2 else None
    for activation in (None, "silu", "gelu_tanh"):
        assert_exact(x, norm_weight, weight, options, impl, bias, activation)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [4, 5, 8, 17, 32, 33])
@pytest.mark.parametrize("in_features", [50, 64, 128, 256])
def test_narrow_rows(in_features, rows, form, dtype, impl, device):
    """From 5 rows on products of 16-bit types run on tensor cores, whose warps have columns of their own."""
    x, norm_weight, weight, options = inputs(rows, (40, in_features), device, dtype, form)
    assert_exact(x, norm_weight, weight, options, impl, activation="silu")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (17, 31), (130, 255), (5, 1000), (6, 4095), (4, 4097)], ids=str)
def test_ragged_shapes(shape, form, rows, impl, device):
    x, norm_weight, weight, options = inputs(rows, shape, device, torch.float16, form)
    assert_exact(x, norm_weight, weight, options, impl)


@pytest.mark.parametrize("form", FORMS[1:])
def test_strides(form, impl, device):
    """Views inside NaN: nothing around them is read."""
    x, norm_weight, weight, options = inputs(3, (20, 50), device, torch.float32, form)
    wide = torch.full((3, 3, 90), torch.nan, device=device)
    wide[0, :, 7:57], wide[1, :, 9:59] = x, options["residual"]
    views = {**options, "residual": wide[1, :, 9:59]}
    got = norm_linear(wide[0, :, 7:57], norm_weight, weight, eps=EPS, impl=impl, **views)
    wanted = norm_linear(x, norm_weight, weight, eps=EPS, impl=impl, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_a_norm_alone_leaves_the_stream(impl, device):
    x, norm_weight, weight, _ = inputs(2, (6, 32), device, torch.float32, "norm")
    assert norm_linear(x, norm_weight, weight, eps=EPS, impl=impl)[1] is x
    empty = norm_linear(x[:0], norm_weight, weight, residual=x[:0], eps=EPS, impl=impl)
    assert [tuple(one.shape) for one in empty] == [(0, 6), (0, 32)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("shape", DRAFTERS, ids=str)
def test_every_shape_of_every_drafter(shape, rows, form, dtype, device):
    x, norm_weight, weight, options = inputs(rows, shape, device, dtype, form)
    for impl in ("auto", "triton"):
        assert_exact(x, norm_weight, weight, options, impl)
        assert_exact(x, norm_weight, weight, options, impl, activation="gelu_tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_captured_at_its_first_call(rows, device):
    """A chain of layers, each behind the kernel that wrote its input and its stream; replayed on other inputs."""
    x, norm_weight, weight, options = inputs(rows, (256, 256), device, torch.bfloat16, FORMS[2])
    stream, graph = options.pop("residual"), torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            state = (x, stream)
            for _ in range(8):
                state = norm_linear(state[0], norm_weight, weight, residual=state[1], eps=EPS, **options)
        for _ in range(20):
            graph.replay()
        x.normal_()
        stream.normal_()
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = (x, stream)
    for _ in range(8):
        wanted = norm_linear(wanted[0], norm_weight, weight, residual=wanted[1], eps=EPS, **options)
    assert all(torch.equal(one, other) for one, other in zip(state, wanted, strict=True))


@pytest.mark.gpu
def test_a_row_is_the_same_in_a_padded_batch(device):
    x, norm_weight, weight, options = inputs(4, (4096, 256), device, torch.bfloat16, FORMS[2])
    residual = options.pop("residual")
    whole = norm_linear(x, norm_weight, weight, residual=residual, **options)
    part = norm_linear(x[:3], norm_weight, weight, residual=residual[:3], **options)
    assert all(torch.equal(one[:3], other) for one, other in zip(whole, part, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("in_features", [64, 256, 257, 320, 341, 512, 1024])
def test_rows_of_one_bucket_norm_alike(in_features, dtype):
    """In a launch of its own a norm is summed in another order."""
    for bucket in ((3, 4), (5, 6, 7, 8), (9, 15, 16), (17, 31, 32), (33, 64)):
        assert len({fuses_norm(rows, 1024, in_features, dtype) for rows in bucket}) == 1


def test_refusals_name_the_argument():
    x, norm_weight, weight, _ = inputs(2, (5, 8), CPU, torch.float32, "norm")
    with pytest.raises(ValueError, match="residual: got None, needs one for post_weight and scale"):
        norm_linear(x, norm_weight, weight, post_weight=norm_weight)
    with pytest.raises(ValueError, match=r"norm_weight: got shape \[7\], needs \[8\]"):
        norm_linear(x, norm_weight[:7], weight)
    with pytest.raises(ValueError, match=r"residual: got shape \[1, 8\], needs \[2, 8\]"):
        norm_linear(x, norm_weight, weight, residual=x[:1])
    with pytest.raises(ValueError, match="weight: got 5 rows, needs an even number"):
        norm_linear(x, norm_weight, weight, activation="silu")


@pytest.mark.compiled
@pytest.mark.parametrize("form", FORMS)
def test_opcheck_and_full_graph(form, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    x, norm_weight, weight, options = inputs(3, (20, 40), device, torch.float32, form)
    if device.type == "cuda":
        before = tuple(options.get(name) for name in ("residual", "post_weight", "scale"))
        outputs = (torch.zeros(3, 20, device=device), None if form == "norm" else torch.zeros_like(x))
        operation = torch.ops.tridraft.norm_linear.default
        torch.library.opcheck(operation, (x, norm_weight, weight, *before, EPS, None, None, *outputs))
    compiled = torch.compile(
        lambda x: norm_linear(x * 2, norm_weight, weight, eps=EPS, **options), fullgraph=True, backend="aot_eager"
    )
    for got, wanted in zip(compiled(x), composed(x * 2, norm_weight, weight, **options), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, dtype):
    cases = [(4, (1024, 256), FORMS[0]), (1, (8192, 1024), FORMS[1]), (1, (3072, 576), FORMS[2])]
    for rows, shape, form in [*cases, (8, (4096, 256), FORMS[2]), (32, (4096, 256), FORMS[2])]:
        x, norm_weight, weight, options = inputs(rows, shape, CPU, dtype, form)
        assert fuses_norm(rows, *shape, dtype) or (rows > 4 and dtype == torch.float32)
        assert_compiles(
            lambda x=x, n=norm_weight, w=weight, o=options: norm_linear(x, n, w, activation="silu", impl="triton", **o),
            target,
        )
