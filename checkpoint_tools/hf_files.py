"""Safetensors files and their index: lazy reads that notice damage, and streaming atomic writes.

Tensors are read and written with pread and pwrite at the offsets of the header rather than through a memory
map, whose touched pages would count as this process's memory: a tensor is held only as long as its caller
holds it.
"""

import json
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.publish import fsync_directory, write_atomically

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. begin, end: byte offsets in the file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class HFReader:
    """The tensors of an HF directory: an index with its shards, or one model.safetensors.

    Opening reads the headers only. `entries` maps every name to its TensorEntry, in file order. Raises
    CheckpointError for absent, truncated or corrupt files, an index that disagrees with its files, and
    unsupported dtypes. Safe to share between threads.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        index = self.directory / INDEX_NAME
        single = self.directory / SINGLE_NAME
        if index.is_file():
            self.entries = _read_indexed(index)
        elif single.is_file():
            self.entries = {entry.name: entry for entry in read_header(single)}
        else:
            raise CheckpointError(
                f"{self.directory}: neither {INDEX_NAME} nor {SINGLE_NAME} is there."
                " Give the directory of an HF model with safetensors weights."
            )

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> torch.Tensor:
        """The tensor, or its rows begin:end, in memory of its own.

        Raises CheckpointError for an unknown name, or a file cut short since it was opened.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: key {name} is missing.")
        shape, first = entry.shape, entry.begin
        if begin is not None and end is not None:
            shape = (end - begin, *entry.shape[1:])
            first += begin * (entry.nbytes // entry.shape[0])
        out = torch.empty(shape, dtype=entry.dtype)
        if out.numel():
            read_exactly(entry.file, memoryview(out.flatten().view(torch.uint8).numpy()), first)
        return out


def read_header(file: Path) -> list[TensorEntry]:
    """The entries of one safetensors file, in file order. Raises CheckpointError if it is absent or
    damaged."""
    advice = "Fetch or write the file again."
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                raise CheckpointError(f"{file}: truncated or corrupt (no complete safetensors header). {advice}")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file. {advice}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{file}: corrupt safetensors header. {advice}") from None
    entries = [_entry(file, name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: entry.begin)
    end = 8 + length
    for entry in entries:
        if entry.begin != end:
            raise CheckpointError(f"{file}: corrupt: {entry.name} does not follow the tensor before it. {advice}")
        end = entry.end
    if end != size:
        state = "truncated" if end > size else "corrupt"
        raise CheckpointError(f"{file}: {state}: {size} bytes, its header describes {end}. {advice}")
    return entries


def _entry(file: Path, name: str, fields: Mapping, data: int) -> TensorEntry:
    try:
        dtype_name, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: corrupt header entry for {name}. Fetch or write the file again.") from None
    if dtype_name not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype_name}; supported are {', '.join(DTYPES)}.")
    entry = TensorEntry(name, file, DTYPES[dtype_name], shape, data + begin, data + end)
    if torch.Size(shape).numel() * entry.dtype.itemsize != entry.nbytes:
        raise CheckpointError(f"{file}: corrupt: {name} of shape {list(shape)} has {entry.nbytes} bytes.")
    return entry


def _read_indexed(index: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, set()).add(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: not a safetensors index. Fetch the file again.") from None
    entries: dict[str, TensorEntry] = {}
    for file, names in sorted(by_file.items()):
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"{index}: names {file}, which is absent. Fetch {file} again.")
        found = {entry.name: entry for entry in read_header(path)}
        if missing := names - found.keys():
            raise CheckpointError(f"{path}: key {min(missing)} is missing, though {index.name} places it here.")
        if extra := found.keys() - names:
            raise CheckpointError(f"{path}: holds key {min(extra)}, which {index.name} does not place here.")
        entries.update(found)
    return entries


def read_exactly(file: Path, view: memoryview, offset: int) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; it was there when the checkpoint was opened.") from None
    try:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise CheckpointError(f"{file}: truncated at byte {offset}. Fetch or write the file again.")
            view, offset = view[count:], offset + count
    finally:
        os.close(descriptor)


class ShardWriter:
    """Writes one safetensors file, tensor by tensor in any order, and gives it its name only when complete.

    entries: (name, dtype, shape) of every tensor, which fix the header and the offsets. finish() publishes
    (fsync, rename) and discard() removes what there is; as a context manager it does the one or the other.
    put() and put_rows() may be called from several threads.
    """

    def __init__(self, path: Path, entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._lock = threading.Lock()
        self._plan: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._missing: dict[str, int] = {}  # bytes of each tensor still to come
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape in entries:
            if name in self._plan:
                raise CheckpointError(f"{path}: {name} is listed twice.")
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._plan[name] = (offset, dtype, tuple(shape))
            self._missing[name] = end - offset
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._data = 8 + len(encoded)
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        write_exactly(self._descriptor, memoryview(struct.pack("<Q", len(encoded)) + encoded), 0)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor. Raises CheckpointError for an unlisted or repeated one, another dtype or
        shape."""
        if name in self._plan and tuple(tensor.shape) != self._plan[name][2]:
            planned = list(self._plan[name][2])
            raise CheckpointError(f"{self.path}: {name} has shape {list(tensor.shape)}, planned {planned}.")
        self.put_rows(name, 0, tensor)

    def put_rows(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Write the rows of a tensor from `first` on; each row exactly once. Raises like put()."""
        if name not in self._plan:
            raise CheckpointError(f"{self.path}: {name} was not planned for this file.")
        offset, dtype, shape = self._plan[name]
        if rows.dtype != dtype or tuple(rows.shape[1:]) != shape[1:]:
            raise CheckpointError(
                f"{self.path}: {name} is {rows.dtype} {list(rows.shape)}, planned {dtype} {list(shape)}."
            )
        with self._lock:
            self._missing[name] -= rows.nbytes
            if self._missing[name] < 0:
                raise CheckpointError(f"{self.path}: {name} is written twice.")
        if rows.numel():
            begin = self._data + offset + first * torch.Size(shape[1:]).numel() * dtype.itemsize
            flat = rows.detach().cpu().contiguous().flatten().view(torch.uint8)
            write_exactly(self._descriptor, memoryview(flat.numpy()), begin)

    @property
    def complete(self) -> bool:
        return not any(self._missing.values())

    def finish(self) -> None:
        """Publish the file. Raises CheckpointError, and leaves nothing, if a tensor was not written."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            self.discard()
            raise CheckpointError(f"{self.path}: {missing[0]} was planned but never written.")
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        os.rename(self._partial, self.path)
        fsync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove what there is. Harmless when done already."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write model.safetensors.index.json atomically. weight_map: tensor name to file name. total_size:
    bytes."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(directory / INDEX_NAME, json.dumps(content, indent=2).encode())


def write_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
