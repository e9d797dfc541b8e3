"""What `inspect` and `--dry-run` print."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.convert import Options, OutputFile, plan_parts, plan_shards
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import INDEX_NAME, SINGLE_NAME, HFReader
from checkpoint_tools.name_map import Weight, rows, weights
from checkpoint_tools.sources import Block, Source, open_checkpoint
from checkpoint_tools.torch_dist import TorchDistReader, is_torch_dist


class ConfigSource:
    """A model of which there is only the config, for planning."""

    def __init__(self, directory: Path) -> None:
        self.directory = self.config_directory = directory
        self.arch = Architecture.from_hf(directory)
        self.weights = weights(self.arch)
        self.redundant: list[str] = []
        dtype = getattr(torch, self.arch.dtype or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{directory / 'config.json'}: unknown dtype {self.arch.dtype!r}.")
        self._dtype = dtype

    def dtype(self, weight: Weight) -> torch.dtype:
        return self._dtype

    def blocks(self, weight: Weight) -> Iterator[Block]:
        raise CheckpointError(f"{self.directory}: only the config is there, no weights.")


def hf_plan_source(directory: Path) -> Source:
    """The source for a dry run: the weights where all are there, else the config and, if there is one, the
    index.

    Raises CheckpointError for an index whose names are not the map's.
    """
    index = directory / INDEX_NAME
    if (directory / SINGLE_NAME).is_file():
        return open_checkpoint(directory)
    if not index.is_file():
        return ConfigSource(directory)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = set(weight_map.values())
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: not a safetensors index. Fetch the file again.") from None
    if all((directory / file).is_file() for file in files):
        return open_checkpoint(directory)
    source = ConfigSource(directory)
    expected = {name for weight in source.weights for name in weight.hf}
    allowed = expected | ({"lm_head.weight"} if source.arch.tie_embeddings else set())
    if missing := expected - weight_map.keys():
        raise CheckpointError(f"{index}: {len(missing)} key(s) are missing, first {min(missing)}.")
    if unexpected := weight_map.keys() - allowed:
        raise CheckpointError(f"{index}: {len(unexpected)} unexpected key(s), first {min(unexpected)}.")
    return source


def plan_lines(source: Source, options: Options, *, to_hf: bool) -> Iterator[str]:
    """The dry run: counts, bytes, files and what goes where."""
    files = plan_shards(source, options) if to_hf else plan_parts(source, options)
    tensors = sum(len(weight.hf) for weight in source.weights)
    basis = "the config alone" if isinstance(source, ConfigSource) else "the weights"
    yield f"model        {describe(source.arch)}"
    yield f"planned from {basis} in {source.directory}"
    yield f"HF           {tensors:,} tensors"
    yield f"Megatron     {len(source.weights):,} parameters"
    yield f"elements     {sum(weight.numel for weight in source.weights):,}"
    yield f"output       {_gb(sum(file.nbytes for file in files))} in {_files(files)}"
    if source.redundant:
        yield f"left out     {', '.join(source.redundant)} (equal to the embedding it is tied to)"
    yield ""
    yield "count  layout   split       HF  ->  Megatron (key in the checkpoint)"
    of_key = Counter(weight.checkpoint_key for weight in source.weights)
    for row in rows(source.arch):
        split = f"{row.parallel} dim {row.dim}" if row.parallel else "-"
        names = [name for name, _ in row.hf]
        head = f"{of_key[row.checkpoint]:>5,}  {row.layout.value:<8} {split:<10}  "
        for name in names[:-1]:
            yield head + name
            head = " " * len(head)
        yield f"{head}{names[-1]}  ->  {row.checkpoint}"


def _files(files: Sequence[OutputFile]) -> str:
    if len(files) == 1:
        return files[0].name
    largest = max(file.nbytes for file in files)
    return f"{len(files)} files, {files[0].name} to {files[-1].name}, the largest {_gb(largest)}"


def describe(arch: Architecture) -> str:
    text = f"{arch.model_type}, {arch.num_layers} layers, hidden {arch.hidden_size}, "
    text += f"{arch.num_heads} heads over {arch.num_kv_heads} key-value heads of {arch.head_dim}, "
    if arch.is_moe:
        text += f"{arch.num_experts} experts of {arch.moe_intermediate_size} (top {arch.experts_per_token}), "
    else:
        text += f"MLP {arch.intermediate_size}, "
    return text + f"vocabulary {arch.vocab_size}" + (", tied embeddings" if arch.tie_embeddings else "")


def inspect_lines(directory: Path, config: Path | None, *, tensors: bool) -> Iterator[str]:
    """What a checkpoint is. Raises CheckpointError if it is none, or damaged."""
    table: list[tuple[str, torch.dtype, tuple[int, ...], str]]
    iteration = None
    if is_torch_dist(directory):
        kind = "torch_dist (Megatron-Core)"
        reader = TorchDistReader(directory)
        table = [(key, dtype, size, "") for key, (dtype, size) in reader.tensors.items()]
        common = reader.common_state()
        iteration = common.get("iteration", common.get("step"))  # Megatron-LM's word, and this trainer's
    else:
        kind = "HF safetensors"
        table = [(e.name, e.dtype, e.shape, e.file.name) for e in HFReader(directory).entries.values()]
    model = [row for row in table if not row[0].startswith(("optimizer.", "chained_"))]
    yield f"kind         {kind}"
    try:
        source = open_checkpoint(directory, config)
        yield f"model        {describe(source.arch)}"
        fit = "complete, every key mapped"
    except CheckpointError as error:
        fit = str(error)
    yield f"map          {fit}"
    if iteration is not None:
        yield f"iteration    {iteration}"
    yield f"tensors      {len(model):,}" + (
        f", and {len(table) - len(model):,} of the optimizer" if len(table) > len(model) else ""
    )
    yield f"parameters   {sum(torch.Size(shape).numel() for _, _, shape, _ in model):,}"
    dtypes = Counter(str(dtype).removeprefix("torch.") for _, dtype, _, _ in model)
    yield f"dtypes       {', '.join(f'{name} ({count:,} tensors)' for name, count in dtypes.most_common())}"
    yield f"bytes        {_gb(sum(torch.Size(s).numel() * d.itemsize for _, d, s, _ in model))}"
    if tensors:
        yield ""
        for name, dtype, shape, file in table:
            yield f"{name}  {str(dtype).removeprefix('torch.')}  {list(shape)}  {file}".rstrip()


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e7 else f"{nbytes:,} bytes"
