"""From a configuration to the speculator it names."""

from importlib import import_module

from tridraft.speculator.base import BaseSpeculator
from tridraft.speculator.config import SpeculatorConfig

_CLASSES = {
    "gemma4_mtp": ("gemma4", "Gemma4Speculator"),
    "eagle": ("eagle", "EagleSpeculator"),
    "eagle3": ("eagle", "EagleSpeculator"),
    "mtp": ("mtp", "MTPSpeculator"),
}


def init_speculator(config: SpeculatorConfig) -> BaseSpeculator:
    """The speculator that `config.method` names; `load_model` and `set_kv_cache` make it ready to propose."""
    module, name = _CLASSES[config.method]  # imported when it is asked for
    return getattr(import_module(f"tridraft.speculator.{module}"), name)(config)
