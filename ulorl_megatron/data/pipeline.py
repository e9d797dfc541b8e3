"""A pipeline: what is read, what is done to it, where the result goes. Read from YAML, strictly."""

import difflib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ulorl_megatron.data.layouts import LAYOUTS
from ulorl_megatron.data.step import Step
from ulorl_megatron.data.steps import STEPS
from ulorl_megatron.errors import UserError

FORMATS = ("jsonl", "parquet")


@dataclass
class Input:
    """path: a file, or a folder of files. layout: see layouts."""

    path: str = MISSING
    layout: str = "rows"


@dataclass
class _File:
    """The keys of a pipeline file. out: folder to make. format: of the rows in it, jsonl or parquet."""

    out: str = MISSING
    format: str = "jsonl"
    inputs: List[Input] = field(default_factory=list)
    steps: List[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline:
    """steps: (name, step), in order."""

    out: Path
    format: str
    inputs: List[Input]
    steps: List[Tuple[str, Step]]

    def described(self) -> Dict[str, Any]:
        """All that was asked for, every default filled in."""
        steps = [{name: asdict(step)} for name, step in self.steps]
        return {"format": self.format, "inputs": [asdict(item) for item in self.inputs], "steps": steps}


def load_pipeline(file: str, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of the YAML file `file`, with `overrides` ("out=...", "inputs[0].path=...") on top.

    Raises UserError with one line per fault.
    """
    if not Path(file).is_file():
        raise UserError(f"no pipeline file {file}")
    try:
        given = OmegaConf.load(file)
        for item in overrides:
            key, _, value = item.partition("=")
            OmegaConf.update(given, key, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{file} {' '.join(overrides)}: {_first_line(error)}") from error
    return build_pipeline(given, file)


def build_pipeline(given: Any, where: str) -> Pipeline:
    """The pipeline of the keys of a pipeline file. where: what messages call it. Raises UserError."""
    try:
        config = OmegaConf.merge(OmegaConf.structured(_File), given)
        out, layouts = config.out, [(item.path, item.layout) for item in config.inputs]
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{where}: {_first_line(error)}. A pipeline has out, format, inputs and steps") from error
    faults = []
    if config.format not in FORMATS:
        faults.append(f"format: {config.format!r}; take one of {', '.join(FORMATS)}")
    if not layouts:
        faults.append("inputs: none given; name one file or folder at least, as {path: ..., layout: ...}")
    for i, (path, layout) in enumerate(layouts):
        if layout not in LAYOUTS:
            nearest = _nearest(layout, LAYOUTS)
            faults.append(f"inputs[{i}].layout: {layout!r}{nearest}; take one of {', '.join(LAYOUTS)}")
        if not Path(path).exists():
            faults.append(f"inputs[{i}].path: no file or folder {path}")
    steps = []
    for i, item in enumerate(config.steps):
        try:
            steps.append(_step(item))
        except UserError as error:
            faults.append(f"steps[{i}]: {error}")
    if faults:
        raise UserError("\n".join([f"{where} does not make a pipeline:"] + [f"  {fault}" for fault in faults]))
    return Pipeline(Path(out), config.format, [Input(*item) for item in layouts], steps)


def _step(item: Any) -> Tuple[str, Step]:
    """`name`, or `name: {setting: value}`."""
    settings: Any = {}
    if isinstance(item, DictConfig) and len(item) == 1:
        ((name, settings),) = item.items()
    elif isinstance(item, str):
        name = item
    else:
        shown = OmegaConf.to_container(item) if isinstance(item, (DictConfig, ListConfig)) else item
        raise UserError(f"{shown!r} is neither a name nor one name with its settings")
    if name not in STEPS:
        raise UserError(f"{name!r}: unknown step{_nearest(name, STEPS)}; there are {', '.join(STEPS)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(STEPS[name]), settings or {})
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{name}: no value given for {', '.join(missing)}")
        step = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{name}: {_first_line(error)}") from error
    step.check()
    return name, step


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
