"""What `ulorl plan --rollout` does: step time, staleness and idle servers for several segment counts."""

import argparse
from dataclasses import replace
from typing import List

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ulorl_megatron.config.schema import Config, RolloutConfig, Stop
from ulorl_megatron.errors import UserError
from ulorl_megatron.simulate.lengths import Lengths, LogNormal, Observed
from ulorl_megatron.simulate.options import PROMPT_TOKENS
from ulorl_megatron.simulate.server import ServerModel
from ulorl_megatron.simulate.simulation import Outcome, Workload, choose, simulate

GRAIN = 512  # real tokens in a simulated one, where the segments are long enough


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Prints the comparison and what it would choose. Raises UserError for what cannot be simulated."""
    server = server_of(arguments)
    work = Workload(lengths_of(arguments), PROMPT_TOKENS, arguments.train_tokens_per_s, arguments.fixed_s)
    outcomes = []
    for segments in _counts(arguments.segments):
        if config.rollout.global_max_length % segments:
            raise UserError(f"--segments: {segments} does not divide {config.rollout.global_max_length} tokens")
        counted = replace(config, rollout=replace(config.rollout, segment_count=segments))
        outcomes.append(simulate(counted, arguments.servers, server, work, arguments.steps, grain(counted)))
    _print(outcomes, choose(outcomes, arguments.max_age), f"{arguments.servers} servers, {_rule(config.rollout)}")
    return 0


def lengths_of(arguments: argparse.Namespace) -> Lengths:
    """The law of the response lengths that the options name."""
    return Observed.read(arguments.lengths) if arguments.lengths else LogNormal(arguments.median, arguments.sigma)


def server_of(arguments: argparse.Namespace) -> ServerModel:
    """The server that the options describe."""
    return ServerModel(
        arguments.step_s,
        arguments.sequence_s,
        arguments.context_s,
        arguments.prefill_tokens_per_s,
        int(arguments.kv_tokens),
        update_s=arguments.update_s,
    )


def grain(config: Config) -> int:
    """Real tokens that one simulated token stands for: the largest power of two that keeps 32 in a segment."""
    segment, size = config.rollout.global_max_length // config.rollout.segment_count, 1
    while size < GRAIN and segment % (2 * size) == 0 and segment // (2 * size) >= 32:
        size *= 2
    return size


def _counts(text: str) -> List[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--segments: {text!r} is not a list of numbers like 1,2,4,8")
    return counts


def _rule(rollout: RolloutConfig) -> str:
    stop = f"stop {rollout.stop.value}"
    if rollout.stop is Stop.enough:
        stop += f" ({rollout.enough_samples} samples)"
    return stop + (", overlap" if rollout.overlap else "")


def _print(outcomes: List[Outcome], best: Outcome, setting: str) -> None:
    table = Table(title=f"a step on {setting}, simulated", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("segments", "step s", "rollout", "train", "samples", "s each", "idle", "age", "prefill"):
        table.add_column(column, justify="right")
    for o in outcomes:
        table.add_row(
            f"{o.segments}",
            f"{o.step_s:.0f}",
            f"{o.rollout_s:.0f}",
            f"{o.train_s:.0f}",
            f"{o.samples:.0f}",
            f"{o.sample_s:.2f}",
            f"{o.idle:.0%}",
            f"{o.age:.2f}",
            f"{o.prefilled_share:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"least time a completed sample: rollout.segment_count {best.segments}. idle: share of the step in which a "
        "server has no request. age: weight versions between a token and the step that completes its sample. "
        "prefill: input tokens computed again over tokens decoded."
    )
