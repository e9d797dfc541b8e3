"""One rank of a launch: computes every case of its world size, and resumes across layouts.

python -m tests.parallel.policy_worker MODELS OUTPUT
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List

import torch
from megatron.core import parallel_state as mpu

from tests.parallel.layouts import CASES, RESUMED, compute, samples
from tests.policy.support import objective, policy_config
from ulorl_megatron.config.schema import ParallelConfig
from ulorl_megatron.launch.ranks import Ranks
from ulorl_megatron.policy import Policy


def resume(models: Path, run_dir: Path, model: str, *layouts: Dict[str, int]) -> List[Dict[str, Any]]:
    """Stats of the update after a save in the first layout, and of the same update resumed in the second."""
    stats = []
    for sizes in layouts:
        mpu.destroy_model_parallel()
        policy = Policy(policy_config(models / model, run_dir, ParallelConfig(**sizes)))
        if policy.load_latest() is None:
            policy.update(samples(), objective())
            policy.save(1)
        stats.append(asdict(policy.update(samples(), objective())))
    return stats


def main() -> None:
    models, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with Ranks() as ranks:
        results = {}
        for case in CASES[ranks.world_size]:
            mpu.destroy_model_parallel()
            results[case.name] = compute(models, output / "run", case)
        if ranks.world_size == 2:
            results["resumed"] = [resume(models, output / f"run-{i}", *case) for i, case in enumerate(RESUMED)]
        torch.save(results, output / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main()
