"""What `--checkpoint` may be, and the HF folder that servers load of it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence

from checkpoint_tools.convert import Options, megatron_to_hf
from checkpoint_tools.progress import ConversionProgress
from checkpoint_tools.sources import TorchDistSource, open_checkpoint
from ulorl_megatron.errors import UserError

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """label: its name in results, unique. path: a folder of Hugging Face or of Megatron. step: of its run, if known."""

    label: str
    path: Path
    step: Optional[int]

    @property
    def megatron(self) -> bool:
        return (self.path / ".metadata").is_file()

    def stamp(self) -> List[str]:
        """What tells it from another of the same path: names, sizes and times of its files."""
        files = sorted(file for file in self.path.iterdir() if file.is_file())
        return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def find_checkpoints(given: Sequence[str], model: str) -> List[Checkpoint]:
    """Those named; model.path itself if none is. A run directory, or its checkpoints/, stands for its latest one.

    Raises UserError for what is no checkpoint, and for one named twice.
    """
    paths = [_resolve(Path(path)) for path in given] or [_resolve(Path(model))]
    labels = _labels(paths)
    steps = [_STEP.fullmatch(path.name) for path in paths]
    return [Checkpoint(*item) for item in zip(labels, paths, [int(m[1]) if m else None for m in steps], strict=True)]


def hf_folder(checkpoint: Checkpoint, converted: Path) -> Path:
    """The checkpoint as an HF folder: itself, or what is made of a Megatron one in `converted`, unless it is there.

    Raises CheckpointError if it cannot be read.
    """
    if not checkpoint.megatron:
        return checkpoint.path
    out = (converted / checkpoint.label).absolute()
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        source = open_checkpoint(checkpoint.path, None)
        assert isinstance(source, TorchDistSource)
        with ConversionProgress(checkpoint.label) as progress:
            megatron_to_hf(source, out, Options(workers=len(os.sched_getaffinity(0)), force=True), progress)
    return out


def _resolve(path: Path) -> Path:
    if (path / "checkpoints" / "latest").is_file():
        path = path / "checkpoints"
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text().strip()
    if (path / ".metadata").is_file():
        return path
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return path
    raise UserError(
        f"--checkpoint: {path} is neither a Hugging Face folder (config.json, *.safetensors), nor a checkpoint of a "
        "run (checkpoints/step-N), nor a run directory"
    )


def _labels(paths: List[Path]) -> List[str]:
    """The folder's name; where two have the same, with as much of what is above it as tells them apart."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("--checkpoint: the same one is named twice")
    whole = [path.resolve().parts[1:] for path in paths]
    for depth in range(1, max(map(len, whole)) + 1):
        labels = ["-".join(parts[-depth:]) for parts in whole]
        if len(set(labels)) == len(labels):
            break
    return labels
