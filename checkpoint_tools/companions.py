"""The small files beside the weights: config, generation config, tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.publish import write_atomically

_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


def copy_companions(
    source: Path, destination: Path, dtype: torch.dtype, changed: Mapping[str, Any] | None = None
) -> None:
    """Copy config.json, with the dtype of the weights written beside it, and what else belongs to the
    model. changed: further fields of config.json to replace."""
    destination.mkdir(exist_ok=True)
    config = {**json.loads((source / "config.json").read_text()), **(changed or {})}
    spelling = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[spelling] = str(dtype).removeprefix("torch.")
    write_atomically(destination / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    for pattern in _PATTERNS:
        for file in source.glob(pattern):
            if file.is_file():
                write_atomically(destination / file.name, file.read_bytes())
