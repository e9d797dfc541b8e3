"""Which layouts save and which go on from there, what is computed on either side, and what must make no difference."""

import errno
import functools
import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from tests.parallel.layouts import Case, samples
from tests.policy.support import hf_weights, objective, policy_config
from ulorl_megatron.config.schema import Config, Dtype, OverlapConfig, ParallelConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy import Policy


@dataclass(frozen=True)
class Resume:
    """Saved by `writers` ranks in the layout of `saved`, taken up by `readers` ranks in the layout `sizes`."""

    writers: int
    saved: Case
    readers: int
    sizes: Dict[str, int]
    dtype: Dtype = Dtype.float32

    @property
    def source(self) -> str:
        return f"{self.writers}-{self.saved.name}-{self.dtype.value}"

    @property
    def name(self) -> str:
        return "-".join([self.source, "to", str(self.readers), *(f"{key}{size}" for key, size in self.sizes.items())])


# In the order of the launches: 1 writes, 2 reads and writes, 4 reads and writes, 1 reads.
RESUMES = [
    Resume(1, Case("moe", {}), 2, dict(tensor=2, expert=2)),  # experts get an optimizer part of their own
    Resume(1, Case("moe", {}), 2, dict(pipeline=2)),
    Resume(2, Case("moe", dict(expert=2)), 4, dict(tensor=2, context=2, expert=4)),
    Resume(2, Case("moe", dict(expert=2)), 1, {}),
    Resume(2, Case("deep", dict(pipeline=2, virtual_pipeline=2)), 4, dict(pipeline=2, expert=2)),
    Resume(2, Case("odd", dict(tensor=2)), 1, {}),  # without the vocabulary's padding
    Resume(2, Case("moe", dict(tensor=2, expert=2)), 1, {}, Dtype.bfloat16),
    Resume(4, Case("moe", dict(pipeline=2, tensor=2, expert=2)), 1, {}),
    Resume(4, Case("tied", dict(pipeline=2, context=2)), 1, {}),
]  # fmt: skip

OVERLAPS = [
    Case("moe", dict(expert=2)),
    Case("deep", dict(pipeline=2, virtual_pipeline=2)),
]


def save(models: Path, runs: Path, resume: Resume) -> Dict[str, Any]:
    """Of this rank: `weights` it exports at the save, `stats` of the two updates after it, made while it is written.

    `fresh`, `unmoved`: weights before and after a first update, which has learning rate 0.
    """
    config = _config(models, runs, resume, resume.saved.sizes)
    config.checkpoint.asynchronous = True
    policy = _policy(config)
    fresh = hf_weights(policy)
    unmoved = _at_rate_zero(policy, config)
    policy.update(samples(), objective())
    policy.save(1)
    weights, stats = hf_weights(policy), _stats(policy)
    policy.settle_checkpoint(wait=True)
    return {"fresh": fresh, "unmoved": unmoved, "weights": weights, "stats": stats}


def take_up(models: Path, runs: Path, resume: Resume) -> Dict[str, Any]:
    """The same of a rank that resumes; `weights` once as loaded and once after an update with learning rate 0."""
    config = _config(models, runs, resume, resume.sizes)
    policy = _policy(config)
    policy.load_latest()
    loaded = hf_weights(policy)
    unmoved = _at_rate_zero(policy, config)
    policy.load_latest()
    return {"weights": loaded, "unmoved": unmoved, "stats": _stats(policy)}


def fail_to_write(models: Path, runs: Path) -> Dict[str, Any]:
    """Of this rank: the error of a save that rank 1 alone cannot write, and the newest checkpoint after it."""
    policy = _policy(policy_config(models / "moe", runs / "failing", ParallelConfig(expert=2)))
    policy.save(1)
    if dist.get_rank() == 1:
        filesystem_async._write_item = _no_space
    try:
        policy.save(2)
        message = "none"
    except UserError as error:
        message = str(error)
    return {"message": message, "latest": policy.load_latest()}


def overlap(models: Path, runs: Path, case: Case) -> bool:
    """Whether overlapping communication and moments in host memory change a bit of what this rank computes."""
    results = []
    for on in (False, True):
        config = policy_config(models / case.model, runs / "overlap", ParallelConfig(**case.sizes))
        config.policy.overlap = OverlapConfig(grad_reduce=on, param_gather=on)
        config.policy.optimizer.offload = on
        policy = _policy(config) if not on else Policy(config)
        stats = [policy.update(part, objective()) for part in (samples(), samples()[:1], samples())]
        weights = hf_weights(policy)
        results.append((stats, policy.update(samples(), objective()), policy.score(samples()), weights))
    before, after = results
    same_scores = all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(before[2], after[2], strict=True))
    same_weights = all(torch.equal(before[3][name], weight) for name, weight in after[3].items())
    return before[:2] == after[:2] and same_scores and same_weights


def _config(models: Path, runs: Path, resume: Resume, sizes: Dict[str, int]) -> Config:
    config = policy_config(models / resume.saved.model, runs / resume.source, ParallelConfig(**sizes))
    config.model.dtype = resume.dtype
    config.policy.optimizer.weight_decay = 0.1
    config.policy.optimizer.eps = 1e-3  # Adam's own division by rounding noise is not what is compared
    return config


def _policy(config: Config) -> Policy:
    gc.collect()
    mpu.destroy_model_parallel()
    return Policy(config)


def _at_rate_zero(policy: Policy, config: Config) -> Dict[str, Tensor]:
    """The weights after an update with learning rate 0."""
    rate, config.policy.optimizer.lr = config.policy.optimizer.lr, 0.0
    policy.update(samples(), objective())
    config.policy.optimizer.lr = rate
    return hf_weights(policy)


@functools.wraps(filesystem_async._write_item)
def _no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def _stats(policy: Policy) -> List[Dict[str, Any]]:
    return [asdict(policy.update(samples(), objective())) for _ in range(2)]
