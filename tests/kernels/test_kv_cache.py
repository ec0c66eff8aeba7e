"""Cache writes and the fused norm, rotary embedding and write against float64 and transformers."""

from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels.kv_cache import FP8, qk_norm_rope, qk_norm_rope_config, write_kv, write_kv_config

# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
POSITIONS = [0, 1, 4999, 105_616, 131_071, 131_072]


def frequencies(n, theta=1e4, rotated=None, device="cpu"):
    """Inverse frequencies of a head of 2n dimensions, of which `rotated` pairs rotate (proportional rotary)."""
    inv_freq = theta ** (-torch.arange(n, device=device) / n)
    return inv_freq if rotated is None else torch.where(torch.arange(n, device=device) < rotated, inv_freq, 0)


def exact_norm(x, weight=None, eps=1e-6):
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight.double()


def exact_rotary(x, positions, inv_freq):
    """Rotate each pair as a complex number; the angle is the float32 product that a model computes."""
    n = len(inv_freq)
    angle = (positions.float()[:, None] * inv_freq).double()[:, None]
    pair = torch.complex(x[..., :n].double(), x[..., n : 2 * n].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pair.real, pair.imag, x[..., 2 * n :].double()), -1)


def make_cache(layout, num_blocks, block_size, heads, head_dim, dtype, device):
    """K and V caches `[num_blocks, block_size, heads, head_dim]` over one tensor, and that tensor, filled with 7."""
    shapes = {
        "pool": ((2, num_blocks, block_size, heads, head_dim), lambda t: (t[0], t[1])),
        "interleaved": ((num_blocks, 2, block_size, heads, head_dim), lambda t: (t[:, 0], t[:, 1])),
        "packed": ((num_blocks, block_size, heads, 2 * head_dim), lambda t: t.chunk(2, -1)),
        "head-major": ((num_blocks, 2, heads, block_size, head_dim), lambda t: t.transpose(2, 3).unbind(1)),
    }
    shape, views = shapes[layout]
    storage = torch.full(shape, 7.0, device=device).to(dtype)
    return (*views(storage), storage)


def at_slots(cache, slots):
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def assert_only_written(cache, slots):
    """Every slot but `slots` still holds 7."""
    untouched = torch.ones(cache.shape[:2], dtype=torch.bool, device=cache.device)
    untouched[slots // cache.shape[1], slots % cache.shape[1]] = False
    assert (cache[untouched].float() == 7).all()


@pytest.mark.parametrize("layout", ["pool", "interleaved", "packed", "head-major"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_layouts(layout, block_size, impl, device):
    k_cache, v_cache, _ = make_cache(layout, 20, block_size, 2, 24, torch.float32, device)
    k, v = torch.randn(4, 2, 24, device=device), torch.randn(4, 2, 24, device=device)
    slots = torch.tensor([17, -1, 0, 5], device=device)
    write_kv(k, v, k_cache, v_cache, slots, impl=impl)
    written = slots >= 0
    assert torch.equal(at_slots(k_cache, slots[written]), k[written])
    assert torch.equal(at_slots(v_cache, slots[written]), v[written])
    assert_only_written(k_cache, slots[written])
    assert_only_written(v_cache, slots[written])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_write_kv_copies_the_bits_of_views(dtype, impl, device):
    qkv = torch.randn(3, 8, 40, device=device).to(dtype)  # K and V as columns of a merged projection
    k, v = qkv[:, 2:5, :32], qkv[:, 5:8, :32]
    k_cache, v_cache, _ = make_cache("pool", 2, 8, 3, 32, dtype, device)
    slots = torch.tensor([9, 2, 15], device=device)
    write_kv(k, v, k_cache, v_cache, slots, impl=impl)
    assert torch.equal(at_slots(k_cache, slots), k)
    assert torch.equal(at_slots(v_cache, slots), v)


def test_write_kv_takes_one_tensor_as_k_and_v(impl, device):
    k_cache, v_cache, _ = make_cache("pool", 2, 4, 1, 16, torch.float32, device)
    k = torch.randn(2, 1, 16, device=device)
    slots = torch.tensor([1, 6], device=device)
    write_kv(k, k, k_cache, v_cache, slots, impl=impl)
    assert torch.equal(at_slots(k_cache, slots), k)
    assert torch.equal(at_slots(v_cache, slots), k)


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 0, -1], [5, -1, -1]], ids=str)
def test_write_kv_of_padding(slots, impl, device):
    k_cache, v_cache, storage = make_cache("interleaved", 2, 4, 2, 8, torch.float32, device)
    before = storage.clone()
    k = torch.full((3, 2, 8), float("nan"), device=device)
    slots = torch.tensor(slots, device=device)
    k[slots >= 0] = 1.0
    write_kv(k, k, k_cache, v_cache, slots, impl=impl)
    for slot in slots[slots >= 0].tolist():
        before[slot // 4, :, slot % 4] = 1.0
    assert torch.equal(storage, before)


def test_write_kv_of_no_tokens(impl, device):
    k_cache, v_cache, storage = make_cache("pool", 2, 4, 2, 8, torch.float32, device)
    k = torch.empty(0, 2, 8, device=device)
    write_kv(k, k, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device), impl=impl)
    assert (storage == 7).all()


