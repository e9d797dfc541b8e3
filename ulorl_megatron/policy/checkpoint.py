"""Checkpoints of the trainer: written aside, renamed when complete, and pointed to last (NeMo-RL#969, verl#4638).

<directory>/step-000012/     Megatron's torch_dist format: model, optimizer, generator state, counters
<directory>/step-000012/hf/  config.json and tokenizer of the model, for tools
<directory>/latest           name of the newest complete checkpoint

Files are written by a thread of each rank, from copies. Megatron's own way to write in the background is a fork, which
is unsound in a process that has threads of gloo, NCCL or OpenMP, and whose child outlives a killed trainer.
"""

import queue
import shutil
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from checkpoint_tools.companions import copy_companions
from checkpoint_tools.publish import fsync_directory, write_atomically
from checkpoint_tools.sources import HF_FILES
from ulorl_megatron.config.schema import CheckpointConfig, ModelConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy.platform import device

_POINTER = "latest"
_PREFIX = "step-"
_LAYOUT = "layout"

# A writer's result comes from a thread of this process; Megatron would start a manager process to hand it over.
filesystem_async._results_queue = queue.Queue()


class _Pending(NamedTuple):
    """A checkpoint that is being written. finish: what makes the directory complete; collective."""

    step: int
    writer: threading.Thread
    finish: List[Callable[[], None]]


class Checkpoints:
    """A directory of checkpoints, on a file system that all ranks share. All methods are collective.

    layout: of this run, in words; it is stored in every checkpoint.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, model: ModelConfig, layout: str):
        self._directory = directory
        self._config = config
        self._model = model
        self._layout = layout
        self._pending: Optional[_Pending] = None
        self._kept: Optional[int] = None  # oldest step that stays, since the last complete save

    def save(self, step: int, state: Dict[str, Any]) -> None:
        """Write `state`, or, if config.asynchronous, copy it to host memory and begin to; one at a time.

        Killed at any moment, the previous checkpoint stays the latest until this one is complete. Raises UserError if
        this one, or the previous one only now, could not be written.
        """
        self._complete(wait=True)
        partial_directory = self._partial(step)
        if dist.get_rank() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left_over in self._directory.glob(".*.partial"):
                shutil.rmtree(left_over)
            partial_directory.mkdir()
        dist.barrier()
        held = {tensor.untyped_storage().data_ptr() for tensor in _tensors(state)}
        request = dist_checkpointing.save(
            state | {"step": step, _LAYOUT: self._layout},
            str(partial_directory),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        writer = threading.Thread(target=_write(request, held), name=f"checkpoint of step {step}")
        writer.start()
        self._pending = _Pending(step, writer, request.finalize_fns)
        if not self._config.asynchronous:
            self._complete(wait=True)

    def settle(self, *, wait: bool) -> Optional[int]:
        """Make a save complete if it is written on all ranks. wait: until it is.

        Returns the step of the oldest checkpoint that stays, the one a resume could go back to, if a save has become
        complete since the last call; otherwise None. Raises UserError if it could not be written.
        """
        self._complete(wait)
        kept, self._kept = self._kept, None
        return kept

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

    def load(self, path: Path, state: Dict[str, Any]) -> Dict[str, Any]:
        """`state`, as it would be saved in this run's layout, filled from the checkpoint `path`, of any layout.

        Raises UserError if the checkpoint has not exactly the tensors of `state`.
        """
        saved_by = dist_checkpointing.load_common_state_dict(str(path)).get(_LAYOUT, "unknown")
        try:
            return dist_checkpointing.load(state, str(path), strict=StrictHandling.RAISE_ALL)
        except (CheckpointingException, CheckpointException) as error:
            raise UserError(
                f"{path} cannot be loaded: {_reason(error)}. It was saved by {saved_by}, this run has {self._layout}. "
                f"Is model.path the model of this run? Otherwise take it up in the layout it was saved in"
            ) from error

    def _complete(self, wait: bool) -> None:
        if self._pending is None:
            return
        step, writer, finish = self._pending
        if wait:
            writer.join()
        else:
            done = torch.tensor(int(not writer.is_alive()), device=device())
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if not done:
                return
        self._pending = None
        try:
            for function in finish:
                function()
        except CheckpointException as error:
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._directory}: {_reason(error)}. "
                f"The checkpoint before it is untouched"
            ) from error
        if dist.get_rank() == 0:
            self._publish(step)
        dist.barrier()
        self._kept = int(self._all()[0].name.removeprefix(_PREFIX))

    def _publish(self, step: int) -> None:
        written, final = self._partial(step), self._directory / f"{_PREFIX}{step:06d}"
        copy_companions(Path(self._model.path), written / HF_FILES, getattr(torch, self._model.dtype.value))
        fsync_directory(written)
        if final.exists():  # complete, but a kill came before the pointer
            shutil.rmtree(final)
        written.rename(final)
        fsync_directory(self._directory)
        write_atomically(self._directory / _POINTER, f"{final.name}\n".encode())
        for old in self._all()[: -self._config.keep_last]:
            shutil.rmtree(old)

    def _partial(self, step: int) -> Path:
        return self._directory / f".{_PREFIX}{step:06d}.partial"

    def _all(self) -> List[Path]:
        return sorted(self._directory.glob(f"{_PREFIX}*"))


def _write(request: AsyncRequest, held: Set[int]) -> Callable[[], None]:
    """What writes this rank's files. held: storages (addresses) that training will change."""
    if request.async_fn is None:  # nothing to write on this rank
        return lambda: None
    results = request.async_fn_args[-1]
    (transforms, _) = request.async_fn.args
    buckets = []
    for path, key, (objects, tensors) in request.preload_fn():  # which copies from a GPU
        own = [(item, t.clone() if t.untyped_storage().data_ptr() in held else t) for item, t in tensors]
        buckets.append((path, key, (objects, own)))

    def write() -> None:
        torch.serialization.set_crc32_options(False)  # this thread's; torch.load never checks it
        written = dict(
            FileSystemWriterAsync.write_preloaded_data(transforms, i, bucket, None, None, use_fsync=True)
            for i, bucket in enumerate(buckets)
        )
        results.put(next((fault for fault in written.values() if isinstance(fault, Exception)), written))

    return write


def _tensors(state: Dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that the sharded state dict holds."""
    for value in nested_values(state):
        data = getattr(value, "data", None)
        if torch.is_tensor(data):
            yield data


def _reason(error: BaseException) -> str:
    """Megatron's or torch's message, short enough to read."""
    failures = getattr(error, "failures", None)
    text = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in failures.items()) if failures else str(error)
    return text if len(text) < 400 else f"{text[:400]}..."
