"""How well a step's samples are packed: useful tokens, and how even the work of the ranks is.

    python benchmarks/packing.py [--samples 1024] [--seeds 5]

Draws lengths with a long tail (log-normal around 12,000 tokens, cut at 131,072) and plans them for the layouts of
examples/ and for more ranks. Work of a sequence of n tokens: n (1 + q n), q from the model's matrix sizes, as
the trainer takes it. Columns, the worst over the seeds:

useful      tokens of the samples over tokens computed (padding and filler micro-batches are the rest)
slowest     work of the busiest rank over the mean: what a step takes where ranks only meet at its end
lockstep    the same where the ranks of an expert group wait for each other in every micro-batch
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from typing import List, Tuple

import torch

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.plan.published import PUBLISHED
from ulorl_megatron.policy.packing import PackingRules, attention_share, plan

PROMPT, MEDIAN, SIGMA, CAP = 500, 12_000, 1.0, 131_072
LONGEST = 133_120


@dataclass(frozen=True)
class Layout:
    model: str
    data: int
    context: int
    tensor: int = 1
    lockstep: int = 1

    @property
    def rules(self) -> PackingRules:
        share = attention_share(Architecture.from_hf(PUBLISHED[self.model]))
        return PackingRules(
            LONGEST, self.data, self.context, self.tensor, lockstep=self.lockstep, quadratic=share
        )


LAYOUTS = (
    Layout("qwen3-30b-a3b", data=4, context=8),
    Layout("qwen3-30b-a3b", data=8, context=4, lockstep=2),
    Layout("qwen3-30b-a3b", data=16, context=8),
    Layout("qwen3-30b-a3b", data=32, context=8),
    Layout("qwen3-8b", data=4, context=4, tensor=2),
    Layout("qwen3-8b", data=32, context=4, tensor=2),
)


def draw_samples(count: int, seed: int) -> List[TrainSample]:
    """Samples of which only the lengths are real."""
    draw = random.Random(seed)
    lengths = [min(CAP, max(1, round(draw.lognormvariate(math.log(MEDIAN), SIGMA)))) for _ in range(count)]
    none = torch.zeros(0)
    return [
        TrainSample(i, torch.empty(PROMPT + n, dtype=torch.int64, device="meta"), PROMPT, 1.0, 1.0, none, none.long())
        for i, n in enumerate(lengths)
    ]


def measure(samples: List[TrainSample], rules: PackingRules) -> Tuple[float, float, float]:
    """(useful, slowest, lockstep) of the plan for `samples`."""
    ranks = plan(samples, rules)
    tokens, work = [], []
    for rank in ranks:
        lengths = [[rules.padded(samples[i]) for i in members] or [rules.unit] for members in rank]
        tokens.append(sum(sum(bin) for bin in lengths))
        work.append([sum(rules.cost(n) for n in bin) for bin in lengths])
    mean = sum(sum(bins) for bins in work) / len(work)
    groups = [work[first : first + rules.lockstep] for first in range(0, len(work), rules.lockstep)]
    waits = [sum(max(row) for row in zip(*group, strict=True)) for group in groups]
    real = sum(s.tokens.numel() - 1 for s in samples)
    return real / sum(tokens), max(sum(bins) for bins in work) / mean, max(waits) / mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    steps = [draw_samples(args.samples, seed) for seed in range(args.seeds)]
    print("model          ranks (data x context x tensor, in lockstep)   useful   slowest   lockstep   seconds to plan")
    for layout in LAYOUTS:
        began = time.perf_counter()
        useful, slowest, lockstep = zip(*(measure(samples, layout.rules) for samples in steps), strict=True)
        seconds = (time.perf_counter() - began) / len(steps)
        where = f"{layout.data} x {layout.context} x {layout.tensor}, {layout.lockstep}"
        print(
            f"{layout.model:<15}{where:<45}{min(useful):9.4f}{max(slowest):10.4f}{max(lockstep):11.4f}{seconds:18.3f}"
        )


if __name__ == "__main__":
    main()
