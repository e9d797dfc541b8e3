"""What the client must know of a model to ask for its tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import FrozenSet, Optional

from ulorl_megatron.errors import UserError


@dataclass(frozen=True)
class ServedModel:
    """path: HF directory the servers start from. Ids are in [0, vocab_size). stop_token_ids: EOS ids."""

    path: Path
    vocab_size: int
    stop_token_ids: FrozenSet[int]

    @classmethod
    def from_path(cls, path: Path) -> "ServedModel":
        """Reads config.json and, where there is one, generation_config.json (Qwen3 lists two EOS ids there).

        Raises UserError when config.json is missing or unreadable, or when neither file names an EOS id.
        """
        config = _read_json(path / "config.json")
        if config is None:
            raise UserError(f"model.path: {path} has no config.json; give a model directory in the HF layout")
        generation = _read_json(path / "generation_config.json") or {}
        stop = _as_ids(config.get("eos_token_id")) | _as_ids(generation.get("eos_token_id"))
        if not stop:
            raise UserError(f"{path}/config.json: no eos_token_id, so no response could ever end; add it")
        if not isinstance(config.get("vocab_size"), int):
            raise UserError(f"{path}/config.json: no vocab_size; give a language model in the HF layout")
        return cls(path, config["vocab_size"], stop)


def _read_json(path: Path) -> Optional[dict]:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the model again") from error


def _as_ids(eos) -> FrozenSet[int]:
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
