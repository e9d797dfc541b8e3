"""Checkpoints of the trainer: written aside, renamed when complete, and pointed to last (NeMo-RL#969, verl#4638).

<directory>/step-000012/   Megatron's torch_dist format: model, optimizer, generator state, counters
<directory>/latest         name of the newest complete checkpoint
"""

import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch.distributed as dist
from megatron.core import dist_checkpointing

from checkpoint_tools.publish import fsync_directory, write_atomically
from ulorl_megatron.errors import UserError

_POINTER = "latest"
_PREFIX = "step-"


class Checkpoints:
    """A directory of checkpoints, on a file system that all ranks share. keep_last: how many stay."""

    def __init__(self, directory: Path, keep_last: int):
        self._directory = directory
        self._keep_last = keep_last

    def save(self, step: int, state: Dict[str, Any]) -> int:
        """Collective; returns the step of the oldest checkpoint that stays, the one a resume could go back to.

        Killed at any moment, the previous checkpoint stays the latest until this one is complete.
        """
        name = f"{_PREFIX}{step:06d}"
        partial = self._directory / f".{name}.partial"
        first = dist.get_rank() == 0
        if first:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left_over in self._directory.glob(".*.partial"):
                shutil.rmtree(left_over)
            partial.mkdir()
        dist.barrier()
        dist_checkpointing.save(state, str(partial))
        dist.barrier()
        if first:
            complete = self._directory / name
            if complete.exists():  # complete, but a kill came before the pointer
                shutil.rmtree(complete)
            fsync_directory(partial)
            partial.rename(complete)
            fsync_directory(self._directory)
            write_atomically(self._directory / _POINTER, f"{name}\n".encode())
            for old in self._complete()[: -self._keep_last]:
                shutil.rmtree(old)
        dist.barrier()
        return int(self._complete()[0].name.removeprefix(_PREFIX))

    def latest(self) -> Optional[Path]:
        """The checkpoint to resume from; None before the first. Raises UserError if the pointer leads nowhere."""
        pointer = self._directory / _POINTER
        if not pointer.exists():
            return None
        path = self._directory / pointer.read_text().strip()
        if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
            raise UserError(
                f"{pointer} names {path.name}, which is not a complete checkpoint; write the name of another "
                f"checkpoint of {self._directory} into it, or remove it to start from the model"
            )
        return path

    def _complete(self) -> List[Path]:
        return sorted(self._directory.glob(f"{_PREFIX}*"))


def load(path: Path, state: Dict[str, Any]) -> Dict[str, Any]:
    """Collective. `state` as it would be saved, for this run's layout; returns it filled from the checkpoint."""
    return dist_checkpointing.load(state, str(path))
