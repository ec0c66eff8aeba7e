"""RMS norms against float64 and transformers."""

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels.norm import add_rms_norm, norm_config, rms_norm

# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
SHAPES = [(1, 256), (3, 40), (2, 1023), (7, 1)]


def exact_rms(x, weight=None, eps=1e-6):
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(shape, dtype, weighted, impl, device):
    x = torch.randn(shape, device=device).to(dtype) * 7
    weight = torch.randn(shape[-1], device=device).to(dtype) if weighted else None
    out = rms_norm(x, weight, impl=impl)
    same_dtype = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6)
    assert_close_to_float64(out, exact_rms(x, weight), same_dtype)


def test_rms_norm_is_transformers(impl, device):
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    norm = modeling.Gemma4RMSNorm(64, eps=1e-5).to(device)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 64, device=device) * 3
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, norm.weight.detach(), eps=1e-5, impl=impl), norm(x))


def test_rms_norm_mixes_a_float32_weight_with_16_bit_rows(impl, device):
    x, weight = torch.randn(2, 64, device=device).half(), torch.randn(64, device=device)
    out = rms_norm(x, weight, impl=impl)
    assert out.dtype == torch.float16
    assert_close_to_float64(out, exact_rms(x, weight))


def test_rms_norm_of_zeros_and_large_values(impl, device):
    x = torch.tensor([[0.0] * 4, [3e18] * 4, [-6e4, 6e4, 6e4, 6e4]], device=device)
    out = rms_norm(x, impl=impl).cpu()
    torch.testing.assert_close(out, torch.tensor([[0.0] * 4, [1.0] * 4, [-1.0, 1.0, 1.0, 1.0]]))


def test_rms_norm_keeps_leading_dimensions_and_strides(impl, device):
    x = torch.randn(4, 6, 32, device=device).transpose(0, 1)
    out = rms_norm(x, impl=impl)
    assert out.shape == (6, 4, 32)
    assert out.is_contiguous()
    assert_close_to_float64(out, exact_rms(x), torch.nn.functional.rms_norm(x, (32,), eps=1e-6))
    wide = torch.randn(5, 100, device=device)
    out = torch.zeros(5, 64, device=device)
    rms_norm(wide[:, 30:70], out=out[:, 8:48], impl=impl)
    assert_close_to_float64(
        out[:, 8:48], exact_rms(wide[:, 30:70]), torch.nn.functional.rms_norm(wide[:, 30:70], (40,))
    )
    assert not out[:, :8].any()
    assert not out[:, 48:].any()


def test_rms_norm_in_place(impl, device):
    x = torch.randn(3, 64, device=device)
    expected = rms_norm(x, impl=impl)
    assert rms_norm(x, out=x, impl=impl) is x
    assert torch.equal(x, expected)


def test_norms_of_no_rows(impl, device):
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert rms_norm(x, weight, impl=impl).shape == (0, 64)
    assert [one.shape for one in add_rms_norm(x, x, weight, impl=impl)] == [(0, 64)] * 2