def fp8_values(shape, device):
    """Values an fp8 cache holds exactly: the interpreter's conversion to fp8 loses the carry when it rounds up."""
    values = torch.randint(-120, 120, shape, device=device).float()
    return values.to(FP8).float() if INTERPRET else values * 1.13


@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "a scale a head"])
def test_write_kv_scales_into_fp8(per_head, impl, device):
    k_cache, v_cache, _ = make_cache("pool", 2, 4, 3, 16, FP8, device)
    k_scale, v_scale = torch.tensor([0.5, 0.03125, 4.0], device=device), torch.tensor([2.0, 1.0, 0.25], device=device)
    if not per_head:
        k_scale, v_scale = k_scale[1:2], v_scale[2:3]
    k, v = (fp8_values((4, 3, 16), device) * scale[:, None] for scale in (k_scale, v_scale))
    slots = torch.tensor([3, -1, 7, 0], device=device)
    written = slots >= 0
    write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale, impl=impl)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        assert torch.equal(at_slots(cache, slots[written]).float(), (x[written] / scale[:, None]).to(FP8).float())


def test_fp8_saturates(impl, device):
    k_cache, v_cache, _ = make_cache("pool", 1, 4, 1, 4, FP8, device)
    k = torch.tensor([[[448.0, 480.0, 1e9, float("inf")]]], device=device)
    slots = torch.tensor([2], device=device)
    write_kv(k, -k, k_cache, v_cache, slots, k_scale=torch.tensor([0.5], device=device), impl=impl)
    assert at_slots(k_cache, slots).float().tolist() == [[[448.0] * 4]]
    assert at_slots(v_cache, slots).float().tolist() == [[[-448.0] * 4]]


@pytest.mark.skipif(INTERPRET, reason="the interpreter's conversion to fp8 makes 384 of NaN")
def test_fp8_keeps_nan(impl, device):
    k_cache, v_cache, _ = make_cache("pool", 1, 4, 1, 4, FP8, device)
    k = torch.full((1, 1, 4), float("nan"), device=device)
    write_kv(k, k, k_cache, v_cache, torch.tensor([2], device=device), impl=impl)
    assert at_slots(k_cache, torch.tensor([2], device=device)).float().isnan().all()


CASES = [
    # q heads, kv heads, head dim, frequencies, rotated
    pytest.param(2, 1, 32, 16, None, id="MQA"),
    pytest.param(4, 2, 16, 8, 3, id="GQA-proportional"),
    pytest.param(3, 3, 24, 4, None, id="partial"),
    pytest.param(5, 2, 12, 6, None, id="odd"),
    pytest.param(1, 1, 10, 1, None, id="one-pair"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "n", "rotated"), CASES)
