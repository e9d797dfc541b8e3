"""Megatron-Core's torch_dist checkpoints (torch.distributed.checkpoint files) without Megatron and without a
model.

A checkpoint is `.metadata` (a pickle that maps keys to chunks in files), `*.distcp` (chunks, each what
torch.save writes) and `metadata.json` (the backend). Chunks are read with pread at the offset of their data,
so that any rows can be had without the rest.
"""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from checkpoint_tools import dcp_metadata
from checkpoint_tools.dcp_metadata import Metadata, Place, StoredTensor
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import read_exactly, write_exactly
from checkpoint_tools.publish import write_atomically

METADATA_NAME = ".metadata"
BACKEND_NAME = "metadata.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_KEY = "common_state/shard_0_1"  # where Megatron-Core keeps what is not sharded


@dataclass(frozen=True)
class Chunk:
    """A stored block. offsets, sizes: in the whole tensor of the key. begin, length: bytes of its archive."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Chunk":
        return cls(**{**fields, "offsets": tuple(fields["offsets"]), "sizes": tuple(fields["sizes"])})


def is_torch_dist(directory: Path) -> bool:
    return (directory / METADATA_NAME).is_file()


class TorchDistReader:
    """The tensors of a torch_dist checkpoint.

    tensors: key to (dtype, size) of every tensor, optimizer state included. Raises CheckpointError for an
    incomplete or damaged checkpoint. Safe to share between threads.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        if not is_torch_dist(self.directory):
            raise CheckpointError(f"{self.directory}: no {METADATA_NAME}; not a complete torch_dist checkpoint.")
        metadata = dcp_metadata.read_metadata(self.directory / METADATA_NAME)
        self.tensors = {key: (stored.dtype, stored.size) for key, stored in metadata.tensors.items()}
        self._places = metadata.places
        self._chunks = {
            key: [self._located(key, offsets, sizes) for offsets, sizes in stored.chunks]
            for key, stored in metadata.tensors.items()
        }
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[tuple[Chunk, int]]]] = {}
        self._check_files()

    def _located(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        place = self._places.get((key, offsets))
        if place is None:
            raise CheckpointError(f"{self.directory}: no file holds {key} at {list(offsets)}. Save it again.")
        return Chunk(key, offsets, sizes, place.file, place.begin, place.length)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for place in self._places.values():
            ends[place.file] = max(ends.get(place.file, 0), place.begin + place.length)
        for name, end in ends.items():
            path = self.directory / name
            if not path.is_file():
                raise CheckpointError(f"{path}: named in {METADATA_NAME}, but absent. Copy the checkpoint again.")
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"{path}: truncated: {path.stat().st_size} bytes, {METADATA_NAME} needs {end}."
                    " Copy the checkpoint again."
                )

    def read(self, key: str, index: tuple[int, ...], begin: int | None = None, end: int | None = None) -> torch.Tensor:
        """Rows begin:end (default all) of the tensor at `index`, the leading dimensions of `key`.

        Raises CheckpointError for a missing key, or rows that no chunk or more than one chunk holds.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.directory}: key {key} is missing.")
        dtype, size = self.tensors[key]
        shape = size[len(index) :]
        begin, end = begin or 0, shape[0] if end is None else end
        out = torch.empty((end - begin, *shape[1:]), dtype=dtype)
        filled = 0
        for chunk, number in self._at(key, index):
            lead = len(index)
            first, last = chunk.offsets[lead], chunk.offsets[lead] + chunk.sizes[lead]
            low, high = max(first, begin), min(last, end)
            if low < high:
                rows = out[low - begin : high - begin]
                if len(shape) > 1:
                    rows = rows[:, chunk.offsets[lead + 1] : chunk.offsets[lead + 1] + chunk.sizes[lead + 1]]
                self._fill(rows, chunk, number * (last - first) + low - first)
                filled += rows.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"{self.directory}: {key} at {list(index)}: chunks hold {filled} of {out.numel()} elements."
            )
        return out

    def _at(self, key: str, index: tuple[int, ...]) -> list[tuple[Chunk, int]]:
        """The chunks with a part of the tensor at `index`, and which of the tensors stacked in the chunk it is."""
        lead = len(index)
        if (key, lead) not in self._by_index:
            found: dict[tuple[int, ...], list[tuple[Chunk, int]]] = {}
            for chunk in self._chunks[key]:
                if len(chunk.sizes) - lead not in (1, 2):
                    raise CheckpointError(f"{self.directory}: {key}: {list(chunk.sizes)} is not a stack of matrices.")
                stack = product(
                    *(range(o, o + n) for o, n in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True))
                )
                for number, place in enumerate(stack):
                    same = found.setdefault(place, [])
                    if any(_overlap(chunk, other) for other, _ in same):
                        raise CheckpointError(f"{self.directory}: {key}: two chunks overlap at {list(place)}.")
                    same.append((chunk, number))
            self._by_index[key, lead] = found
        return self._by_index[key, lead].get(index, [])

    def _fill(self, rows: torch.Tensor, chunk: Chunk, first: int) -> None:
        """Read the chunk's rows from `first` on, counted through its stack, into `rows`."""
        path = self.directory / chunk.file
        row = chunk.sizes[-1] * rows.dtype.itemsize if rows.ndim > 1 else rows.dtype.itemsize
        offset = _data_offset(path, chunk, rows.dtype) + first * row
        into = rows if rows.is_contiguous() else torch.empty(rows.shape, dtype=rows.dtype)
        read_exactly(path, memoryview(into.flatten().view(torch.uint8).numpy()), offset)
        if into is not rows:
            rows.copy_(into)

    def common_state(self) -> dict[str, Any]:
        """What the checkpoint holds beside tensors (iteration, arguments), or an empty dict."""
        place = self._places.get((_COMMON_KEY, None))
        if place is None:
            return {}
        content = bytearray(place.length)
        read_exactly(self.directory / place.file, memoryview(content), place.begin)
        return torch.load(io.BytesIO(content), weights_only=True)[0]


