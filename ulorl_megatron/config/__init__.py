"""Configuration: `load(file, overrides)` gives a checked `Config` or a UserError that names every fault."""

from ulorl_megatron.config.load import load, to_yaml
from ulorl_megatron.config.schema import Config

__all__ = ["Config", "load", "to_yaml"]