def test_qk_norm_rope(q_heads, kv_heads, head_dim, n, rotated, dtype, impl, device):
    tokens = len(POSITIONS)
    q, k, v = (torch.randn(tokens, h, head_dim, device=device).to(dtype) for h in (q_heads, kv_heads, kv_heads))
    q_weight, k_weight = (torch.randn(head_dim, device=device).to(dtype) for _ in range(2))
    positions = torch.tensor(POSITIONS, device=device)
    inv_freq = frequencies(n, rotated=rotated, device=device)
    k_cache, v_cache, _ = make_cache("interleaved", 3, 4, kv_heads, head_dim, dtype, device)
    slots = torch.tensor([11, 4, -1, 0, 5, 6], device=device)
    out = qk_norm_rope(
        q, positions, inv_freq, q_weight=q_weight, k=k, v=v, k_weight=k_weight, v_norm=True,
        k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, impl=impl,
    )  # fmt: skip

    def same_dtype(x, weight, rotate=True):
        x = torch.nn.functional.rms_norm(x, (head_dim,), weight, 1e-6)
        angle = positions.float()[:, None, None] * inv_freq
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        left, right = x[..., :n], x[..., n : 2 * n]
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., 2 * n :]), -1)
        return rotated if rotate else x

    written = slots >= 0
    assert_close_to_float64(out, exact_rotary(exact_norm(q, q_weight), positions, inv_freq), same_dtype(q, q_weight))
    exact = exact_rotary(exact_norm(k, k_weight), positions, inv_freq)[written]
    assert_close_to_float64(at_slots(k_cache, slots[written]), exact, same_dtype(k, k_weight)[written])
    exact = exact_norm(v)[written]
    assert_close_to_float64(at_slots(v_cache, slots[written]), exact, same_dtype(v, None, False)[written])
    assert_only_written(k_cache, slots[written])
    assert_only_written(v_cache, slots[written])


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_qk_norm_rope_is_transformers(layer_type, impl, device):
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    config = modeling.Gemma4TextConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
    )
    rotary = modeling.Gemma4TextRotaryEmbedding(config, device=device)
    inv_freq = getattr(rotary, f"{layer_type}_inv_freq")
    head_dim = 2 * len(inv_freq)
    norm = modeling.Gemma4RMSNorm(head_dim).to(device)
    torch.nn.init.normal_(norm.weight)
    q = torch.randn(len(POSITIONS), 2, head_dim, device=device)
    positions = torch.tensor(POSITIONS, device=device)
    with torch.no_grad():
        cos, sin = rotary(q, positions[None], layer_type)
        expected = modeling.apply_rotary_pos_emb(norm(q), cos[0], sin[0])
        out = qk_norm_rope(q, positions, inv_freq, q_weight=norm.weight.detach(), impl=impl)
    assert (inv_freq == 0).any() == (layer_type == "full_attention")
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)  # two float32 norms, sines of the same angles


def test_qk_norm_rope_writes_k_and_v_of_one_tensor(impl, device):
    """Gemma 4's shared projection: V is the normed raw key, not the rotated one, and carries no weight."""
    k = torch.randn(2, 1, 16, device=device)
    k_cache, v_cache, _ = make_cache("packed", 2, 4, 1, 16, torch.float32, device)
    positions, slots, inv_freq = (
        torch.tensor([3, 9], device=device),
        torch.tensor([0, 7], device=device),
        frequencies(8, device=device),
    )
    qk_norm_rope(
        torch.randn(2, 2, 16, device=device), positions, inv_freq, k=k, v=k, v_norm=True, impl=impl,
        k_weight=torch.full((16,), 2.0, device=device), k_cache=k_cache, v_cache=v_cache, slot_mapping=slots,
    )  # fmt: skip
    assert_close_to_float64(at_slots(v_cache, slots), exact_norm(k), torch.nn.functional.rms_norm(k, (16,), eps=1e-6))
    exact = exact_rotary(exact_norm(k) * 2, positions, inv_freq)
    torch.testing.assert_close(at_slots(k_cache, slots).double(), exact, atol=1e-5, rtol=1e-5)


