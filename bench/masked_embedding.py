"""The ordered head of Gemma 4's small assistants: centroids, top-k, candidates, sample."""

import torch
from _harness import Benchmark, Case, compiled, main
from torch import Tensor

from tridraft.kernels.masked_embedding import masked_embedding_sample

Inputs = tuple[Tensor, ...]


def case(num_rows: int, temperature: float = 0.0, sizes: tuple[int, int, int, int] = (256, 2048, 262144, 32)) -> Case:
    """One draft step's head; `sizes` are hidden size, centroids, vocabulary and top_k."""
    hidden_size, num_centroids, vocab_size, top_k = sizes
    per_centroid = vocab_size // num_centroids

    def inputs(device: torch.device) -> Inputs:
        """A random head whose hidden states have one clear winner, in their best centroid, so that all ways agree."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        centroids = torch.randn(num_centroids, hidden_size, device=device, dtype=dtype)
        weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype)
        token_ordering = torch.randperm(vocab_size, device=device)
        best = torch.randint(0, num_centroids, (num_rows,), device=device)
        winner = token_ordering.view(num_centroids, per_centroid)[best, best % per_centroid]
        hidden = centroids[best] + weight[winner]
        slots = torch.arange(num_rows, device=device)
        rows = (slots, torch.full((num_rows,), temperature, device=device), slots * 7919, slots + 100)
        return hidden, centroids, token_ordering, weight, *rows

    def fused(hidden: Tensor, centroids: Tensor, token_ordering: Tensor, weight: Tensor, *rows: Tensor) -> Tensor:
        return masked_embedding_sample(hidden, centroids, token_ordering, weight, top_k, *rows)

    def definition(hidden: Tensor, centroids: Tensor, token_ordering: Tensor, weight: Tensor, *rows: Tensor) -> Tensor:
        return masked_embedding_sample(hidden, centroids, token_ordering, weight, top_k, *rows, impl="eager")

    def composed(hidden: Tensor, centroids: Tensor, token_ordering: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        """What an engine writes in PyTorch: argmax over gathered candidates."""
        top = (hidden @ centroids.T).topk(top_k, dim=1).indices
        ids = token_ordering.view(num_centroids, -1)[top].flatten(1)
        logits = torch.bmm(weight[ids], hidden.unsqueeze(2)).squeeze(2)
        return ids.gather(1, logits.argmax(dim=1, keepdim=True)).squeeze(1)

    def dense(hidden: Tensor, centroids: Tensor, token_ordering: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
        """The whole head: what the centroids save."""
        return (hidden @ weight.T).argmax(dim=1)

    rivals = {"eager": composed, "compile": compiled(composed), "dense": dense} if temperature == 0 else {}
    read_centroids = num_centroids * (1 - (1 - top_k / num_centroids) ** num_rows)
    candidates = int(read_centroids * per_centroid)
    return Case(
        name=f"masked_embedding_sample N={num_rows} T={temperature:g}",
        inputs=inputs,
        reference=definition,
        providers={"tridraft": fused, **rivals},
        bytes=2 * hidden_size * (num_centroids + candidates + num_rows) + 8 * candidates,
        headline=(num_rows, temperature) in ((1, 0), (32, 0)),
    )


def cases() -> list[Case]:
    """The batch sizes of a decode step, greedy and sampling."""
    return [case(num_rows) for num_rows in (1, 8, 32, 128)] + [case(num_rows, 1.0) for num_rows in (1, 32, 128)]


BENCHMARK = Benchmark("masked_embedding", cases=cases, smoke=lambda: case(3, sizes=(32, 16, 64, 4)))

if __name__ == "__main__":
    main(BENCHMARK)
