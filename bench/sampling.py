"""Draft sampling from `[N, 262144]` logits with ten suppressed ids, greedy and at temperature 1."""

import torch
from _harness import Benchmark, Case, main
from torch import Tensor

from tridraft.kernels.sampling import draft_sample, draft_sample_reference

VOCAB = 262_144


def greedy(
    logits: Tensor, _slots: Tensor, _temperature: Tensor, _seeds: Tensor, _positions: Tensor, ids: Tensor
) -> Tensor:
    """What an engine composes of PyTorch for a greedy draft."""
    return logits.index_fill_(1, ids, float("-inf")).argmax(-1)


def sampled(
    logits: Tensor, slots: Tensor, temperature: Tensor, _seeds: Tensor, _positions: Tensor, ids: Tensor
) -> Tensor:
    """And for a sampled one: the exponential race of a softmax."""
    probabilities = (logits.index_fill_(1, ids, float("-inf")).float() / temperature[slots, None]).softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def assert_allowed(actual: Tensor, expected: Tensor) -> None:
    """Providers draw with other random numbers; the tests compare ours with its definition."""
    assert actual.shape == expected.shape
    assert 0 <= actual.min() <= actual.max() < VOCAB


def case(rows: int, temperature: float, vocab_size: int = VOCAB) -> Case:
    """One draft step of `rows` requests."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        logits = torch.randn(rows, vocab_size, device=device, dtype=dtype)
        # Winners that ties of 16-bit logits cannot move; at temperature 1 they leave the others two thirds of the mass.
        logits.scatter_(1, torch.randint(vocab_size, (rows, 1), device=device), 12.0)
        slots = torch.arange(rows, device=device)
        temperatures = torch.full((rows,), temperature, device=device)
        ids = torch.randint(vocab_size, (10,), device=device)
        return logits, slots, temperatures, torch.randint(2**62, (rows,), device=device), slots + 1000, ids

    def fused(*args: Tensor) -> Tensor:
        return draft_sample(*args[:5], suppress_ids=args[5])

    return Case(
        name=f"draft_sample [{rows}, {vocab_size}] T={temperature:g}",
        inputs=inputs,
        reference=lambda *args: draft_sample_reference(*args)[0],
        providers={"tridraft": fused, "torch": sampled if temperature else greedy},
        bytes=rows * vocab_size * 2,
        anchor="torch",
        check=assert_allowed if temperature else assert_equal,
        floor=True,
        headline=rows in (1, 32),
    )


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Greedy tokens are the same whoever computes them."""
    assert torch.equal(actual, expected), f"{(actual != expected).sum()} of {expected.numel()} tokens differ"


BENCHMARK = Benchmark(
    "sampling",
    cases=lambda: [case(rows, temperature) for temperature in (0.0, 1.0) for rows in (1, 8, 32, 128)],
    smoke=lambda: case(2, 0.0, vocab_size=5000),
)

if __name__ == "__main__":
    main(BENCHMARK)
