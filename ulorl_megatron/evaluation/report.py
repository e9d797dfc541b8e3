"""The results as Markdown, JSON and TensorBoard."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from ulorl_megatron.config.schema import Config
from ulorl_megatron.evaluation.checkpoints import Checkpoint
from ulorl_megatron.evaluation.examination import Table
from ulorl_megatron.evaluation.results import Results
from ulorl_megatron.evaluation.statistics import Comparison, Estimate, compare, holm

_NOTES = (
    "In brackets: intervals of 95 %, by a bootstrap over problems. pass@k is the unbiased estimate. Truncated "
    "responses count as wrong, unjudged ones not at all. Differences are of avg@k; p is of the paired permutation test "
    "by problem (two-sided), and beside it adjusted by Holm for all comparisons of this report."
)

# (set, label) -> the checkpoint against the first one
Comparisons = Dict[Tuple[str, str], Comparison]


def compared(table: Table, checkpoints: List[Checkpoint]) -> Tuple[Comparisons, Dict[Tuple[str, str], float]]:
    """Every checkpoint against the first, on the problems that both were judged on; and the adjusted p-values."""
    found: Comparisons = {}
    for name in dict.fromkeys(name for _, name in table):
        first = table[checkpoints[0].label, name].scores
        for checkpoint in checkpoints[1:]:
            second = table[checkpoint.label, name].scores
            pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
            if pairs:
                found[name, checkpoint.label] = compare(*map(list, zip(*pairs, strict=True)))
    adjusted = holm([comparison.p_value for comparison in found.values()])
    return found, dict(zip(found, adjusted, strict=True))


def markdown(config: Config, table: Table, checkpoints: List[Checkpoint]) -> str:
    e = config.evaluation
    lines = [
        "# Evaluation",
        "",
        f"k = {e.samples_per_prompt}, temperature {e.temperature:g}, top_p {e.top_p:g}, top_k {e.top_k}, at most "
        f"{config.rollout.global_max_length} tokens, judged by {config.verifier.kind.value}.",
    ]
    comparisons, adjusted = compared(table, checkpoints)
    for name in dict.fromkeys(name for _, name in table):
        rows = {checkpoint.label: table[checkpoint.label, name] for checkpoint in checkpoints}
        lines += ["", f"## {name}: {next(iter(rows.values())).problems} problems", "", *_table(rows)]
        if len(checkpoints) > 1:
            lines += ["", f"Against {checkpoints[0].label}:", ""]
            lines.append("| checkpoint | difference | p | adjusted | better | worse | equal |")
            lines.append("|---|---:|---:|---:|---:|---:|---:|")
            for checkpoint in checkpoints[1:]:
                key = (name, checkpoint.label)
                if key in comparisons:
                    lines.append(_comparison(checkpoint.label, comparisons[key], adjusted[key]))
    return "\n".join([*lines, "", _NOTES]) + "\n"


def _table(rows: Dict[str, Results]) -> List[str]:
    passes = sorted({k for results in rows.values() for k in results.pass_at if k > 1})
    k = next(iter(rows.values())).attempts_each
    heads = [f"avg@{k}", *(f"pass@{n}" for n in passes)]
    heads += ["mean length", "p10 / p50 / p90", "max", "truncated", "unjudged"]
    lines = [f"| checkpoint | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for label, r in rows.items():
        cells = [_shown(r.accuracy), *(_shown(r.pass_at[n]) if n in r.pass_at else "" for n in passes)]
        cells += [f"{r.lengths['mean']:.0f}", " / ".join(f"{r.lengths[q]:.0f}" for q in ("p10", "p50", "p90"))]
        cells += [f"{r.lengths['max']:.0f}", f"{r.truncated:.1%}", f"{r.unjudged:.1%}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _comparison(label: str, c: Comparison, adjusted: float) -> str:
    difference = f"{c.difference.value:+.3f} [{c.difference.low:+.3f}, {c.difference.high:+.3f}]"
    equal = c.problems - c.better - c.worse
    return f"| {label} | {difference} | {c.p_value:.4f} | {adjusted:.4f} | {c.better} | {c.worse} | {equal} |"


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def as_data(table: Table, checkpoints: List[Checkpoint]) -> Dict[str, Any]:
    """All figures, for results.json."""
    comparisons, adjusted = compared(table, checkpoints)
    return {
        "checkpoints": [{"label": c.label, "path": str(c.path), "step": c.step} for c in checkpoints],
        "results": [{"checkpoint": label, "set": name, **asdict(r)} for (label, name), r in table.items()],
        "comparisons": [
            {"set": name, "first": checkpoints[0].label, "second": label, **asdict(c), "adjusted": adjusted[key]}
            for key, c in comparisons.items()
            for name, label in [key]
        ],
    }


def write_tensorboard(folder: Path, table: Table, checkpoints: List[Checkpoint], text: str) -> None:
    """Scalars a set, over the checkpoints' steps (their order, where they have none), anew at each call."""
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("report", text)
        known = all(checkpoint.step is not None for checkpoint in checkpoints)
        for order, checkpoint in enumerate(checkpoints):
            step = checkpoint.step if known else order
            for (label, name), r in table.items():
                if label == checkpoint.label:
                    for tag, value in _scalars(r).items():
                        writer.add_scalar(f"{name}/{tag}", value, step)
                    writer.add_histogram(f"{name}/scores", np.array([s for s in r.scores if s is not None]), step)


def _scalars(r: Results) -> Dict[str, float]:
    return {
        "accuracy": r.accuracy.value,
        "accuracy_low": r.accuracy.low,
        "accuracy_high": r.accuracy.high,
        **{f"pass_at_{k}": estimate.value for k, estimate in r.pass_at.items()},
        **{f"length_{name}": value for name, value in r.lengths.items()},
        "truncated": r.truncated,
        "unjudged": r.unjudged,
    }
