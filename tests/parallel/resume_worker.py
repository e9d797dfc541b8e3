"""One rank of a launch: resumes what other numbers of ranks saved, and saves for others.

python -m tests.parallel.resume_worker MODELS RUNS OUTPUT
"""

import sys
from pathlib import Path

import torch

from tests.parallel.resumes import OVERLAPS, RESUMES, fail_to_write, overlap, save, take_up
from ulorl_megatron.launch.ranks import Ranks


def main() -> None:
    models, runs, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with Ranks() as ranks:
        results = {r.name: take_up(models, runs, r) for r in RESUMES if r.readers == ranks.world_size}
        saves = {r.source: r for r in RESUMES if r.writers == ranks.world_size}
        results |= {source: save(models, runs, r) for source, r in saves.items()}
        if ranks.world_size == 2:
            results |= {f"overlap-{case.name}": overlap(models, runs, case) for case in OVERLAPS}
            results["failing"] = fail_to_write(models, runs)
        torch.save(results, output / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main()
