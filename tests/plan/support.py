"""Small models, what memory one training step of each takes on a CPU, and what is planned for it."""

import gc
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.policy.support import objective, policy_config
from tests.tiny_models import tiny_model
from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.config.positions import architecture
from ulorl_megatron.config.schema import Config, Dtype, ParallelConfig, Recompute
from ulorl_megatron.plan.layout import of_config
from ulorl_megatron.plan.memory import RankMemory, memory
from ulorl_megatron.policy import Policy

# Unlike each other in what dominates: MLP, attention without grouped queries, experts, vocabulary. In the last every
# token goes to every expert, so that no rank gets more than another.
MODELS: Dict[str, Dict] = {
    "dense": dict(kind="dense", hidden_size=128, intermediate_size=320, num_attention_heads=8, num_key_value_heads=2),
    "heads": dict(kind="dense", hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8),
    "moe": dict(kind="moe", hidden_size=128, moe_intermediate_size=48, num_experts_per_tok=3),
    "even": dict(
        kind="moe", hidden_size=64, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=4, vocab_size=2048
    ),
}
_COMMON = dict(num_hidden_layers=4, head_dim=24, max_position_embeddings=8192)
_PROMPT = 8


def make_models(directory: Path) -> Path:
    for name, fields in MODELS.items():
        tiny_model(directory / name, **{**_COMMON, **fields})
    return directory


def step_config(
    model: Path, run_dir: Path, tokens: int, dtype: Dtype, recompute: Recompute, sizes: ParallelConfig
) -> Config:
    """One micro-batch of one sample of `tokens` inputs, over all context-parallel ranks, on each data-parallel rank."""
    config = policy_config(model, run_dir, sizes)
    config.model.dtype = dtype
    config.data.max_prompt_length, config.rollout.global_max_length = _PROMPT, tokens - _PROMPT + 1
    config.rollout.segment_count = 1
    config.policy.recompute = recompute
    config.policy.max_tokens_per_rank = tokens // sizes.context
    config.policy.head_chunk_tokens = 64
    return config


def planned(config: Config, world: int, stage: int = 0) -> RankMemory:
    return memory(of_config(config, architecture(config.model), world, imbalance=1.0, cuda=False))[stage]


def run_update(config: Config, samples: int, watch: Callable[[Callable[[], Any]], int]) -> int:
    """Bytes at the fullest moment of an update on `samples` samples, beyond those before it, as `watch` sees them."""
    batch = [_sample(config.rollout.global_max_length + _PROMPT, i) for i in range(samples)]
    policy = Policy(config)
    gc.collect()
    return watch(lambda: policy.update(batch, objective()))


def allocated(step: Callable[[], Any]) -> int:
    """The most that the CPU's allocator handed out at a time; not what other threads free, as gloo's do."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def alive(step: Callable[[], Any]) -> int:
    """The most that tensors held at a time, whoever freed them; not what a kernel has for itself."""
    with _Storages() as storages:
        step()
    return storages.peak


class _Storages(TorchDispatchMode):
    """Follows every storage that an operation makes until nothing refers to it."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._made: Dict[int, Tuple[StorageWeakRef, int]] = {}
        self._older: Dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._older[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        new = [s for s in _storages(out) if s._cdata not in self._made and s._cdata not in self._older]
        if not new:
            return out
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self._older = {key: older for key, older in self._older.items() if not older.expired()}
        self._made |= {storage._cdata: (StorageWeakRef(storage), storage.nbytes()) for storage in new}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


def _storages(tree: Any) -> List[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def in_use(rank: RankMemory) -> int:
    """What can be seen of the plan in an update: no weights, gradients and optimizer, which are there before."""
    return max(rank.activations, rank.update)


def _sample(tokens: int, seed: int) -> TrainSample:
    g = torch.Generator().manual_seed(seed)
    return TrainSample(
        sample_id=seed,
        tokens=torch.randint(0, 256, (tokens,), generator=g),
        prompt_length=_PROMPT,
        reward=1.0,
        advantage=1.0,
        behaviour_log_probs=-torch.rand(tokens - _PROMPT, generator=g),
        ages=torch.zeros(tokens - _PROMPT, dtype=torch.int64),
    )
