"""What people see of a run: a line a step on the terminal, the same in TensorBoard and metrics.jsonl, a summary."""

import json
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from checkpoint_tools.publish import write_atomically
from ulorl_megatron.algorithm.staleness import AGES
from ulorl_megatron.config import Config
from ulorl_megatron.config.schema import DmmptMode, Importance
from ulorl_megatron.monitor.dashboard import layout
from ulorl_megatron.monitor.exhibits import Exhibits
from ulorl_megatron.monitor.metrics import is_declared
from ulorl_megatron.monitor.run_directory import last_checkpoint, open_run_directory
from ulorl_megatron.monitor.summary import summary

Record = Dict[str, float]

_MOSTLY_TRUNCATED = 0.9


class Monitor:
    """The watching side of one run, on rank 0. Opening it creates or checks the run directory.

    Raises UserError if the directory holds another run.
    """

    def __init__(self, config: Config):
        self._folder = open_run_directory(config)
        self._total_steps = config.run.total_steps
        self._file = self._folder / "metrics.jsonl"
        self._writer: Optional[SummaryWriter] = None
        self._accuracy: Record = {}  # of the last evaluation
        self._pois = config.algorithm.importance is Importance.pois
        self._sigma = config.dmmpt.sigma if config.dmmpt.mode is DmmptMode.dynamic else None
        self._kl_warning = config.algorithm.pois_kl_warning

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *exception) -> None:
        if self._writer is not None:
            self._writer.close()

    def resume(self, done: int) -> None:
        """What was logged after step `done` is dropped: those steps will be run again. done: 0 is a fresh start."""
        records = [record for record in read_records(self._file) if record["step"] <= done] if done else []
        write_atomically(self._file, "".join(json.dumps(record) + "\n" for record in records).encode())
        self._accuracy = next((r for r in reversed(records) if "eval/accuracy" in r), {})
        self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=done + 1 if done else 0)
        self._writer.add_custom_scalars(layout())
        if done:
            print(f"resuming {self._folder} after step {done}", flush=True)

    def step(self, step: int, metrics: Record) -> None:
        """Logs one step and prints its line. metrics: names of METRICS; KeyError for any other."""
        if self._sigma is not None and "train/entropy" in metrics:
            metrics = metrics | {"train/sigma": self._sigma}  # beside the entropy, in one chart
        self._log(step, metrics)
        print(progress_line(step, self._total_steps, self._accuracy | metrics), flush=True)
        kl, age = max((metrics.get(f"age-{age}/kl", 0.0), age) for age in AGES)
        if self._pois and kl > self._kl_warning:
            print(
                f"warning: POIS takes old segments for new, but the policy is {kl:.3f} nats a token from the one of "
                f"age-{age} (algorithm.pois_kl_warning); a smaller learning rate, fewer segments or "
                "algorithm.importance sais would be safer",
                flush=True,
            )
        if metrics.get("servers/missing", 0):
            print(
                f"warning: {metrics['servers/missing']:.0f} of the servers get no work; logs/trainer-0.log says why",
                flush=True,
            )
        if metrics.get("rollout/truncated_share", 0.0) > _MOSTLY_TRUNCATED:
            print(
                f"warning: {metrics['rollout/truncated_share']:.0%} of the samples completed in step {step} were cut "
                "at rollout.global_max_length; their reward of 0 says nothing of the answer (trl#5697)",
                flush=True,
            )

    def exhibits(self, step: int, exhibits: Exhibits) -> None:
        """Shows in TensorBoard what is no number: histograms, and samples as text."""
        if exhibits.lengths:
            self._writer.add_histogram("samples/length", np.array(exhibits.lengths), step)
            ages, tokens = (np.array(column) for column in zip(*sorted(exhibits.ages.items()), strict=True))
            self._writer.add_histogram_raw(
                "samples/token_age",
                min=ages.min(),
                max=ages.max(),
                num=tokens.sum(),
                sum=(ages * tokens).sum(),
                sum_squares=(ages**2 * tokens).sum(),
                bucket_limits=(ages + 0.5).tolist(),
                bucket_counts=tokens.tolist(),
                global_step=step,
            )
        for number, text in enumerate(exhibits.texts):
            self._writer.add_text(f"samples/{number}", text, step)

    def evaluation(self, step: int, metrics: Record) -> None:
        """Logs an evaluation of the weights after `step`; later progress lines repeat its accuracy."""
        self._log(step, metrics)
        self._accuracy = metrics
        print(
            f"step {step:>4}/{self._total_steps}  held-out accuracy {metrics['eval/accuracy']:.3f}  "
            f"(length {metrics['eval/mean_length']:.0f}, truncated {metrics['eval/truncated']:.1%})",
            flush=True,
        )

    def summary(self) -> None:
        """Prints what the whole run did, earlier parts of a resumed one included."""
        print(summary(read_records(self._file), self._folder), flush=True)

    def _log(self, step: int, metrics: Record) -> None:
        for name, value in metrics.items():
            if not is_declared(name):
                raise KeyError(f"metric {name!r} is not declared in monitor/metrics.py")
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def finished(config: Config) -> bool:
    """Whether config.run.dir holds this run with all its steps; if so, prints its summary.

    Raises UserError if it holds another one.
    """
    done = last_checkpoint(Path(config.run.dir))
    if done is None or done < config.run.total_steps:
        return False
    folder = open_run_directory(config)
    print(f"{folder} is done: {done} of {config.run.total_steps} steps (run.total_steps)", flush=True)
    print(summary(read_records(folder / "metrics.jsonl"), folder), flush=True)
    return True


def read_records(file: Path) -> List[Record]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def progress_line(step: int, total_steps: int, metrics: Record) -> str:
    """One line for people; what the step has no value for is left out."""
    parts = [f"step {step:>4}/{total_steps}"]
    shown = [
        ("reward", "reward/complete", "{:.3f}"),
        ("accuracy", "eval/accuracy", "{:.3f}"),
        ("entropy", "train/entropy", "{:.3f}"),
        ("masked", "train/masked_share", "{:.1%}"),
        ("trained", "train/samples", "{:.0f}"),
        ("length", "rollout/length_mean", "{:.0f}"),
        ("max", "rollout/length_max", "{:.0f}"),
        ("unfinished", "pools/unfinished", "{:.0f}"),
        ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
        ("idle", "servers/idle_share", "{:.0%}"),
        ("|dlogp|", "train/mismatch_mean", "{:.1e}"),
    ]
    parts += [f"{label} {form.format(metrics[name])}" for label, name, form in shown if name in metrics]
    times = [f"{name} {metrics[f'time/{name}']:.1f}s" for name in ("rollout", "verify", "train", "sync")]
    return "  ".join(parts) + "  | " + " ".join(times)
