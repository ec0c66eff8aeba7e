"""From a configuration to the speculator it names."""

from tridraft.speculator.base import BaseSpeculator
from tridraft.speculator.config import SpeculatorConfig


def init_speculator(config: SpeculatorConfig) -> BaseSpeculator:
    """The speculator that `config.method` names; `load_model` and `set_kv_cache` make it ready to propose."""
    # The one method so far. A class is imported when it is asked for.
    from tridraft.speculator.gemma4 import Gemma4Speculator  # noqa: PLC0415

    return Gemma4Speculator(config)
