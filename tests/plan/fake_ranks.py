"""Every rank of every layout of `CASES`, one after the other in this process: what the real model holds there.

python -m tests.plan.fake_ranks MODELS OUTPUT.json

torch's fake process group answers for the ranks that do not exist. Models of published shape, of a few layers, are
built on the meta device; for the small ones of `TRAINED` the whole trainer is, with its buffers and optimizer.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint_tools.architecture import Architecture
from tests.plan.support import step_config
from ulorl_megatron.config.schema import Dtype, ParallelConfig, PolicyConfig, Recompute, TransformerImpl
from ulorl_megatron.plan.published import PUBLISHED
from ulorl_megatron.policy import Policy, model, parallel


@dataclass(frozen=True)
class Case:
    """A published shape, or a model of `MODELS`, on `world` ranks. changed: fields of its config.json."""

    name: str
    world: int
    sizes: ParallelConfig
    changed: Dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 4})

    def architecture(self) -> Architecture:
        return Architecture.from_hf(PUBLISHED[self.name], self.changed)


CASES = [
    Case("qwen3-4b", 2, ParallelConfig(tensor=2)),  # tied embeddings
    Case("qwen3-4b", 4, ParallelConfig(tensor=2, pipeline=2)),
    Case("qwen3-4b", 4, ParallelConfig(pipeline=2, virtual_pipeline=2, context=2)),
    Case("qwen3-8b", 8, ParallelConfig(tensor=4, pipeline=2)),
    Case("qwen3-8b", 2, ParallelConfig(tensor=2), {"num_hidden_layers": 1, "vocab_size": 151935}),  # words padded
    Case("qwen3-30b-a3b", 4, ParallelConfig(context=4, expert=4), {"num_hidden_layers": 2}),
    Case("qwen3-30b-a3b", 8, ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, expert=4)),
    Case("qwen3-30b-a3b", 8, ParallelConfig(tensor=4, expert=4, expert_tensor=2), {"num_hidden_layers": 2}),
]

TRAINED = [
    Case("dense", 8, ParallelConfig(tensor=2)),
    Case("moe", 8, ParallelConfig(tensor=2, pipeline=2, expert=2)),
    Case("even", 4, ParallelConfig(context=2, expert=2)),
]


def held(case: Case) -> Dict[str, int]:
    """Elements of this rank's model, the experts' apart."""
    arch = case.architecture()
    policy = PolicyConfig(transformer_impl=TransformerImpl.local, parallel=case.sizes)
    parallel.initialize(case.sizes, arch)
    with torch.device("meta"):
        chunks = model.build_chunks(
            model.transformer_config(arch, policy, torch.bfloat16), arch, policy.transformer_impl
        )
    parameters = [(name, p) for chunk in chunks for name, p in chunk.named_parameters()]
    assert all(p.is_meta for _, p in parameters)
    experts = sum(p.numel() for name, p in parameters if ".experts." in name)
    return {"dense": sum(p.numel() for _, p in parameters) - experts, "experts": experts}


def trained(models: Path, case: Case, dtype: Dtype) -> Dict[str, int]:
    """Bytes of this rank's weights, gradient buffers and optimizer state."""
    config = step_config(models / case.name, models / "run", 64, dtype, Recompute.none, case.sizes)
    policy = Policy(config)
    buffers = [b for chunk in policy._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    state = 0
    for part in policy._optimizer.chained_optimizers:
        optimizer = part.optimizer
        state += sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
        if dtype is Dtype.bfloat16:
            state += sum(p.nbytes for group in optimizer.param_groups for p in group["params"])  # the masters
    return {
        "parameters": sum(p.nbytes for chunk in policy._chunks for p in chunk.parameters()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": state,
    }


def fake_groups_alone() -> None:
    """Have Megatron make its gloo groups, too, of the ranks that do not exist."""
    megatrons = mpu.torch.distributed
    new_group = megatrons.new_group

    def new_fake_group(*args, backend=None, **kwargs):
        return new_group(*args, **kwargs)

    megatrons.new_group = new_fake_group


def on_every_rank(case: Case, compute, *args) -> List[Dict[str, int]]:
    results = []
    for rank in range(case.world):
        dist.init_process_group("fake", rank=rank, world_size=case.world, store=FakeStore())
        try:
            results.append(compute(*args))
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
    return results


def main() -> None:
    models, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    fake_groups_alone()
    whole = [
        {"ranks": on_every_rank(case, trained, models, case, dtype), "dtype": dtype.value}
        for case in TRAINED
        for dtype in Dtype
    ]
    model.device = lambda: torch.device("meta")  # where this process's models live from here on
    parts = [on_every_rank(case, held, case) for case in CASES]
    output.write_text(json.dumps({"held": parts, "trained": whole}))


if __name__ == "__main__":
    main()
