"""A checkpoint of either kind, seen as the HF tensors of the map, in blocks that fit in memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from checkpoint_tools import layouts
from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import INDEX_NAME, SINGLE_NAME, HFReader
from checkpoint_tools.name_map import Layout, Weight, checkpoint_size, weights
from checkpoint_tools.torch_dist import TorchDistReader, is_torch_dist

HF_FILES = "hf"  # directory in a torch_dist checkpoint with config.json, tokenizer and so on
BLOCK_BYTES = 2**20  # small enough to stay in a core's cache between reading, hashing and writing

Block = tuple[int, int, torch.Tensor]  # position in weight.hf, first row, rows


class Source(Protocol):
    """What conversion and comparison need of a checkpoint.

    arch, weights: the model. config_directory: where config.json and its companions lie.
    redundant: keys beyond the map that say nothing new (an lm_head equal to the embedding it is tied to).
    """

    directory: Path
    config_directory: Path
    arch: Architecture
    weights: list[Weight]
    redundant: list[str]

    def dtype(self, weight: Weight) -> torch.dtype: ...

    def blocks(self, weight: Weight) -> Iterator[Block]:
        """Every row of the weight's HF tensors exactly once, in order; QKV tensors are whole."""
        ...


def open_checkpoint(directory: str | os.PathLike, config: str | os.PathLike | None = None) -> Source:
    """Open and check a checkpoint of either kind against the map. config: directory of config.json, if
    elsewhere.

    Raises CheckpointError for anything missing, unexpected, misshapen or damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory.")
    if is_torch_dist(directory):
        return TorchDistSource(directory, Path(config) if config else directory / HF_FILES)
    if (directory / INDEX_NAME).is_file() or (directory / SINGLE_NAME).is_file():
        return HFSource(directory, Path(config) if config else directory)
    raise CheckpointError(
        f"{directory}: neither an HF model (no {INDEX_NAME} or {SINGLE_NAME}) nor a torch_dist checkpoint"
        " (no .metadata)."
    )


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """(begin, end) rows of at most BLOCK_BYTES each."""
    row = max(1, torch.Size(shape[1:]).numel() * itemsize)
    step = max(1, BLOCK_BYTES // row)
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


class HFSource:
    def __init__(self, directory: Path, config_directory: Path) -> None:
        self.directory, self.config_directory = directory, config_directory
        self.arch = Architecture.from_hf(config_directory)
        self.weights = weights(self.arch)
        self.reader = HFReader(directory)
        self.redundant: list[str] = []
        self._check()

    def _check(self) -> None:
        entries = self.reader.entries
        expected = {n: s for w in self.weights for n, s in zip(w.hf, w.hf_shapes, strict=True)}
        where = self.directory
        if missing := [name for name in expected if name not in entries]:
            raise CheckpointError(
                f"{where}: {len(missing)} key(s) are missing, first {missing[0]}. The config"
                f" ({self.arch.model_type}, {self.arch.num_layers} layers) asks for them: fetch all shards,"
                " or correct config.json."
            )
        unexpected = [name for name in entries if name not in expected]
        if self.arch.tie_embeddings and unexpected == ["lm_head.weight"]:
            self._check_tied_head()
        elif unexpected:
            raise CheckpointError(
                f"{entries[unexpected[0]].file}: {len(unexpected)} unexpected key(s), first {unexpected[0]}."
                " The map has no place for them: is config.json the one of these weights?"
            )
        for name, shape in expected.items():
            entry = entries[name]
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.file}: {name} has shape {list(entry.shape)}, the config asks for {list(shape)}."
                )
            if not entry.dtype.is_floating_point:
                raise CheckpointError(f"{entry.file}: {name} has dtype {entry.dtype}; weights are floating point.")
        for weight in self.weights:
            dtypes = {entries[name].dtype for name in weight.hf}
            if len(dtypes) > 1:
                raise CheckpointError(f"{where}: {', '.join(weight.hf)} have different dtypes: {dtypes}.")

    def _check_tied_head(self) -> None:
        """Some tied models ship the head as well; it must then be the embedding, bit for bit."""
        head, embedding = (self.reader.entries[n] for n in ("lm_head.weight", "model.embed_tokens.weight"))
        same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and all(
            torch.equal(
                self.reader.read(head.name, *rows).view(torch.uint8),
                self.reader.read(embedding.name, *rows).view(torch.uint8),
            )
            for rows in row_blocks(head.shape, head.dtype.itemsize)
        )
        if not same:
            raise CheckpointError(
                f"{head.file}: lm_head.weight differs from the embedding, but config.json ties them"
                " (tie_word_embeddings). Correct the one or the other."
            )
        self.redundant = ["lm_head.weight"]

    def dtype(self, weight: Weight) -> torch.dtype:
        return self.reader.entries[weight.hf[0]].dtype

    def blocks(self, weight: Weight) -> Iterator[Block]:
        for position, (name, shape) in enumerate(zip(weight.hf, weight.hf_shapes, strict=True)):
            if weight.layout is Layout.QKV or len(shape) == 1:
                yield position, 0, self.reader.read(name)
                continue
            for begin, end in row_blocks(shape, self.dtype(weight).itemsize):
                yield position, begin, self.reader.read(name, begin, end)


class TorchDistSource:
    def __init__(self, directory: Path, config_directory: Path) -> None:
        self.directory, self.config_directory = directory, config_directory
        if not (config_directory / "config.json").is_file():
            raise CheckpointError(
                f"{directory}: no config.json in {config_directory}."
                " Name the HF directory the model came from with --hf-config."
            )
        self.arch = Architecture.from_hf(config_directory)
        self.weights = weights(self.arch)
        self.reader = TorchDistReader(directory)
        self.redundant: list[str] = []
        self._check()

    def _check(self) -> None:
        tensors = self.reader.tensors
        expected = {weight.checkpoint_key: weight for weight in self.weights}
        if missing := [key for key in expected if key not in tensors]:
            raise CheckpointError(
                f"{self.directory}: {len(missing)} key(s) are missing, first {missing[0]}. The config"
                f" ({self.arch.model_type}, {self.arch.num_layers} layers) asks for them:"
                " is config.json the one of this model?"
            )
        model = [key for key in tensors if key.startswith(("embedding.", "decoder.", "output_layer."))]
        if unexpected := [key for key in model if key not in expected]:
            raise CheckpointError(
                f"{self.directory}: {len(unexpected)} unexpected key(s), first {unexpected[0]}."
                " The map has no place for them: is config.json the one of this model?"
            )
        for key, weight in expected.items():
            size, asked = tensors[key][1], checkpoint_size(self.arch, weight)
            padded = weight.vocab and size[0] >= asked[0] and size[1:] == asked[1:]
            if size != asked and not padded:
                raise CheckpointError(
                    f"{self.directory}: {key} has size {list(size)}, the config asks for {list(asked)}."
                )

    def dtype(self, weight: Weight) -> torch.dtype:
        return self.reader.tensors[weight.checkpoint_key][0]

    def blocks(self, weight: Weight) -> Iterator[Block]:
        key, index = weight.checkpoint_key, weight.checkpoint_index
        if weight.layout is Layout.QKV:
            for position, tensor in enumerate(layouts.to_hf(weight, self.arch, self.reader.read(key, index))):
                yield position, 0, tensor
            return
        for position, shape in enumerate(weight.hf_shapes):
            first = layouts.megatron_row(weight, position, 0)
            for begin, end in row_blocks(shape, self.dtype(weight).itemsize):
                yield position, begin, self.reader.read(key, index, first + begin, first + end)
