"""One rank of `test_grid`: loads and saves one converted checkpoint at every layout that fits the number of
ranks.

Argument: a directory with hf/ and megatron/. Every layout must (1) load from megatron/ exactly the shards the map
says, and (2) save what exports to exactly hf/. Each has a forked process of its own, with which its gloo threads go.
"""

import json
import os
import shutil
import sys
import traceback
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from checkpoint_tools.sources import open_checkpoint
from checkpoint_tools.verify import compare
from tests.checkpoint_tools.support import to_hf
from ulorl_megatron.config.schema import ParallelConfig, PolicyConfig
from ulorl_megatron.policy import parallel
from ulorl_megatron.policy.model import build_chunks, transformer_config
from ulorl_megatron.policy.weights import load_hf


def layouts(arch, world: int) -> list[ParallelConfig]:
    grid = product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2))
    sizes = [
        ParallelConfig(tensor=tp, expert=ep, expert_tensor=etp, pipeline=pp, virtual_pipeline=vpp)
        for tp, ep, etp, pp, vpp in grid
        if pp > 1 or vpp == 1
    ]
    return [s for s in sizes if not list(parallel.faults(s, arch, world))]


def state_of(models) -> dict:
    """The models' sharded state, as a trainer saves it: a chunk a key when there are several."""
    if len(models) == 1:
        return {"model": models[0].sharded_state_dict()}
    return {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}


def fill(models, value: float) -> None:
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(value)


def check(root: Path, sizes: ParallelConfig) -> None:
    source = open_checkpoint(root / "hf")
    parallel.initialize(sizes, source.arch)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    policy = PolicyConfig(parallel=sizes)
    config = transformer_config(source.arch, policy, torch.float32)
    expected = build_chunks(config, source.arch, policy.transformer_impl)
    load_hf(expected, config, source.arch, str(root / "hf"))
    models = build_chunks(config, source.arch, policy.transformer_impl)
    fill(models, 9.0)
    loaded = dist_checkpointing.load(state_of(models), str(root / "megatron"))
    for i, model in enumerate(models):
        model.load_state_dict(loaded["model" if len(models) == 1 else f"model{i}"])
    for mine, theirs in zip(expected, models, strict=True):
        for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert torch.equal(a, b), f"{sizes}: {name} differs after loading"
    saved = root / "saved"
    if dist.get_rank() == 0:
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(state_of(expected), str(saved))
    dist.barrier()
    if dist.get_rank() == 0:
        exported = to_hf(saved, root / "exported", root / "hf", force=True)
        result = compare(open_checkpoint(exported), source)
        assert not result.differences, f"{sizes}: {result.differences[:3]}"
        print(json.dumps(asdict(sizes)), flush=True)
    dist.barrier()


def main() -> None:
    root, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    for number, sizes in enumerate(layouts(open_checkpoint(root / "hf").arch, world)):
        child = os.fork()
        if child == 0:
            try:
                meet = f"file://{root}/rendezvous-{number}"
                dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
                check(root, sizes)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{sizes} failed")


if __name__ == "__main__":
    main()
