"""Linear layers of the Gemma 4 drafters, each alone, and the MLP of a layer as one chain of launches.

Alone, a call hardly has a kernel before it to load its weights behind. In the chain it has, as in a draft step.
"""

from collections.abc import Callable

import torch
from _harness import Benchmark, Case, main
from norm import EPS, dtype_of
from torch import Tensor

from tridraft.kernels.activation import gated_act, gated_act_reference
from tridraft.kernels.linear import linear, linear_reference, norm_linear
from tridraft.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

ROWS = (1, 8, 32)
# Out and in features of each layer: pre-projection, q of sliding and full layers, their o, gate and up, down,
# post-projection.
E2B = ((256, 3072), (1024, 256), (2048, 256), (256, 1024), (256, 2048), (4096, 256), (1536, 256))
LARGE = ((1024, 7680), (4096, 1024), (8192, 1024), (1024, 4096), (1024, 8192), (16384, 1024), (3840, 1024))
HEADLINE = ((1, 256, 2048), (1, 1024, 8192), (8, 256, 2048))


def linear_case(rows: int, out_features: int, in_features: int) -> Case:
    """One layer against cuBLAS."""

    def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
        dtype = dtype_of(device)
        weight = torch.randn(out_features, in_features, device=device, dtype=dtype) * in_features**-0.5
        return torch.randn(rows, in_features, device=device, dtype=dtype), weight

    return Case(
        name=f"linear [{rows}, {in_features}] x {out_features}",
        inputs=inputs,
        reference=linear_reference,
        providers={"tridraft": linear, "torch": linear_reference},
        bytes=2 * (out_features * in_features + rows * (in_features + out_features)),
        anchor="torch",
        floor=True,
        headline=(rows, out_features, in_features) in HEADLINE,
    )


def chain_case(rows: int, hidden: int, size: int) -> Case:
    """An MLP behind its norm, and a norm behind it: in three launches at one row; in five with our norms and activation
    around either product.
    """

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype_of(device)) * scale

        gate_up, down = normal(2 * size, hidden, scale=hidden**-0.5), normal(hidden, size, scale=size**-0.5)
        return gate_up, down, normal(hidden), normal(hidden), normal(rows, hidden)

    def reference(gate_up: Tensor, down: Tensor, before: Tensor, after: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        merged = linear_reference(rms_norm_reference(x, before, EPS), gate_up)
        branch = linear_reference(gated_act_reference(merged, "gelu_tanh"), down)
        return add_rms_norm_reference(branch, x, before, after, None, EPS)

    def fused(gate_up: Tensor, down: Tensor, before: Tensor, after: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        merged, _ = norm_linear(x, before, gate_up, eps=EPS, activation="gelu_tanh")
        return add_rms_norm(linear(merged, down), x, before, post_weight=after, eps=EPS)

    def chain(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(gate_up: Tensor, down: Tensor, before: Tensor, after: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            merged = product(rms_norm(x, before, eps=EPS), gate_up)
            branch = product(gated_act(merged, activation="gelu_tanh"), down)
            return add_rms_norm(branch, x, before, post_weight=after, eps=EPS)

        return run

    apart = {"five launches": chain(linear)} if rows == 1 else {}
    return Case(
        name=f"mlp chain [{rows}, {hidden}] {size}",
        inputs=inputs,
        reference=reference,
        providers={"tridraft": fused, **apart, "torch": chain(linear_reference)},
        bytes=2 * (3 * hidden * size + 2 * hidden + 3 * rows * hidden),
        anchor="torch",
        headline=rows == 1,
    )


def cases() -> list[Case]:
    """Every layer of the E2B and the 12B assistant, and their MLPs."""
    return [
        *(linear_case(rows, *shape) for shape in (*E2B, *LARGE) for rows in ROWS),
        *(chain_case(rows, *sizes) for sizes in ((256, 2048), (1024, 8192)) for rows in ROWS),
    ]


BENCHMARK = Benchmark("linear", cases=cases, smoke=lambda: chain_case(2, 32, 48))

if __name__ == "__main__":
    main(BENCHMARK)