def test_qk_norm_rope_without_norms(impl, device):
    q, k, v = (torch.randn(3, h, 16, device=device) for h in (4, 2, 2))
    k_cache, v_cache, _ = make_cache("pool", 1, 4, 2, 16, torch.float32, device)
    positions, slots = torch.tensor([0, 5, 70], device=device), torch.tensor([2, 0, 1], device=device)
    inv_freq = frequencies(8, device=device)
    out = qk_norm_rope(
        q, positions, inv_freq, k=k, v=v, qk_norm=False, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, impl=impl
    )
    torch.testing.assert_close(out.double(), exact_rotary(q, positions, inv_freq), atol=1e-5, rtol=1e-5)
    assert torch.equal(out[0], q[0])
    torch.testing.assert_close(
        at_slots(k_cache, slots).double(), exact_rotary(k, positions, inv_freq), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(at_slots(v_cache, slots), v)


@pytest.mark.parametrize("weighted", ["q", "k"])
def test_qk_norm_rope_with_one_weight(weighted, impl, device):
    q, k = torch.ones(1, 1, 8, device=device), torch.ones(1, 1, 8, device=device)
    k_cache, v_cache, _ = make_cache("pool", 1, 1, 1, 8, torch.float32, device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    weight: dict[str, Any] = {f"{weighted}_weight": torch.arange(8.0, device=device)}
    out = qk_norm_rope(
        q, zero, frequencies(4, device=device), k=k, v=k, k_cache=k_cache, v_cache=v_cache,
        slot_mapping=zero, impl=impl, **weight,
    )  # fmt: skip
    expected = {True: list(range(8)), False: [1] * 8}
    assert out.flatten().tolist() == pytest.approx(expected[weighted == "q"], rel=1e-5)
    assert k_cache.flatten().tolist() == pytest.approx(expected[weighted == "k"], rel=1e-5)
    assert v_cache.flatten().tolist() == [1] * 8


@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "a scale a head"])
def test_qk_norm_rope_into_fp8(per_head, impl, device):
    k, v = fp8_values((2, 2, 8), device), fp8_values((2, 2, 8), device)
    k[0, 0, 0] = 1e6
    k_cache, v_cache, _ = make_cache("head-major", 2, 2, 2, 8, FP8, device)
    k_scale, v_scale = torch.tensor([0.5, 4.0], device=device), torch.tensor([0.25, 1.0], device=device)
    if not per_head:
        k_scale, v_scale = k_scale[:1], v_scale[:1]
    slots = torch.tensor([3, 0], device=device)
    qk_norm_rope(
        torch.ones(2, 3, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device),
        frequencies(4, device=device), k=k, v=v, qk_norm=False, k_cache=k_cache, v_cache=v_cache,
        slot_mapping=slots, k_scale=k_scale, v_scale=v_scale, impl=impl,
    )  # fmt: skip
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        expected = (x / scale[:, None]).clamp(-448, 448).to(FP8).float()
        assert torch.equal(at_slots(cache, slots).float(), expected)


def test_qk_norm_rope_strides_and_in_place(impl, device):
    qkv = torch.randn(3, 6, 24, device=device)
    q = qkv[:, 1:4, 4:20]
    positions, inv_freq = torch.tensor([1, 2, 3], device=device), frequencies(8, device=device)
    expected = qk_norm_rope(q.contiguous(), positions, inv_freq, impl=impl)
    rest = qkv.clone()
    rest[:, 1:4, 4:20] = 0
    assert qk_norm_rope(q, positions, inv_freq, out=q, impl=impl) is q
    assert torch.equal(q, expected)
    qkv[:, 1:4, 4:20] = 0
    assert torch.equal(qkv, rest)


