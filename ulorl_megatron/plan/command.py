"""`ulorl plan`: arguments, and what it does with them."""

import argparse
import json
from dataclasses import replace
from math import ceil, lcm

from ulorl_megatron.config import load
from ulorl_megatron.config.fit import check_fit
from ulorl_megatron.config.schema import Config, ParallelConfig, TransformerImpl
from ulorl_megatron.errors import UserError
from ulorl_megatron.plan.cards import GPUS_PER_NODE, NAMES, card
from ulorl_megatron.plan.layout import of_config
from ulorl_megatron.plan.memory import memory
from ulorl_megatron.plan.published import planned_architecture
from ulorl_megatron.plan.search import search
from ulorl_megatron.plan.throughput import throughput
from ulorl_megatron.simulate import options as rollout_options

DESCRIPTION = (
    "Says for the configured layout what every rank needs at the longest sample and what the trainer should yield, by "
    "arithmetic alone: no GPU, no weights. Exit code 0 if it fits, 1 if it does not, 2 if the configuration is faulty. "
    "With --slurm: how to split nodes between trainers and servers, and the sbatch line for it. With --rollout: what "
    "the number of segments does to step time, idle servers and staleness."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulorl plan`, besides the configuration and its overrides."""
    parser.add_argument("--gpu", choices=NAMES, default="h100-80", help="the card (default: %(default)s)")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="ranks of the trainer; default: run.processes, or as many more as the layout needs",
    )
    parser.add_argument("--model", metavar="NAME", help="plan for this published model instead of model.path")
    parser.add_argument("--search", action="store_true", help="try every layout for the ranks, and show the best")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts --search shows (default: 10)")
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.5,
        metavar="X",
        help="tokens of the fullest expert-parallel rank over the mean (default: %(default)s)",
    )
    parser.add_argument("--slurm", type=int, metavar="NODES", help="split so many nodes between trainers and servers")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    title = "with --rollout or --slurm"
    group = parser.add_argument_group(title, "simulates the real scheduler; times in seconds, tokens real")
    rollout_options.add_arguments(group)


def run(arguments: argparse.Namespace) -> int:
    """0 if it fits, 1 if it does not. Raises UserError for what cannot be planned."""
    config = load(arguments.config, arguments.overrides)
    if arguments.rollout:
        from ulorl_megatron.simulate import report as rollout_report

        return rollout_report.run(config, arguments)
    from ulorl_megatron.plan import report  # brings torch, which the other commands' help need not wait for

    arch, source = planned_architecture(config.model, arguments.model)
    if arguments.imbalance < 1:
        raise UserError(f"--imbalance: {arguments.imbalance} is below 1, which is perfect balance")
    if arguments.gpus is not None and arguments.gpus < 1:
        raise UserError(f"--gpus: {arguments.gpus} is below 1")
    if arguments.slurm is not None:
        from ulorl_megatron.plan import slurm

        return slurm.run(config, arch, card(arguments.gpu, GPUS_PER_NODE), arguments)
    world = arguments.gpus or _ranks(config)
    if arguments.search:
        config.policy = replace(config.policy, parallel=ParallelConfig())  # the search has its own
    check_fit(config, world, arch)
    kind = card(arguments.gpu, world)
    if not kind.cuda and config.policy.transformer_impl is TransformerImpl.te:
        raise UserError("policy.transformer_impl: te runs on a GPU only; plan for one, or set local")
    layout = of_config(config, arch, world, arguments.imbalance, kind.cuda)
    if arguments.search:
        found = search(config, arch, world, kind, arguments.imbalance)
        if arguments.json:
            print(json.dumps(report.search_data(found, kind), indent=1))
        else:
            print(report.search_text(found, layout, kind, source, arguments.top), end="")
        return 0 if found else 1
    stages = memory(layout)
    speed = throughput(layout, kind.rates) if kind.rates else None
    if arguments.json:
        print(json.dumps(report.plan_data(layout, kind, stages, speed), indent=1))
    else:
        print(report.plan_text(layout, kind, stages, speed, source), end="")
    return 0 if max(rank.total for rank in stages) <= kind.memory else 1


def _ranks(config: Config) -> int:
    """The fewest ranks the layout divides that are not below run.processes."""
    p = config.policy.parallel
    needed = lcm(p.tensor * p.pipeline * p.context, p.expert * p.expert_tensor * p.pipeline)
    return ceil(config.run.processes / needed) * needed
