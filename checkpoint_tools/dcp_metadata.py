"""The `.metadata` file of torch.distributed.checkpoint: which key is where, as a pickle.

It is read without that package, which takes longer to import than a small checkpoint to convert, and without
running what a pickle may hold: only the package's records become anything, and they become plain values.
"""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.publish import write_atomically

# What damaged pickles raise; a length that was overwritten asks for all the memory there is.
_CORRUPT = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, ValueError, TypeError, ArithmeticError)
_CORRUPT += (MemoryError,)
_BUILTIN = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


@dataclass(frozen=True)
class Place:
    """A range of bytes of a file beside `.metadata`."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """chunks: (offsets, sizes) of each, in the whole tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Metadata:
    """places: of chunks by (key, offsets), of objects by (key, None)."""

    tensors: dict[str, StoredTensor]
    places: dict[tuple[str, tuple[int, ...] | None], Place]


class _Record:
    """Stands for any class of torch.distributed.checkpoint: keeps what it was pickled with."""

    offset = None  # MetadataIndex leaves it out where there is none

    def __init__(self, *arguments: Any) -> None:
        self.state = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)


class _TensorStorageMetadata(_Record):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint"):
            return _TensorStorageMetadata if name == "TensorStorageMetadata" else _Record
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib"):
            return PurePath
        if (module, name) in _BUILTIN:
            return _BUILTIN[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_metadata(path: Path) -> Metadata:
    """Raises CheckpointError if the file is damaged, or holds what no checkpoint has."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except _CORRUPT as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Copy the checkpoint again.") from None


def _read(file: BinaryIO) -> Metadata:
    stored = _Unpickler(file).load()
    tensors = {}
    for key, entry in stored.state_dict_metadata.items():
        if isinstance(entry, _TensorStorageMetadata):
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            dtype = entry.properties.state[0]
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key}: {dtype!r} is no dtype")
            tensors[key] = StoredTensor(dtype, tuple(entry.size), chunks)
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): Place(
            place.relative_path, place.offset, place.length
        )
        for index, place in stored.storage_data.items()
    }
    return Metadata(tensors, places)


def write_metadata(path: Path, metadata: Metadata) -> None:
    """Writes it as torch.distributed.checkpoint does, whole or not at all."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    entries: dict[str, Any] = {
        key: dcp.BytesStorageMetadata() for key, offsets in metadata.places if offsets is None
    }
    for key, tensor in metadata.tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in tensor.chunks]
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
    storage = {
        dcp.MetadataIndex(key, None if offsets is None else torch.Size(offsets)): _StorageInfo(
            place.file, place.begin, place.length
        )
        for (key, offsets), place in metadata.places.items()
    }
    content = dcp.Metadata(
        entries,
        storage_data=storage,
        storage_meta=dcp.StorageMeta(),
        version=CURRENT_DCP_VERSION,
        planner_data=None,
    )
    write_atomically(path, pickle.dumps(content))
