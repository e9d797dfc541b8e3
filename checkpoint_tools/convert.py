"""Both conversions: streamed in blocks, spread over threads, resumable by file, published by one rename."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch

from checkpoint_tools.companions import copy_companions
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import SINGLE_NAME, ShardWriter, write_index
from checkpoint_tools.name_map import Weight, checkpoint_size, extra_state_keys
from checkpoint_tools.proof import CERTIFICATE_NAME, TensorHashes, certificate, megatron_blocks
from checkpoint_tools.publish import Staging, write_json
from checkpoint_tools.sources import HF_FILES, HFSource, Source, TorchDistSource, open_checkpoint
from checkpoint_tools.torch_dist import Chunk, PartWriter, write_metadata

PART_BYTES = 256 * 2**20  # of a .distcp file: what one thread writes at a time, and what an interruption costs
SHARD_BYTES = 5 * 10**9


class Progress(Protocol):
    def start(self, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, count: int) -> None: ...


@dataclass(frozen=True)
class Options:
    """dtype: None keeps the source's. workers: threads. shard_size: bytes of an HF shard. force: replace
    OUT."""

    dtype: torch.dtype | None = None
    workers: int = 1
    shard_size: int = SHARD_BYTES
    force: bool = False


@dataclass(frozen=True)
class OutputFile:
    """A file to write and what goes into it: weights, or HF (name, dtype, shape)."""

    name: str
    items: tuple[Any, ...]
    nbytes: int


def out_dtype(source: Source, weight: Weight, options: Options) -> torch.dtype:
    return options.dtype or source.dtype(weight)


def plan_parts(source: Source, options: Options) -> list[OutputFile]:
    """The .distcp files of a checkpoint, weights in model order."""
    sized = [(w, w.numel * out_dtype(source, w, options).itemsize) for w in source.weights]
    return _pack(sized, PART_BYTES, lambda number, _: f"__0_{number}.distcp")


def plan_shards(source: Source, options: Options) -> list[OutputFile]:
    """The safetensors files of an HF model, tensors in model order."""
    sized = []
    for weight in source.weights:
        dtype = out_dtype(source, weight, options)
        for name, shape in zip(weight.hf, weight.hf_shapes, strict=True):
            sized.append(((name, dtype, shape), torch.Size(shape).numel() * dtype.itemsize))

    def name(number: int, count: int) -> str:
        return SINGLE_NAME if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    return _pack(sized, options.shard_size, name)


def _pack(sized: Iterable[tuple[Any, int]], limit: int, name: Callable[[int, int], str]) -> list[OutputFile]:
    files: list[tuple[list[Any], int]] = []
    for item, nbytes in sized:
        if not files or files[-1][1] + nbytes > limit:
            files.append(([], 0))
        items, total = files[-1]
        items.append(item)
        files[-1] = (items, total + nbytes)
    return [OutputFile(name(i, len(files)), tuple(items), n) for i, (items, n) in enumerate(files)]


def hf_to_megatron(source: HFSource, out: Path, options: Options, progress: Progress) -> None:
    """Write the model as a torch_dist checkpoint at `out`; see the module. Raises CheckpointError."""
    files = plan_parts(source, options)
    staging = _staging(source, out, options, files)
    progress.start(sum(f.nbytes for f in files), sum(f.nbytes for f in files if f.name in staging.done))
    lock = threading.Lock()

    def write(file: OutputFile) -> None:
        hashes = TensorHashes()
        with PartWriter(staging.path / file.name) as writer:
            for weight in file.items:
                index = weight.checkpoint_index
                offsets, sizes = (*index, *(0 for _ in weight.shape)), (*(1 for _ in index), *weight.shape)
                writer.begin(weight.checkpoint_key, offsets, sizes, out_dtype(source, weight, options))
                blocks = _cast(source, weight, options, hashes, progress)
                for row, rows in megatron_blocks(weight, source.arch, blocks):
                    writer.put(row, rows)
        with lock:
            chunks = [chunk.as_json() for chunk in writer.chunks]
            staging.record(file.name, chunks=chunks, hashes=hashes.result())

    try:
        with _disk_full_is_an_error(out):
            _run(options.workers, write, [file for file in files if file.name not in staging.done])
            _finish_torch_dist(source, staging, options, files)
            staging.publish()
    finally:
        staging.close()


def _finish_torch_dist(source: HFSource, staging: Staging, options: Options, files: Sequence[OutputFile]) -> None:
    tensors = {
        weight.checkpoint_key: (out_dtype(source, weight, options), checkpoint_size(source.arch, weight))
        for weight in source.weights
    }
    chunks = [Chunk.from_json(c) for file in files for c in staging.done[file.name]["chunks"]]
    written = sum(torch.Size(chunk.sizes).numel() for chunk in chunks)
    elements = sum(weight.numel for weight in source.weights)
    if written != elements or len({(c.key, c.offsets) for c in chunks}) != len(chunks):
        raise CheckpointError(f"{staging.path}: {written} of {elements} elements were written. Convert again.")
    write_metadata(staging.path, tensors, chunks, {"iteration": 0}, extra_state_keys(source.arch))
    copy_companions(source.config_directory, staging.path / HF_FILES, _main_dtype(source, options))
    _write_certificate(source, staging, "hf-to-megatron", files, options)
    open_checkpoint(staging.path)  # what is published has been read again: every file, key and shape (verl#7193)


def megatron_to_hf(source: TorchDistSource, out: Path, options: Options, progress: Progress) -> None:
    """Write the model as an HF directory at `out`; see the module. Raises CheckpointError."""
    files = plan_shards(source, options)
    staging = _staging(source, out, options, files)
    progress.start(sum(f.nbytes for f in files), sum(f.nbytes for f in files if f.name in staging.done))
    todo = [file for file in files if file.name not in staging.done]
    shards = _OpenShards(staging, todo)
    wanted = {name for file in todo for name, _, _ in file.items}

    def write(weight: Weight) -> None:
        hashes = TensorHashes()
        for position, row, rows in _cast(source, weight, options, hashes, progress):
            if weight.hf[position] in wanted:
                shards.put(weight.hf[position], row, rows)
        shards.written({n: h for n, h in hashes.result().items() if n in wanted})

    try:
        with _disk_full_is_an_error(out):
            _run(options.workers, write, _by_turns(source.weights, todo, options.workers))
            _finish_hf(source, staging, options, files)
            staging.publish()
    finally:
        shards.discard()
        staging.close()


def _by_turns(weights: Sequence[Weight], files: Sequence[OutputFile], workers: int) -> list[Weight]:
    """The weights with tensors in `files`, in an order in which as many files as workers grow at a time.

    Two threads that write to one file wait for each other.
    """
    number = {name: i for i, file in enumerate(files) for name, _, _ in file.items}
    queues: list[list[Weight]] = [[] for _ in files]
    for weight in weights:
        numbers = [number[name] for name in weight.hf if name in number]
        if numbers:
            queues[numbers[0]].append(weight)
    order = []
    for first in range(0, len(queues), workers):
        turns = zip_longest(*queues[first : first + workers])
        order.extend(weight for turn in turns for weight in turn if weight is not None)
    return order


class _OpenShards:
    """The HF shards being written: opened at their first tensor, finished by whoever writes the last one."""

    def __init__(self, staging: Staging, files: Sequence[OutputFile]) -> None:
        self._staging = staging
        self._file_of = {name: file for file in files for name, _, _ in file.items}
        self._left = {file.name: {name for name, _, _ in file.items} for file in files}
        self._writers: dict[str, ShardWriter] = {}
        self._hashes: dict[str, dict[str, str]] = {file.name: {} for file in files}
        self._lock = threading.Lock()

    def put(self, name: str, row: int, rows: torch.Tensor) -> None:
        file = self._file_of[name]
        with self._lock:
            if file.name not in self._writers:
                self._writers[file.name] = ShardWriter(self._staging.path / file.name, file.items)
            writer = self._writers[file.name]
        writer.put_rows(name, row, rows)

    def written(self, hashes: dict[str, str]) -> None:
        """These tensors are complete (name to hash)."""
        finished = []
        with self._lock:
            for name, digest in hashes.items():
                file = self._file_of[name].name
                self._hashes[file][name] = digest
                self._left[file].discard(name)
                if not self._left[file]:
                    finished.append(file)
        for file in finished:
            self._writers[file].finish()
            with self._lock:
                del self._writers[file]
                self._staging.record(file, hashes=self._hashes[file])

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()


def _finish_hf(source: TorchDistSource, staging: Staging, options: Options, files: Sequence[OutputFile]) -> None:
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name, _, _ in file.items}
        write_index(staging.path, weight_map, sum(file.nbytes for file in files))
    copy_companions(source.config_directory, staging.path, _main_dtype(source, options))
    _write_certificate(source, staging, "megatron-to-hf", files, options)
    open_checkpoint(staging.path)


def _staging(source: Source, out: Path, options: Options, files: Sequence[OutputFile]) -> Staging:
    inputs = sorted(path for path in source.directory.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in inputs]
    job = {
        "source": str(source.directory.resolve()),
        "config": (source.config_directory / "config.json").read_text(),
        "inputs": stats,
        "dtype": str(options.dtype),
        "files": [(file.name, file.nbytes) for file in files],
    }
    staging = Staging(out, job, force=options.force)
    needed = sum(file.nbytes for file in files if file.name not in staging.done)
    free = shutil.disk_usage(staging.path).free
    if needed > free:
        staging.close()
        raise CheckpointError(
            f"{staging.path}: needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free."
            " Make room, or choose another place."
        )
    return staging


def _cast(
    source: Source, weight: Weight, options: Options, hashes: TensorHashes, progress: Progress
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The source's blocks of a weight in the dtype to write, counted and hashed on their way."""
    dtype = out_dtype(source, weight, options)
    for position, row, rows in source.blocks(weight):
        rows = rows.to(dtype)
        hashes.update(weight.hf[position], rows)
        yield position, row, rows
        progress.advance(rows.nbytes)


