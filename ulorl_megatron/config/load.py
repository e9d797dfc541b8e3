"""Reading a configuration: YAML file, then key=value overrides, against the schema; strict."""

import difflib
from pathlib import Path
from typing import Any, List, Sequence

from omegaconf import DictConfig, EnumNode, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ulorl_megatron.config.schema import Config
from ulorl_megatron.config.validate import faults
from ulorl_megatron.errors import UserError


def load(file: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `file` with `overrides` ("section.key=value") on top.

    Paths in it stay as written: relative ones are taken from the current folder. Raises UserError with one line per
    fault: unknown keys (with the nearest real one), wrong types, missing values, values that cannot work together.
    """
    schema = OmegaConf.structured(Config)
    given = _read(file)
    for item in overrides:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UserError(f"override {item!r} is not of the form section.key=value")
        try:
            OmegaConf.update(given, key, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)
        except (OmegaConfBaseException, YAMLError) as error:
            raise UserError(f"override {item!r}: {_first_line(error)}") from error
    problems: List[str] = _merge(schema, given, "")
    problems += [f"{key}: no value given, and it has no default" for key in sorted(OmegaConf.missing_keys(schema))]
    if not problems:
        config = OmegaConf.to_object(schema)
        problems = faults(config)
        if not problems:
            return config
    raise UserError("\n".join([f"{file} does not make a configuration:"] + [f"  {line}" for line in problems]))


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, every key present; `load` reads it back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read(file: str) -> DictConfig:
    if not Path(file).is_file():
        raise UserError(f"no configuration file {file}")
    try:
        given = OmegaConf.load(file)
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML: {error}") from error
    if not isinstance(given, DictConfig):
        raise UserError(f"{file} holds a {type(given).__name__}, not sections of keys")
    return given


def _merge(schema: DictConfig, given: DictConfig, prefix: str) -> List[str]:
    """Copies `given` into `schema` key by key, so that all faults are found and not only the first."""
    problems = []
    for key in given:
        name = f"{prefix}{key}"
        if key not in list(schema):  # `in` would call a mandatory key absent
            problems.append(f"{name}: unknown key{_nearest(str(key), name, schema)}")
            continue
        try:
            value: Any = given[key]
            if isinstance(schema._get_node(key), DictConfig):
                if not isinstance(value, DictConfig):
                    problems.append(f"{name}: is a section, not a value")
                else:
                    problems += _merge(schema[key], value, f"{name}.")
            else:
                if value is False and isinstance(schema._get_node(key), EnumNode):
                    value = "off"  # what the person wrote: YAML 1.1 reads a bare off as false
                OmegaConf.update(schema, str(key), value)
        except OmegaConfBaseException as error:
            problems.append(f"{name}: {_first_line(error)}")
    return problems


def _nearest(key: str, name: str, section: DictConfig) -> str:
    """", did you mean ..."": the likeliest key of the same section, or of any section."""
    close = difflib.get_close_matches(key, list(section), n=1)
    if close:
        return f", did you mean {name[: len(name) - len(key)]}{close[0]}?"
    everywhere = {full.rpartition(".")[2]: full for full in _keys(OmegaConf.structured(Config), "")}
    close = difflib.get_close_matches(key, list(everywhere), n=1)
    return f", did you mean {everywhere[close[0]]}?" if close else ""


def _keys(section: DictConfig, prefix: str) -> List[str]:
    names = []
    for key in section:
        node = section._get_node(key)
        names += _keys(node, f"{prefix}{key}.") if isinstance(node, DictConfig) else [f"{prefix}{key}"]
    return names


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