def _overlap(a: Chunk, b: Chunk) -> bool:
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


class _Slice(io.RawIOBase):
    """A byte range of a file as a file."""

    def __init__(self, file: io.RawIOBase, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._begin + self._position)
        count = self._file.readinto(memoryview(buffer)[:count])
        self._position += count
        return count


class _LayoutUnpickler(pickle.Unpickler):
    """Reads (storage offset, size, stride) from the pickle of one saved tensor and can build nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: (offset, size, stride)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *rest: data
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"unexpected {module}.{name}")

    def persistent_load(self, pid: Any) -> None:
        return None


_CORRUPT = (zipfile.BadZipFile, pickle.UnpicklingError, struct.error, LookupError, ValueError, TypeError, EOFError)


def _record(view: io.BufferedReader, member: zipfile.ZipInfo) -> int:
    """Where in the archive the content of a member starts. Its CRC-32 is not looked at: it may be absent."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("compressed")
    view.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", view.read(4))
    return member.header_offset + 30 + name_length + extra_length


def _data_offset(path: Path, chunk: Chunk, dtype: torch.dtype) -> int:
    """The byte in the file at which the chunk's elements start, in C order."""
    nbytes = torch.Size(chunk.sizes).numel() * dtype.itemsize
    try:
        with path.open("rb", buffering=0) as file:
            view = io.BufferedReader(_Slice(file, chunk.begin, chunk.length), 4096)
            with zipfile.ZipFile(view) as archive:
                members = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
            stored, layout = members["data/0"], members["data.pkl"]
            view.seek(_record(view, layout))
            offset, size, stride = _LayoutUnpickler(io.BytesIO(view.read(layout.file_size))).load()
            data = _record(view, stored)
    except _CORRUPT as error:
        raise CheckpointError(
            f"{path}: corrupt at byte {chunk.begin}, {chunk.key} {list(chunk.offsets)} ({error})."
            " Copy the checkpoint again."
        ) from None
    contiguous = torch.empty(size, device="meta").stride() if len(size) else ()
    if torch.Size(size).numel() * dtype.itemsize != nbytes or tuple(stride) != contiguous:
        raise CheckpointError(
            f"{path}: {chunk.key} {list(chunk.offsets)}: stored as {list(size)}, stride {list(stride)}."
        )
    start = offset * dtype.itemsize
    if stored.file_size < start + nbytes:
        raise CheckpointError(f"{path}: corrupt: {chunk.key} {list(chunk.offsets)} has {stored.file_size} bytes.")
    return chunk.begin + data + start


