"""Norms, gated activation, and the fused norm, rotary embedding and cache write."""

from collections.abc import Callable
from typing import Any

import torch
from _harness import Benchmark, Case, compiled, main
from torch import Tensor

from tridraft.kernels.activation import gated_act, gated_act_reference
from tridraft.kernels.kv_cache import qk_norm_rope, qk_norm_rope_reference, write_kv, write_kv_reference
from tridraft.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-6


def dtype_of(device: torch.device) -> torch.dtype:
    """The 16-bit type of a GPU, and float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def compiled_at(tokens: int, eager: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The compiled provider at one decode size and at prefill: each compilation takes seconds."""
    return {"compile": compiled(eager)} if tokens == 32 or tokens > 1000 else {}


def rms_norm_case(tokens: int, hidden: int) -> Case:
    """One norm of the draft model's rows."""

    def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
        dtype = dtype_of(device)
        return torch.randn(tokens, hidden, device=device, dtype=dtype), torch.randn(hidden, device=device, dtype=dtype)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_reference(x, weight, EPS)

    return Case(
        name=f"rms_norm [{tokens}, {hidden}]",
        inputs=inputs,
        reference=eager,
        providers={
            "tridraft": rms_norm,
            "eager": eager,
            "torch": lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
            **compiled_at(tokens, eager),
        },
        bytes=2 * (2 * tokens * hidden + hidden),
        headline=(tokens, hidden) == (32, 1024),
    )


