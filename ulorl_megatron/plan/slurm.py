"""`ulorl plan --slurm N`: how many of N nodes should train and how many decode, and the command that starts it so.

The trainer's speed is the planner's (every sample as long as can be), the rollout is simulated, with a server a node.
"""

import argparse
import shlex
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.fit import faults
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.plan.cards import GIB, GPUS_PER_NODE, Card
from ulorl_megatron.plan.layout import of_config
from ulorl_megatron.plan.memory import memory
from ulorl_megatron.plan.throughput import throughput
from ulorl_megatron.simulate.options import PROMPT_TOKENS
from ulorl_megatron.simulate.report import grain, lengths_of, server_of
from ulorl_megatron.simulate.simulation import Outcome, Workload, simulate

_STEPS = 3  # simulated, after those that fill the pools; a split is not decided by more


@dataclass(frozen=True)
class Trainers:
    """nodes: that train. total: bytes of the fullest rank. per_second: tokens trained."""

    nodes: int
    total: int
    per_second: float


def run(config: Config, arch: Architecture, card: Card, arguments: argparse.Namespace) -> int:
    """Prints the splits that were looked at and the best. Raises UserError if no split can work."""
    nodes = arguments.slurm
    if nodes < 2 or card.rates is None:
        raise UserError("--slurm: splits 2 or more nodes of 8 GPUs between trainers and servers")
    choices = [trainers(config, arch, count, card, arguments.imbalance) for count in range(1, nodes)]
    possible = [choice for choice in choices if choice is not None]
    if not possible:
        raise UserError(
            f"--slurm: on {nodes} nodes the configured layout fits no number of trainer nodes below {nodes}: "
            f"{_why(config, arch, nodes - 1)}"
        )
    server, lengths = server_of(arguments), lengths_of(arguments)

    def outcome(choice: Trainers) -> Outcome:
        work = Workload(lengths, PROMPT_TOKENS, choice.per_second, arguments.fixed_s)
        return simulate(config, nodes - choice.nodes, server, work, _STEPS, grain(config))

    looked_at = least(possible, outcome)
    _print(looked_at, nodes, card, arguments)
    return 0


def trainers(config: Config, arch: Architecture, nodes: int, card: Card, imbalance: float) -> Optional[Trainers]:
    """None if the layout does not divide the ranks of so many nodes, or its longest sample does not fit the card."""
    world = nodes * GPUS_PER_NODE
    if faults(config, world, arch):
        return None
    layout = of_config(config, arch, world, imbalance, card.cuda)
    total = max(rank.total for rank in memory(layout))
    return Trainers(nodes, total, throughput(layout, card.rates).per_second) if total <= card.memory else None


def least(possible: Sequence[Trainers], outcome: Callable[[Trainers], Outcome]) -> Dict[Trainers, Outcome]:
    """Outcomes of the splits looked at, the one with the least time a sample among them.

    More trainers shorten the update and lengthen the rollout, so the time has one valley: its walls are narrowed.
    """
    found: Dict[Trainers, Outcome] = {}

    def time_of(index: int) -> float:
        choice = possible[index]
        if choice not in found:
            found[choice] = outcome(choice)
        return found[choice].sample_s

    low, high = 0, len(possible) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if time_of(left) <= time_of(right):
            high = right
        else:
            low = left
    for index in range(low, high + 1):
        time_of(index)
    return found


def _why(config: Config, arch: Architecture, nodes: int) -> str:
    problems = faults(config, nodes * GPUS_PER_NODE, arch)
    return problems[0] if problems else "the longest sample needs more memory; see `ulorl plan` without --slurm"


def _print(looked_at: Dict[Trainers, Outcome], nodes: int, card: Card, arguments: argparse.Namespace) -> None:
    table = Table(title=f"{nodes} nodes of {GPUS_PER_NODE} x {card.name}", box=SIMPLE_HEAD, title_justify="left")
    for column in ("train", "serve", "step s", "rollout", "update", "samples", "s each", "idle", "GiB"):
        table.add_column(column, justify="right")
    for choice in sorted(looked_at, key=lambda t: t.nodes):
        o = looked_at[choice]
        numbers = (f"{o.step_s:.0f}", f"{o.rollout_s:.0f}", f"{o.train_s:.0f}", f"{o.samples:.0f}", f"{o.sample_s:.2f}")
        split = (f"{choice.nodes}", f"{nodes - choice.nodes}")
        table.add_row(*split, *numbers, f"{o.idle:.0%}", f"{choice.total / GIB:.1f}")
    console = Console(soft_wrap=True)
    console.print(table)
    best = min(looked_at, key=lambda t: looked_at[t].sample_s)
    console.print(f"least time a sample: {best.nodes} nodes train, {nodes - best.nodes} serve\n")
    for line in commands(best.nodes, nodes, [arguments.config, *arguments.overrides]):
        console.print(f"  {line}", highlight=False, markup=False)
    console.print(
        "\nidle: share of the step in which a server has no request. GiB: of the fullest rank. Assumed: a server is a "
        f"node ({GPUS_PER_NODE} GPUs, tensor parallel), as fast as --step-s and so on say; the update at the speed of "
        "the longest samples, as in `ulorl plan`; lengths by --lengths, or --median and --sigma"
    )


def commands(training: int, nodes: int, run: Sequence[str]) -> List[str]:
    """The sbatch lines of this split, with het jobs and without."""
    settings = shlex.join([*run, f"servers.extra_args=[--tp-size,{GPUS_PER_NODE}]"])
    serving = nodes - training
    return [
        f"sbatch --nodes={training} : --nodes={serving} slurm/train_het.sbatch {settings}",
        f"ROLLOUT_NODES={serving} sbatch --nodes={nodes} slurm/train.sbatch {settings}   # without het jobs",
    ]
