"""One of two ranks: the peak of an update in every layout of `CASES`.

python -m tests.plan.two_ranks MODELS OUTPUT
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu

from tests.plan.support import alive, run_update, step_config
from ulorl_megatron.config.schema import Dtype, ParallelConfig, Recompute
from ulorl_megatron.launch.ranks import Ranks

DTYPE, TOKENS = Dtype.float32, 512


@dataclass(frozen=True)
class Case:
    """A model of `MODELS` in one layout, with `samples` micro-batches a data-parallel rank."""

    name: str
    model: str
    sizes: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: Recompute = Recompute.none
    samples: int = 1


CASES = [
    Case("tensor", "dense", ParallelConfig(tensor=2)),
    Case("tensor, recomputed", "moe", ParallelConfig(tensor=2), Recompute.full),
    Case("context", "dense", ParallelConfig(context=2)),
    Case("context, recomputed", "moe", ParallelConfig(context=2), Recompute.selective),
    Case("expert", "even", ParallelConfig(expert=2), samples=2),
    Case("expert, recomputed", "even", ParallelConfig(expert=2), Recompute.full, samples=2),
    Case("pipeline", "dense", ParallelConfig(pipeline=2), samples=4),
    Case("interleaved", "moe", ParallelConfig(pipeline=2, virtual_pipeline=2), samples=4),
]


def main() -> None:
    models, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with Ranks() as ranks:
        peaks = {}
        for case in CASES:
            mpu.destroy_model_parallel()
            config = step_config(models / case.model, output / "run", TOKENS, DTYPE, case.recompute, case.sizes)
            peaks[case.name] = run_update(config, case.samples, alive)
        (output / f"{ranks.rank}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