def test_a_token_does_not_depend_on_its_neighbours(impl, device):
    q, k = torch.randn(4, 3, 16, device=device), torch.randn(4, 1, 16, device=device)
    positions, slots = torch.tensor([7, 100_000, 3, 12], device=device), torch.arange(4, device=device)

    def run(rows):
        k_cache, v_cache, _ = make_cache("pool", 1, 4, 1, 16, torch.float32, device)
        out = qk_norm_rope(
            q[rows], positions[rows], frequencies(8, device=device), k=k[rows], v=k[rows], v_norm=True,
            k_cache=k_cache, v_cache=v_cache, slot_mapping=slots[rows], impl=impl,
        )  # fmt: skip
        return out, k_cache[0, slots[rows]], v_cache[0, slots[rows]]

    together = run(slice(None))
    for row in range(4):
        for alone, batched in zip(run(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], batched[row])


def test_no_tokens(impl, device):
    q = torch.empty(0, 2, 8, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    assert qk_norm_rope(q, positions, frequencies(4, device=device), impl=impl).shape == (0, 2, 8)


def test_refusals_name_the_argument():
    q, k, positions, inv_freq = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3).long(), torch.ones(4)
    cache = torch.zeros(2, 4, 2, 8)
    kv: dict[str, Any] = {"k": k, "v": k, "k_cache": cache, "v_cache": cache, "slot_mapping": positions}
    with pytest.raises(ValueError, match="inv_freq: got 5 frequencies, needs 1 to 4"):
        qk_norm_rope(q, positions, torch.ones(5))
    with pytest.raises(TypeError, match="positions: got int32, needs int64"):
        qk_norm_rope(q, positions.int(), inv_freq)
    with pytest.raises(ValueError, match="q_weight: got a tensor with qk_norm=False"):
        qk_norm_rope(q, positions, inv_freq, q_weight=torch.ones(8), qk_norm=False)
    with pytest.raises(ValueError, match="k_weight: got a tensor without k"):
        qk_norm_rope(q, positions, inv_freq, k_weight=torch.ones(8))
    with pytest.raises(TypeError, match="k_weight: got float32, needs float16"):
        qk_norm_rope(q, positions, inv_freq, q_weight=torch.ones(8).half(), k_weight=torch.ones(8), **kv)
    for name in kv:
        with pytest.raises(ValueError, match=f"{name}: got None"):
            qk_norm_rope(q, positions, inv_freq, **{**kv, name: None})
    with pytest.raises(TypeError, match="k: got float16, needs float32"):
        qk_norm_rope(q, positions, inv_freq, **{**kv, "k": k.half(), "v": k.half()})
    with pytest.raises(ValueError, match=r"v: got shape \[3, 1, 8\]"):
        write_kv(k, k[:, :1], cache, cache, positions)
    with pytest.raises(ValueError, match=r"k_cache: got shape \[2, 4, 1, 8\]"):
        write_kv(k, k, cache[:, :, :1], cache, positions)
    with pytest.raises(ValueError, match="v_cache: got strides"):
        write_kv(k, k, cache, torch.zeros(2, 4, 8, 2).transpose(2, 3), positions)
    with pytest.raises(TypeError, match="slot_mapping: got int32"):
        write_kv(k, k, cache, cache, positions.int())
    with pytest.raises(ValueError, match=r"k_scale: got shape \[3\], needs \[2\]"):
        write_kv(k, k, cache, cache, positions, k_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"v_scale: got shape \[\], needs \[1\]"):
        write_kv(k, k, cache, cache, positions, v_scale=torch.tensor(1.0))


