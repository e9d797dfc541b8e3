"""What a finished run says of itself."""

from pathlib import Path
from typing import Dict, List

import numpy as np

_EDGE = 5  # steps that "at first" and "at last" are averaged over


def summary(records: List[Dict[str, float]], folder: Path) -> str:
    """A few lines on the whole run, from the records of metrics.jsonl."""
    steps = [r for r in records if "time/step" in r]
    evaluations = [r for r in records if "eval/accuracy" in r]
    lines = [f"== {folder}: {len(steps)} steps"]
    rewards = [r["reward/issued"] for r in steps if "reward/issued" in r]
    if rewards:
        first, last = np.mean(rewards[:_EDGE]), np.mean(rewards[-_EDGE:])
        lines.append(f"mean reward        {first:.3f} -> {last:.3f}  (issued in the first and last {_EDGE} steps)")
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        lines.append(
            f"held-out accuracy  {first['eval/accuracy']:.3f} -> {last['eval/accuracy']:.3f}  "
            f"(steps {first['step']} and {last['step']})"
        )
    trained = sum(r["train/samples"] for r in steps)
    if trained:
        mixed = sum(r["train/multi_version_samples"] for r in steps)
        truncated = sum(r["train/truncated_samples"] for r in steps)
        lines.append(
            f"trained samples    {trained:.0f}, of them {mixed:.0f} ({mixed / trained:.0%}) made by two or more weight "
            f"versions, {truncated:.0f} truncated"
        )
    seconds = {part: sum(r.get(f"time/{part}", 0.0) for r in steps) for part in ("rollout", "train", "sync")}
    lines.append(
        f"decoded tokens     {sum(r['rollout/tokens'] for r in steps):.0f}; seconds in "
        + ", ".join(f"{part} {value:.0f}" for part, value in seconds.items())
    )
    if steps:
        last = steps[-1]
        lines.append(
            f"left in the pools  {last['pools/unfinished']:.0f} unfinished, {last['pools/waiting']:.0f} waiting; "
            f"{last['pools/filtered']:.0f} filtered, {last['pools/failed']:.0f} failed in all"
        )
    lines.append(f"watch it           tensorboard --logdir {folder / 'tensorboard'}")
    return "\n".join(lines)