def test_a_row_does_not_depend_on_its_neighbours(impl, device):
    x, weight = torch.randn(5, 96, device=device), torch.randn(96, device=device)
    together = rms_norm(x, weight, impl=impl)
    fused = add_rms_norm(x, x.flip(0), weight, post_weight=weight, impl=impl)
    for row in range(5):
        part = x[row : row + 1]
        assert torch.equal(rms_norm(part, weight, impl=impl), together[row : row + 1])
        alone = add_rms_norm(part, x.flip(0)[row : row + 1], weight, post_weight=weight, impl=impl)
        assert torch.equal(alone[0], fused[0][row : row + 1])
        assert torch.equal(alone[1], fused[1][row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("post", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_add_rms_norm(post, scaled, dtype, impl, device):
    x, residual = (torch.randn(3, 80, device=device).to(dtype) for _ in range(2))
    weight, post_weight = (torch.randn(80, device=device).to(dtype) for _ in range(2))
    scale = torch.tensor([0.246], device=device).to(dtype) if scaled else None
    normed, stream = add_rms_norm(
        x, residual, weight, post_weight=post_weight if post else None, scale=scale, impl=impl
    )
    branch = exact_rms(x, post_weight) if post else x.double()
    exact = (residual.double() + branch) * (1 if scale is None else scale.double())
    branch = torch.nn.functional.rms_norm(x, (80,), post_weight, 1e-6) if post else x
    same_dtype = (residual + branch) * (1 if scale is None else scale)
    assert_close_to_float64(stream, exact, same_dtype)
    assert_close_to_float64(
        normed, exact_rms(exact, weight), torch.nn.functional.rms_norm(same_dtype, (80,), weight, 1e-6)
    )


def test_add_rms_norm_norms_the_stream_it_returns(impl, device):
    x, residual, weight = (torch.randn(3, 64, device=device).half() for _ in range(3))
    normed, stream = add_rms_norm(x, residual, weight[0], post_weight=weight[1], impl=impl)
    assert torch.equal(normed, rms_norm(stream, weight[0], impl=impl))


def test_add_rms_norm_leaves_its_inputs_alone(impl, device):
    x, residual = torch.randn(3, 100, device=device)[:, :64], torch.randn(3, 64, device=device)
    before = x.clone(), residual.clone()
    add_rms_norm(x, residual, torch.ones(64, device=device), impl=impl)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_refusals_name_the_argument():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(TypeError, match="x: got int64"):
        rms_norm(x.long())
    with pytest.raises(ValueError, match=r"weight: got shape \[4\], needs \[8\]"):
        rms_norm(x, weight[:4])
    with pytest.raises(ValueError, match="x: got strides"):
        rms_norm(x.t())
    with pytest.raises(TypeError, match="out: got float16"):
        rms_norm(x, out=x.half())
    with pytest.raises(ValueError, match=r"out: got strides .* needs it contiguous"):
        rms_norm(torch.zeros(2, 3, 8), out=torch.zeros(3, 2, 8).transpose(0, 1))
    with pytest.raises(TypeError, match="residual: got float16"):
        add_rms_norm(x, x.half(), weight)
    with pytest.raises(ValueError, match="post_weight"):
        add_rms_norm(x, x, weight, post_weight=weight[:1])
    with pytest.raises(ValueError, match=r"scale: got shape \[2\], needs \[1\]"):
        add_rms_norm(x, x, weight, scale=torch.ones(2))
    with pytest.raises(ValueError, match="impl"):
        rms_norm(x, impl="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.randn(3, 16), torch.randn(2, 40)[:, 3:35]], ids=["contiguous", "view"])
@pytest.mark.compiled
def test_opcheck(x, device):
    x = x.to(device)
    size = x.shape[-1]
    weight = torch.ones(size, device=device)
    empty = [torch.zeros(x.shape, device=device) for _ in range(3)]
    triton = device.type == "cuda"
    torch.library.opcheck(torch.ops.tridraft.rms_norm.default, (x, weight, 1e-6, empty[0], triton))
    for post, scale in ((weight, torch.ones(1, device=device)), (None, None)):
        args = (x, x.clone(), weight, post, scale, 1e-6, empty[1], empty[2], triton)
        torch.library.opcheck(torch.ops.tridraft.add_rms_norm.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def layer(x, residual, weight):
        normed, stream = add_rms_norm(x, residual, weight, post_weight=weight)
        return rms_norm(normed + 1, weight) + stream

    x, residual, weight = (torch.randn(4, 32, device=device) for _ in range(3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, residual, weight[0]), layer(x, residual, weight[0]))


def test_config_keeps_a_row_in_registers():
    for target, (_, arch) in TARGETS.items():
        for hidden in (1, 40, 256, 1024, 5376, 16384):
            config = norm_config(hidden, arch)
            threads = config.num_warps * (64 if target == "gfx942" else 32)
            assert config.block >= hidden
            assert config.block // threads <= 32
            assert threads <= 1024


@pytest.mark.compiled
@pytest.mark.parametrize(("hidden", "dtype"), [(256, torch.bfloat16), (5376, torch.bfloat16), (1000, torch.float32)])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, hidden, dtype):
    x, weight = torch.zeros(2, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    assert_compiles(lambda: (rms_norm(x), rms_norm(x, weight)), target)
    assert_compiles(lambda: add_rms_norm(x, x, weight), target)
    assert_compiles(lambda: add_rms_norm(x, x, weight, post_weight=weight, scale=torch.ones(1)), target)


@pytest.mark.gpu
def test_replays_on_changed_inputs(device):
    x, residual = (torch.randn(5, 320, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(320, device=device, dtype=torch.bfloat16)
    scale = torch.ones(1, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            normed, stream = add_rms_norm(x, residual, weight, post_weight=weight, scale=scale)
            out = rms_norm(normed, weight)  # reads what the kernel before it, launched to overlap with it, writes
        for seed in range(3):
            generator = torch.Generator(device).manual_seed(seed)
            x.normal_(generator=generator)
            scale.fill_(seed + 0.5)
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = add_rms_norm(x, residual, weight, post_weight=weight, scale=scale, impl="eager")
    torch.testing.assert_close(stream, expected[1])
    torch.testing.assert_close(out, rms_norm(expected[0], weight, impl="eager"))


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31st_element(device):
    x = torch.zeros(2**21 + 8, 1024, device=device, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 1024, device=device)
    out = rms_norm(x)
    assert_close_to_float64(out[-3:], exact_rms(x[-3:]))