class PartWriter:
    """Writes one .distcp file, chunk after chunk; the file gets its name at finish(), after fsync.

    As a context manager it finishes, or discards what there is when an error comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file = self._partial.open("wb+", buffering=0)
        self._missing = 0  # elements of the last chunk that are still to come
        self.chunks: list[Chunk] = []

    def begin(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        """Start the next chunk: what torch.save writes around a tensor, with room for its elements, which put() fills.

        Raises CheckpointError if rows of the chunk before are missing.
        """
        self._check_complete()
        begin = self._file.seek(0, os.SEEK_END)
        torch.serialization.set_crc32_options(False)  # this thread's; torch.load never checks it
        with torch.serialization.skip_data():
            torch.save(torch.empty(sizes, dtype=dtype), self._file)  # no page of it is touched
        length = self._file.tell() - begin
        chunk = Chunk(key, offsets, sizes, self.path.name, begin, length)
        self.chunks.append(chunk)
        self._missing = torch.Size(sizes).numel()
        self._data = _data_offset(self._partial, chunk, dtype)
        self._matrix = (dtype, sizes[-1] if len(sizes) > 1 else 1)

    def put(self, row: int, rows: torch.Tensor) -> None:
        """The rows of the chunk from `row` on; each exactly once. Raises CheckpointError for more than there are."""
        self._missing -= rows.numel()
        dtype, columns = self._matrix
        if self._missing < 0 or rows.dtype != dtype:
            raise CheckpointError(f"{self.path}: {self.chunks[-1].key}: {rows.dtype} rows from {row} on do not fit.")
        flat = rows.contiguous().flatten().view(torch.uint8)
        write_exactly(self._file.fileno(), memoryview(flat.numpy()), self._data + row * columns * dtype.itemsize)

    def _check_complete(self) -> None:
        if self._missing:
            raise CheckpointError(f"{self.path}: {self.chunks[-1].key} lacks {self._missing} elements.")

    def finish(self) -> None:
        """Publish the file. Raises CheckpointError if rows are missing."""
        self._check_complete()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._partial, self.path)

    def discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def write_metadata(
    directory: Path,
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Iterable[Chunk],
    common: dict[str, Any],
    empty_objects: Iterable[str],
) -> None:
    """Make a directory of .distcp files a checkpoint that Megatron-Core loads.

    tensors: key to (dtype, size). common: non-sharded state, of plain types. empty_objects: keys of sharded
    objects whose content is None (the `_extra_state` a strict load asks for); they share one stored copy.
    """
    objects = directory / "__objects_0.distcp"
    state, nothing = io.BytesIO(), io.BytesIO()
    torch.save([common], state)
    torch.save([None], nothing)
    write_atomically(objects, state.getvalue() + nothing.getvalue())
    places = {(_COMMON_KEY, None): Place(objects.name, 0, state.tell())}
    for key in empty_objects:
        places[key, None] = Place(objects.name, state.tell(), nothing.tell())
    stored = {key: StoredTensor(dtype, size, []) for key, (dtype, size) in tensors.items()}
    for chunk in chunks:
        stored[chunk.key].chunks.append((chunk.offsets, chunk.sizes))
        places[chunk.key, chunk.offsets] = Place(chunk.file, chunk.begin, chunk.length)
    write_atomically(directory / BACKEND_NAME, json.dumps(BACKEND).encode())
    dcp_metadata.write_metadata(directory / METADATA_NAME, Metadata(stored, places))