@pytest.mark.parametrize("layout", ["pool", "head-major"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.compiled
def test_opcheck(layout, heads, device):
    k_cache, v_cache, _ = make_cache(layout, 2, 4, heads, 16, torch.float32, device)
    q, k = torch.randn(3, 4, 16, device=device), torch.randn(3, heads, 20, device=device)[..., 2:18]
    slots, triton = torch.tensor([1, -1, 6], device=device), device.type == "cuda"
    args = (k, k.clone(), k_cache, v_cache, slots, None, None, triton)
    torch.library.opcheck(torch.ops.tridraft.write_kv.default, args)
    weight, inv_freq, out = torch.ones(16, device=device), frequencies(8, device=device), torch.zeros_like(q)
    rotary = (slots + 1, inv_freq, weight, weight, True, True, 1e-6)
    scale = torch.ones(heads, device=device)
    args = (q, k, k.clone(), *rotary, k_cache, v_cache, slots, scale, None, out, triton)
    torch.library.opcheck(torch.ops.tridraft.qk_norm_rope.default, args)
    args = (q, None, None, *rotary, None, None, None, None, None, out, triton)
    torch.library.opcheck(torch.ops.tridraft.qk_norm_rope.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty
    positions, slots = torch.tensor([3, 4], device=device), torch.tensor([1, -1], device=device)
    q, k, inv_freq = torch.randn(2, 2, 8, device=device), torch.randn(2, 1, 8, device=device), frequencies(4)

    def layer(k_cache, v_cache):
        return qk_norm_rope(
            q * 2, positions, inv_freq.to(device), k=k, v=k + 1, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots
        )

    caches = [make_cache("interleaved", 1, 4, 1, 8, torch.float32, device) for _ in range(2)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*caches[0][:2]), layer(*caches[1][:2]))
    assert torch.equal(caches[0][2], caches[1][2])


def test_configs():
    for _, arch in TARGETS.values():
        for head_dim in (64, 96, 128, 192, 256, 512):
            for q_heads, kv_heads in ((8, 1), (32, 16), (4, 0)):
                few = qk_norm_rope_config(1, q_heads, kv_heads, head_dim, arch)
                many = qk_norm_rope_config(2**20, q_heads, kv_heads, head_dim, arch)
                tiles = -(-q_heads // few.heads) + 2 * -(-kv_heads // few.heads)
                assert (few.programs, many.programs) == (tiles, 1)
                assert (few.heads, few.num_warps) == (many.heads, many.num_warps), "one compiled kernel for any batch"
            config = write_kv_config(16, head_dim)
            assert config.heads * config.programs >= 16


FP8_NEEDS = "k_cache: got float8_e4m3fn on sm_80, needs sm_89"


@pytest.mark.compiled
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, cache_dtype):
    slots = torch.zeros(2, dtype=torch.int64)
    scale = torch.ones(1) if cache_dtype == FP8 else None

    def call(q_heads, kv_heads, head_dim, n, **options):
        q, k = (torch.zeros(2, heads, head_dim, dtype=torch.bfloat16) for heads in (q_heads, kv_heads))
        k_cache, v_cache, _ = make_cache("pool", 2, 16, kv_heads, head_dim, cache_dtype, "cpu")
        write_kv(k, k, k_cache, v_cache, slots, k_scale=scale, v_scale=scale)
        qk_norm_rope(
            q, slots, torch.ones(n), k=k, v=k, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots,
            k_scale=scale, v_scale=scale, **options,
        )  # fmt: skip

    weight = torch.ones(512, dtype=torch.bfloat16)
    if (target, cache_dtype) == ("sm_80", FP8):
        with pytest.raises(ValueError, match=FP8_NEEDS):
            assert_compiles(lambda: call(2, 1, 64, 32), target)
        return
    assert_compiles(lambda: call(8, 1, 512, 256, q_weight=weight, k_weight=weight, v_norm=True), target)
    assert_compiles(lambda: call(16, 8, 96, 24, qk_norm=False), target)


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
def test_q_alone_compiles_ahead_of_time(target):
    for head_dim, dtype in ((256, torch.bfloat16), (512, torch.float32)):
        q, positions = torch.zeros(2, 4, head_dim, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        weight = torch.ones(head_dim, dtype=dtype)
        assert_compiles(lambda: qk_norm_rope(q, positions, torch.ones(head_dim // 2), q_weight=weight), target)  # noqa: B023


@pytest.mark.gpu
def test_replays_on_changed_inputs(device):
    q, k, v = (torch.randn(6, heads, 256, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    positions, slots = torch.arange(6, device=device), torch.full((6,), -1, device=device)
    inv_freq = frequencies(128, device=device)
    caches = [make_cache("interleaved", 3, 16, 2, 256, torch.bfloat16, device) for _ in range(2)]

    def call(k_cache, v_cache, impl):
        write_kv(v, k, v_cache, k_cache, slots, impl=impl)
        return qk_norm_rope(
            q,
            positions,
            inv_freq,
            k=k,
            v=v,
            v_norm=True,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slots,
            impl=impl,
        )

    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs, outs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
        for graph, cache, impl in zip(graphs, caches, ("triton", "eager"), strict=True):
            with torch.cuda.graph(graph):
                outs.append(call(cache[0], cache[1], impl))
        for replay in range(3):
            positions += 50_000
            slots.add_(7 * replay).clamp_(max=47)
            slots[replay : replay + 1].fill_(-1)
            slots[replay + 1 :] += torch.arange(5 - replay, device=device)
            for graph in graphs:
                graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(caches[0][2], caches[1][2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "n"), [(8, 1, 512, 256), (16, 8, 256, 128), (32, 4, 96, 24)]
)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 4099])
def test_real_sizes(tokens, cache_dtype, q_heads, kv_heads, head_dim, n, device):
    q, k, v = (torch.randn(tokens, h, head_dim, device=device).bfloat16() for h in (q_heads, kv_heads, kv_heads))
    weight = torch.randn(head_dim, device=device).bfloat16()
    positions = torch.randint(0, 131_072, (tokens,), device=device)
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    slots[::7] = -1
    written = slots >= 0
    inv_freq = frequencies(n, device=device)
    scale = torch.rand(kv_heads, device=device) * 0.1 + 0.01 if cache_dtype == FP8 else None
    k_cache, v_cache, _ = make_cache("interleaved", -(-2 * tokens // 16), 16, kv_heads, head_dim, cache_dtype, device)
    out = qk_norm_rope(
        q, positions, inv_freq, q_weight=weight, k=k, v=v, k_weight=weight, v_norm=True, k_cache=k_cache,
        v_cache=v_cache, slot_mapping=slots, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    assert_close_to_float64(out, exact_rotary(exact_norm(q, weight), positions, inv_freq))
    exact_k, exact_v = exact_rotary(exact_norm(k, weight), positions, inv_freq)[written], exact_norm(v)[written]
    for cache, exact in ((k_cache, exact_k), (v_cache, exact_v)):
        got = at_slots(cache, slots[written]).double()
        if scale is None:
            assert_close_to_float64(got.bfloat16(), exact)
        else:
            clipped = (exact / scale[:, None]).clamp(-448, 448)
            # Half a unit of e4m3's 3-bit mantissa, or of its smallest step 2⁻⁹ near zero; float32 may turn a tie.
            assert ((got - clipped).abs() <= clipped.abs() * 2**-4 * 1.001 + 2**-10).all()
        assert_only_written(cache, slots[written])


@pytest.mark.gpu
def test_slots_beyond_two_to_the_31st_element(device):
    """A block stride of 65,536 elements: block 32,768 starts at element 2³¹."""
    k_cache, v_cache = (torch.zeros(32_800, 16, 8, 512, device=device, dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(2, 8, 512, device=device).bfloat16() for _ in range(3))
    positions, inv_freq = torch.tensor([5, 6], device=device), frequencies(256, device=device)
    low, high = torch.tensor([3, 40], device=device), torch.tensor([32_768 * 16 + 3, 32_799 * 16 + 15], device=device)
    for slots in (low, high):
        write_kv(k, v, k_cache, v_cache, slots)
        assert torch.equal(at_slots(k_cache, slots), k)
        assert torch.equal(at_slots(v_cache, slots), v)
    for slots in (low, high):
        qk_norm_rope(q, positions, inv_freq, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots)
    assert torch.equal(at_slots(k_cache, low), at_slots(k_cache, high))
    assert torch.equal(at_slots(v_cache, high), v)
    assert torch.count_nonzero(k_cache).item() <= 4 * 8 * 512