def add_rms_norm_case(tokens: int, hidden: int) -> Case:
    """What follows each block of Gemma 4: its output norm, the residual, the layer scalar, the next block's norm."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype_of(device))

        return normal(tokens, hidden), normal(tokens, hidden), normal(hidden), normal(hidden), normal(1)

    def fused(x: Tensor, residual: Tensor, weight: Tensor, post_weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, post_weight=post_weight, scale=scale)

    def eager(x: Tensor, residual: Tensor, weight: Tensor, post_weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, residual, weight, post_weight, scale, EPS)

    return Case(
        name=f"add_rms_norm [{tokens}, {hidden}]",
        inputs=inputs,
        reference=eager,
        providers={"tridraft": fused, "eager": eager, **compiled_at(tokens, eager)},
        bytes=2 * (4 * tokens * hidden + 2 * hidden),
        headline=(tokens, hidden) == (32, 1024),
    )


def gated_act_case(tokens: int, size: int) -> Case:
    """GELU of the gate times up."""

    def inputs(device: torch.device) -> tuple[Tensor]:
        return (torch.randn(tokens, 2 * size, device=device, dtype=dtype_of(device)),)

    def eager(x: Tensor) -> Tensor:
        return gated_act_reference(x, "gelu_tanh")

    return Case(
        name=f"gated_act [{tokens}, 2x{size}]",
        inputs=inputs,
        reference=eager,
        providers={
            "tridraft": lambda x: gated_act(x, activation="gelu_tanh"),
            "eager": eager,
            **compiled_at(tokens, eager),
        },
        bytes=2 * 3 * tokens * size,
        headline=(tokens, size) == (32, 8192),
    )


def qk_norm_rope_case(tokens: int, q_heads: int, head_dim: int) -> Case:
    """Q of a drafter that owns no keys."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        dtype = dtype_of(device)
        q = torch.randn(tokens, q_heads, head_dim, device=device, dtype=dtype)
        positions = torch.randint(0, 131_072, (tokens,), device=device)
        inv_freq = 1e4 ** (-torch.arange(head_dim // 2, device=device) / (head_dim // 2))
        return q, positions, inv_freq, torch.randn(head_dim, device=device, dtype=dtype)

    def eager(q: Tensor, positions: Tensor, inv_freq: Tensor, weight: Tensor) -> Tensor:
        return qk_norm_rope_reference(q, None, None, positions, inv_freq, weight, None, True, False, EPS)[0]

    return Case(
        name=f"qk_norm_rope [{tokens}, {q_heads}x{head_dim}]",
        inputs=inputs,
        reference=eager,
        providers={
            "tridraft": lambda q, positions, inv_freq, weight: qk_norm_rope(q, positions, inv_freq, q_weight=weight),
            "eager": eager,
            **compiled_at(tokens, eager),
        },
        bytes=tokens * (4 * q_heads * head_dim + 8) + 2 * head_dim + 2 * head_dim,
        headline=(tokens, q_heads, head_dim) == (32, 16, 512),
    )


def paged_inputs(tokens: int, heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K (V reads it too, shifted), an interleaved cache with room for twice the tokens, and random slots."""
    dtype = dtype_of(device)
    k = torch.randn(tokens, 2 * heads, head_dim, device=device, dtype=dtype)
    k_cache, v_cache = torch.zeros(-(-2 * tokens // 16), 2, 16, heads, head_dim, device=device, dtype=dtype).unbind(1)
    return k, k_cache, v_cache, torch.randperm(2 * tokens, device=device)[:tokens]


def write_case(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> Case:
    """Norms, rotary and cache write of a layer that owns keys."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        q, positions, inv_freq, weight = qk_norm_rope_case(tokens, q_heads, head_dim).inputs(device)
        return q, positions, inv_freq, weight, *paged_inputs(tokens, kv_heads, head_dim, device)

    def fused(
        q: Tensor, positions: Tensor, inv_freq: Tensor, weight: Tensor, kv: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        k, v = kv.split(kv_heads, 1)
        out = qk_norm_rope(
            q, positions, inv_freq, q_weight=weight, k=k, v=v, k_weight=weight, v_norm=True,
            k_cache=k_cache, v_cache=v_cache, slot_mapping=slots,
        )  # fmt: skip
        return out, k_cache, v_cache

    def composition(
        q: Tensor, positions: Tensor, inv_freq: Tensor, weight: Tensor, kv: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The PyTorch operations of a model: norms, rotation in the model's dtype, and an index write."""
        k, v = kv.split(kv_heads, 1)
        angle = positions.float()[:, None, None] * inv_freq
        cos, sin = angle.cos().to(q.dtype).repeat(1, 1, 2), angle.sin().to(q.dtype).repeat(1, 1, 2)

        def norm_rope(x: Tensor) -> Tensor:
            x = torch.nn.functional.rms_norm(x, (head_dim,), weight, EPS)
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat((-right, left), -1) * sin

        block, offset = slots // 16, slots % 16
        k_cache[block, offset] = norm_rope(k)
        v_cache[block, offset] = torch.nn.functional.rms_norm(v, (head_dim,), None, EPS)
        return norm_rope(q), k_cache, v_cache

    def reference(
        q: Tensor, positions: Tensor, inv_freq: Tensor, weight: Tensor, kv: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        k, v = kv.split(kv_heads, 1)
        q, new_k, new_v = qk_norm_rope_reference(q, k, v, positions, inv_freq, weight, weight, True, True, EPS)
        assert new_k is not None
        assert new_v is not None
        write_kv_reference(new_k, new_v, k_cache, v_cache, slots, None, None)
        return q, k_cache, v_cache

    return Case(
        name=f"qk_norm_rope + write [{tokens}, {q_heads}+2*{kv_heads}x{head_dim}]",
        inputs=inputs,
        reference=reference,
        providers={"tridraft": fused, "eager": composition},
        bytes=tokens * (4 * (q_heads + 2 * kv_heads) * head_dim + 16),
        headline=(tokens, q_heads, kv_heads) == (8192, 8, 1),
    )


def write_kv_case(tokens: int, heads: int, head_dim: int) -> Case:
    """The cache write alone, of keys and values that are ready."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return paged_inputs(tokens, heads, head_dim, device)

    def fused(kv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.split(heads, 1)
        write_kv(k, v, k_cache, v_cache, slots)
        return k_cache, v_cache

    def composition(kv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        block, offset = slots // 16, slots % 16
        k_cache[block, offset], v_cache[block, offset] = kv.split(heads, 1)
        return k_cache, v_cache

    return Case(
        name=f"write_kv [{tokens}, 2*{heads}x{head_dim}]",
        inputs=inputs,
        reference=composition,
        providers={"tridraft": fused, "eager": composition},
        bytes=tokens * (8 * heads * head_dim + 8),
    )


def cases() -> list[Case]:
    """Decode sizes of the Gemma 4 drafters, and prefill sizes of their targets."""
    return [
        *(rms_norm_case(tokens, hidden) for hidden in (256, 1024) for tokens in (1, 8, 32, 128)),
        *(add_rms_norm_case(tokens, hidden) for hidden in (256, 1024) for tokens in (1, 8, 32, 128)),
        *(gated_act_case(tokens, size) for size in (2048, 8192) for tokens in (1, 8, 32, 128)),
        *(
            qk_norm_rope_case(tokens, *heads)
            for heads in ((4, 256), (4, 512), (16, 256), (16, 512))
            for tokens in (1, 8, 32, 128)
        ),
        *(
            write_case(tokens, *heads)
            for heads in ((8, 1, 512), (8, 1, 256), (16, 8, 256))
            for tokens in (32, 4096, 8192)
        ),
        write_kv_case(32, 8, 256),
        write_kv_case(8192, 8, 256),
        rms_norm_case(4096, 2560),
        add_rms_norm_case(4096, 2560),
        gated_act_case(4096, 8192),
    ]


BENCHMARK = Benchmark("norm", cases=cases, smoke=lambda: write_case(5, 2, 1, 16))

if __name__ == "__main__":
    main(BENCHMARK)