def _run(workers: int, work: Callable[[Any], None], items: Sequence[Any]) -> None:
    """work(item) for every item on `workers` threads; the first error stops the rest."""
    pool = ThreadPoolExecutor(workers + 1)  # one more: there is always one that waits for the disk
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _main_dtype(source: Source, options: Options) -> torch.dtype:
    """The dtype most elements have."""
    counts: dict[torch.dtype, int] = {}
    for weight in source.weights:
        dtype = out_dtype(source, weight, options)
        counts[dtype] = counts.get(dtype, 0) + weight.numel
    return max(counts, key=counts.__getitem__)


def _write_certificate(
    source: Source, staging: Staging, direction: str, files: Sequence[OutputFile], options: Options
) -> None:
    hashes: dict[str, str] = {}
    for file in files:
        hashes.update(staging.done[file.name]["hashes"])
    content = certificate(
        source.arch,
        source.weights,
        hashes,
        direction=direction,
        source=str(source.directory.resolve()),
        dtype=str(options.dtype or "as in the source").removeprefix("torch."),
        redundant_hf_keys=source.redundant,
    )
    write_json(staging.path / CERTIFICATE_NAME, content)


@contextmanager
def _disk_full_is_an_error(out: Path) -> Iterator[None]:
    """Turns ENOSPC into a CheckpointError; what is complete stays for the next try."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"{out}: disk full. Make room and give the same command again: it goes on from the files that are"
            f" complete in {out}.partial."
        ) from None
