"""What Triton would compile: one entry for each kernel variant a call launches, without compiling any."""

from collections.abc import Callable

from torch import Tensor

from _aot import TARGETS, record_launches


def variants(call: Callable[[], object], target: str = "sm_90") -> set[tuple[object, ...]]:
    """Kernel, compile options, constexprs, and what an integer's value adds to a variant (1, a multiple of 16)."""
    with record_launches(TARGETS[target][1]) as launches:
        call()
    found = set()
    for launch in launches:
        key: list[object] = [launch.kernel.__name__, *sorted(launch.options.items())]
        for parameter in launch.kernel.params:
            value = launch.arguments.get(parameter.name, parameter.default)
            if parameter.is_constexpr or value is None:
                key.append((parameter.name, value))
            elif isinstance(value, Tensor):
                key.append((parameter.name, value.dtype))
            elif isinstance(value, int) and not parameter.do_not_specialize:
                key.append((parameter.name, value == 1, value % 16 == 0))
        found.add(tuple(key))
    return found
