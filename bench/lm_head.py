"""The fused head: hidden states to greedy tokens over 262,144 rows of weight, bfloat16 and float8."""

import torch
from _harness import Benchmark, Case, Provider, main
from torch import Tensor

from tridraft.kernels.lm_head import lm_head_sample, lm_head_sample_reference

VOCAB = 262_144


def composed(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """What an engine composes of PyTorch: cuBLAS, a fill, argmax."""
    return torch.nn.functional.linear(hidden, weight).index_fill_(1, ids, float("-inf")).argmax(-1)


def case(rows: int, hidden_size: int, fp8: bool, vocab_size: int = VOCAB) -> Case:
    """One draft step of `rows` requests."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype)
        # A hidden state along one row of the weight: its logit stands out, so rounding cannot move the winner.
        hidden = weight[torch.randint(vocab_size, (rows,), device=device)] + 0.1
        scale = torch.full((1,), 2.0, device=device)
        weight = weight.to(torch.float8_e4m3fn) if fp8 else weight
        slots, zeros = torch.arange(rows, device=device), torch.zeros(rows, device=device)
        ids = torch.randint(vocab_size, (10,), device=device)
        return hidden, weight, slots, zeros, slots, slots, scale, ids

    def fused(*args: Tensor) -> Tensor:
        return lm_head_sample(*args[:6], weight_scale=args[6] if fp8 else None, suppress_ids=args[7])

    def reference(*args: Tensor) -> Tensor:
        return lm_head_sample_reference(*args[:6], weight_scale=args[6] if fp8 else None, suppress_ids=args[7])[0]

    def operands(*args: Tensor) -> tuple[Tensor, ...]:
        return args[0], args[1].to(args[0].dtype), args[7]

    return Case(
        name=f"lm_head_sample [{rows}, {hidden_size}] {'fp8' if fp8 else 'bf16'}",
        inputs=inputs,
        reference=reference,
        providers={"tridraft": fused, "torch": Provider(composed, prepare=operands)},  # PyTorch's weight is 16-bit
        bytes=vocab_size * hidden_size * (1 if fp8 else 2),
        flops=2 * rows * vocab_size * hidden_size,
        anchor="torch",
        headline=rows == 8 and not fp8,
    )


BENCHMARK = Benchmark(
    "lm_head",
    cases=lambda: [
        *(case(rows, hidden_size, False) for hidden_size in (256, 1024) for rows in (1, 8, 32, 128)),
        *(case(rows, hidden_size, True) for hidden_size in (256, 1024) for rows in (1, 16)),
    ],
    smoke=lambda: case(2, 16, False, vocab_size=300),
)

if __name__ == "__main__":
    main(BENCHMARK)
