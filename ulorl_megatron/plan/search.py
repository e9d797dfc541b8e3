"""All layouts of a model on a number of ranks, those that fit first, the fastest first."""

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Iterator, List, Optional, Tuple

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config import layout as possible
from ulorl_megatron.config.schema import Config, ParallelConfig, Recompute
from ulorl_megatron.plan.cards import Card
from ulorl_megatron.plan.layout import Layout, of_config
from ulorl_megatron.plan.memory import memory
from ulorl_megatron.plan.throughput import Throughput, throughput


@dataclass(frozen=True)
class Candidate:
    """A layout with what it needs and yields. overrides: the settings that make the configuration this layout."""

    layout: Layout
    overrides: Tuple[str, ...]
    total: int
    speed: Optional[Throughput]

    @property
    def per_second(self) -> float:
        """Expected tokens; 0 where nothing is expected."""
        return self.speed.per_second if self.speed else 0.0


def search(config: Config, arch: Architecture, world: int, card: Card, imbalance: float) -> List[Candidate]:
    """Every layout that fits `card`, the fastest first (on a CPU the smallest).

    Tried are all sizes of policy.parallel that divide `world` and the model, and all ways of recomputation, each with
    policy.max_tokens_per_rank as small as the longest sample allows.
    """
    found = []
    for sizes, recompute in product(_sizes(arch, world), Recompute):
        longest = config.data.max_prompt_length + config.rollout.global_max_length - 1
        budget = ceil(longest / (2 * sizes.context * sizes.tensor)) * 2 * sizes.tensor
        policy = replace(config.policy, parallel=sizes, recompute=recompute, max_tokens_per_rank=budget)
        layout = of_config(replace(config, policy=policy), arch, world, imbalance, card.cuda)
        total = max(rank.total for rank in memory(layout))
        if total <= card.memory:
            speed = throughput(layout, card.rates) if card.rates else None
            found.append(Candidate(layout, _overrides(sizes, recompute, budget), total, speed))
    return sorted(found, key=lambda c: (-c.per_second, c.total))


def best(found: List[Candidate]) -> Candidate:
    """The one that needs the least memory of those within 5 % of the fastest: no expectation here is finer."""
    return min((c for c in found if c.per_second >= 0.95 * found[0].per_second), key=lambda c: c.total)


def _sizes(arch: Architecture, world: int) -> Iterator[ParallelConfig]:
    """All layouts that can work, with up to four model chunks a pipeline rank."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    experts = divisors if arch.is_moe else [1]
    for tensor, pipeline, context, expert, expert_tensor in product(divisors, divisors, divisors, experts, experts):
        if tensor * pipeline * context > world or expert * expert_tensor * pipeline > world:
            continue
        for virtual in (1, 2, 4) if pipeline > 1 else (1,):
            sizes = ParallelConfig(tensor, pipeline, virtual, context, expert, expert_tensor)
            if not any(possible.faults(sizes, arch, world)):
                yield sizes


def _overrides(sizes: ParallelConfig, recompute: Recompute, budget: int) -> Tuple[str, ...]:
    return (
        *(f"policy.parallel.{name}={size}" for name, size in vars(sizes).items()),
        f"policy.recompute={recompute.value}",
        f"policy.max_tokens_per_rank={budget}",
    )
