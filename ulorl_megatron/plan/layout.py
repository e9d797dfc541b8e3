"""One training layout on a number of ranks: who holds which share of the model and of a micro-batch."""

import math
from dataclasses import dataclass

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.schema import Config, Dtype, ParallelConfig, Recompute, TransformerImpl


@dataclass(frozen=True)
class Layout:
    """What the memory and time of a training step depend on.

    world: ranks. dtype, impl, recompute, offload, overlap_gradients, head_chunk: as configured. tokens: of the longest
    micro-batch on one context-parallel rank, padding included. sequence: of the longest sample, over all
    context-parallel ranks. samples: of one optimizer step, if all are of that length; packed: how many make a
    micro-batch. imbalance: tokens of the fullest expert-parallel rank over the mean. cuda: whether a GPU's kernels run,
    which keep other tensors than a CPU's.
    """

    arch: Architecture
    sizes: ParallelConfig
    world: int
    dtype: Dtype
    impl: TransformerImpl
    recompute: Recompute
    offload: bool
    overlap_gradients: bool
    head_chunk: int
    tokens: int
    sequence: int
    samples: float
    packed: int
    imbalance: float
    cuda: bool

    @property
    def item(self) -> int:
        """Bytes of a weight or activation."""
        return 2 if self.dtype is Dtype.bfloat16 else 4

    @property
    def data_parallel(self) -> int:
        return self.world // (self.sizes.tensor * self.sizes.pipeline * self.sizes.context)

    @property
    def dense_replicas(self) -> int:
        """Ranks over which the optimizer state of a weight outside the experts is spread."""
        return self.data_parallel * self.sizes.context

    @property
    def expert_replicas(self) -> int:
        """Ranks over which the optimizer state of an expert is spread."""
        return self.world // (self.sizes.expert * self.sizes.expert_tensor * self.sizes.pipeline)

    @property
    def layers(self) -> int:
        """Layers of one rank, all its model chunks together."""
        return self.arch.num_layers // self.sizes.pipeline

    @property
    def micro_batches(self) -> int:
        """Of one optimizer step on one data-parallel rank."""
        count = math.ceil(self.samples / self.packed / self.data_parallel)
        rounds = self.sizes.pipeline if self.sizes.virtual_pipeline > 1 else 1  # the interleaved schedule's
        return math.ceil(count / rounds) * rounds

    def layers_in_flight(self, stage: int) -> int:
        """Layers, counted once a micro-batch, whose activations pipeline stage `stage` holds at a time.

        One forward, one backward: stage s of p runs p - s - 1 micro-batches ahead; interleaved, 2 (p - s - 1) +
        (v - 1) p model chunks (megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches).
        """
        p, v = self.sizes.pipeline, self.sizes.virtual_pipeline
        ahead = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
        return min(ahead + 1, self.micro_batches * v) * (self.layers // v)


def of_config(config: Config, arch: Architecture, world: int, imbalance: float, cuda: bool) -> Layout:
    """The layout of `config` on `world` ranks with samples that all have the longest prompt and response."""
    sizes, context = config.policy.parallel, config.policy.parallel.context
    unit = sizes.tensor * (2 * context if context > 1 else 1)
    # A sample of n tokens is a sequence of n - 1 inputs (policy/packing.py).
    longest = config.data.max_prompt_length + config.rollout.global_max_length - 1
    sequence = math.ceil(longest / unit) * unit
    budget = config.policy.max_tokens_per_rank * context
    return Layout(
        arch=arch,
        sizes=sizes,
        world=world,
        dtype=config.model.dtype,
        impl=config.policy.transformer_impl,
        recompute=config.policy.recompute,
        offload=config.policy.optimizer.offload,
        overlap_gradients=config.policy.overlap.grad_reduce,
        head_chunk=config.policy.head_chunk_tokens,
        tokens=max(sequence, budget) // context,
        sequence=sequence,
        samples=steady_samples(config) / config.policy.updates_per_step,
        packed=max(1, budget // sequence),
        imbalance=imbalance if sizes.expert > 1 else 1.0,
        cuda=cuda,
    )


def steady_samples(config: Config) -> float:
    """Samples that finish in a step once as many finish as begin, if all have the longest response.

    prompts_per_step x group_size samples are in flight and each gets one of its segment_count segments a step.
    """
    r = config.rollout
    return r.prompts_per_step * r.group_size / r.segment_count
