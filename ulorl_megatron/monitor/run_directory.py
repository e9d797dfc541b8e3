"""The run directory: what lies where, and which changes of the configuration a resumed run may have.

It holds config.yaml, pools.sqlite, metrics.jsonl, checkpoints/, tensorboard/, logs/ and weights/.
"""

import json
from pathlib import Path
from typing import Dict, List, Optional

from omegaconf import OmegaConf

from checkpoint_tools.publish import write_atomically
from ulorl_megatron.config import to_yaml
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError

# What may change when a run goes on: where and how fast it runs and what is watched, not what it computes.
CHANGEABLE = (
    "run.dir",
    "run.total_steps",
    "run.processes",
    "servers.",
    "verifier.workers",
    "verifier.timeout_s",
    "verifier.retries",
    "verifier.judge.url",
    "verifier.judge.key_variable",
    "verifier.judge.concurrency",
    "verifier.judge.timeout_s",
    "verifier.judge.retries",
    "verifier.judge.hold_s",
    "verifier.judge.cache_size",
    "rollout.request_timeout_s",
    "rollout.request_retries",
    "policy.max_tokens_per_rank",
    "policy.head_chunk_tokens",
    "policy.recompute",
    "policy.parallel.",
    "policy.transformer_impl",
    "policy.overlap.",
    "policy.optimizer.offload",
    "algorithm.max_engine_mismatch",
    "checkpoint.",
    "evaluation.",
    "data.eval",
)


def identity(config: Config) -> str:
    """What a resumed run must share with the one before, as one string: every key that is not CHANGEABLE."""
    kept = {key: value for key, value in _flat(to_yaml(config)).items() if not key.startswith(CHANGEABLE)}
    return json.dumps(kept, sort_keys=True)


def open_run_directory(config: Config) -> Path:
    """Creates config.run.dir and its folders, or opens the run in it; its config.yaml becomes `config`.

    Raises UserError if a run with a checkpoint is there and `config` would make another run of it. A run
    without a checkpoint binds nobody: it begins again.
    """
    folder = Path(config.run.dir)
    file = folder / "config.yaml"
    if (folder / "checkpoints" / "latest").exists() and file.exists():
        changed = changes(_flat(file.read_text()), _flat(to_yaml(config)))
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{folder} holds a run with another configuration:\n{lines}\n"
                "Set these back to resume it, or give another run.dir."
            )
    for name in ("checkpoints", "tensorboard", "logs", "weights"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_atomically(file, to_yaml(config).encode())
    return folder


def last_checkpoint(folder: Path) -> Optional[int]:
    """The step of the newest complete checkpoint of a run directory; None if there is none."""
    pointer = folder / "checkpoints" / "latest"
    return int(pointer.read_text().strip().removeprefix("step-")) if pointer.exists() else None


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
