"""The run directory: what lies where, and which changes of the configuration a resumed run may have.

    config.yaml  pools.sqlite  metrics.jsonl  checkpoints/  tensorboard/  logs/  weights/
"""

import os
from pathlib import Path
from typing import Dict, List

from omegaconf import OmegaConf

from ulorl_megatron.config import to_yaml
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError

# What may change when a run goes on: where and how fast it runs and what is watched, not what it computes.
CHANGEABLE = (
    "run.dir",
    "run.total_steps",
    "servers.",
    "verifier.workers",
    "verifier.timeout_s",
    "verifier.retries",
    "rollout.request_timeout_s",
    "rollout.request_retries",
    "policy.max_tokens_per_rank",
    "policy.head_chunk_tokens",
    "policy.recompute",
    "algorithm.max_engine_mismatch",
    "checkpoint.",
    "evaluation.",
    "data.eval",
)


class RunDirectory:
    """Paths of a run. Creates the folders; leaves a run that is already there as it is."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.tensorboard = self.path / "tensorboard"
        self.metrics = self.path / "metrics.jsonl"
        self._config = self.path / "config.yaml"
        for name in ("checkpoints", "tensorboard", "logs", "weights"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def check(self, config: Config) -> None:
        """Raises UserError if a run with a checkpoint is here, and `config` would make another run of it."""
        if not (self.path / "checkpoints" / "latest").exists() or not self._config.exists():
            return
        changed = changes(_flat(self._config.read_text()), _flat(to_yaml(config)))
        if changed:
            raise UserError(
                "\n".join(
                    [
                        f"{self.path} holds a run with another configuration:",
                        *(f"  {line}" for line in changed),
                        "set these back to resume it, or give another run.dir",
                    ]
                )
            )

    def write_config(self, config: Config) -> None:
        """config.yaml becomes `config`, whole or not at all."""
        temporary = self.path / ".config.yaml"
        with temporary.open("w") as file:
            file.write(to_yaml(config))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._config)


def changes(before: Dict[str, object], now: Dict[str, object]) -> List[str]:
    """One line for each key that differs and is not CHANGEABLE."""
    return [
        f"{key}: {before.get(key, 'absent')} then, {now.get(key, 'absent')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(CHANGEABLE)
    ]


def _flat(yaml: str) -> Dict[str, object]:
    """section.key -> value."""
    flat: Dict[str, object] = {}

    def walk(node: dict, prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = value

    walk(OmegaConf.to_container(OmegaConf.create(yaml)), "")
    return flat
