"""The trainer as the loop sees it: update on samples, score them, hand out the weights, save and resume."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from ulorl_megatron.algorithm.batch import TokenBatch, TokenScores, TrainSample
from ulorl_megatron.config.layout import lockstep_replicas
from ulorl_megatron.config.positions import architecture
from ulorl_megatron.config.schema import Config, Distribution
from ulorl_megatron.policy import packing, parallel
from ulorl_megatron.policy.checkpoint import Checkpoints
from ulorl_megatron.policy.data_parallel import gather_parameters, wrap
from ulorl_megatron.policy.head import ScoreHead
from ulorl_megatron.policy.model import build_chunks, transformer_config
from ulorl_megatron.policy.optimizer import build_optimizer, set_rates
from ulorl_megatron.policy.packing import MicroBatch, PackingRules
from ulorl_megatron.policy.platform import cuda_tensors, device
from ulorl_megatron.policy.state import restore, sharded_state
from ulorl_megatron.policy.weights import export_hf, load_hf

Reduce = Callable[[Tensor], Tensor]
Objective = Callable[[TokenBatch, TokenScores, Reduce], Tuple[Tensor, int, Dict[str, Tensor], Dict[str, Tensor]]]


class NonFiniteGradient(RuntimeError):
    """The gradient has an infinite or undefined norm. The weights in memory are spoilt, those on disk are not."""


@dataclass(frozen=True)
class UpdateStats:
    """Of one optimizer step; the same on every rank.

    sums, maxima: the objective's, over all tokens of the step. tokens: response tokens, the loss's denominator.
    grad_norm: before clipping, over all parameters. lr: of this update. micro_batches: per data-parallel rank.
    """

    sums: Dict[str, float]
    maxima: Dict[str, float]
    tokens: int
    grad_norm: float
    lr: float
    micro_batches: int

    def __add__(self, later: "UpdateStats") -> "UpdateStats":
        """Of two updates of one step: the larger norm, the later learning rate."""
        return UpdateStats(
            sums={name: value + later.sums[name] for name, value in self.sums.items()},
            maxima={name: max(value, later.maxima[name]) for name, value in self.maxima.items()},
            tokens=self.tokens + later.tokens,
            grad_norm=max(self.grad_norm, later.grad_norm),
            lr=later.lr,
            micro_batches=self.micro_batches + later.micro_batches,
        )


class Policy:
    """The policy model, sharded over all ranks, with its optimizer.

    Every method is collective: all ranks call it, with the same arguments. torch.distributed must be initialised.
    weights: HF directory to take the weights from, instead of config.model.path (its config.json always counts).
    Raises UserError for a layout or model that cannot work, and checkpoint_tools' CheckpointError for faulty files.
    """

    def __init__(self, config: Config, *, weights: Optional[str] = None):
        self._config = config
        self._arch = architecture(config.model)
        sizes = config.policy.parallel
        parallel.initialize(sizes, self._arch)
        model_parallel_cuda_manual_seed(config.run.seed, force_reset_rng=True)
        dtype = getattr(torch, config.model.dtype.value)
        self._megatron = transformer_config(self._arch, config.policy, dtype)
        self._models = build_chunks(self._megatron, self._arch, config.policy.transformer_impl)
        load_hf(self._models, self._megatron, self._arch, weights or config.model.path)
        overlap = config.policy.overlap
        self._chunks = wrap(self._models, self._megatron, overlap, dtype)
        self._optimizer = build_optimizer(
            config.policy.optimizer, self._chunks, dtype, overlap_param_gather=overlap.param_gather
        )
        self._updates = 0
        raw = config.dmmpt.distribution is Distribution.raw and config.rollout.temperature != 1
        self._head = ScoreHead(
            temperature=config.rollout.temperature,
            raw=raw,
            vocab_size=self._arch.vocab_size,
            chunk=config.policy.head_chunk_tokens,
        )
        self._rules = PackingRules(
            budget=config.policy.max_tokens_per_rank * sizes.context,
            data_parallel=mpu.get_data_parallel_world_size(),
            context_parallel=sizes.context,
            tensor_parallel=sizes.tensor,
            multiple=sizes.pipeline if sizes.virtual_pipeline > 1 else 1,
            lockstep=lockstep_replicas(sizes),
            quadratic=packing.attention_share(self._arch),
        )
        directory = Path(config.run.dir) / "checkpoints"
        self._checkpoints = Checkpoints(directory, config.checkpoint, config.model, parallel.describe(sizes))

    def update(self, samples: List[TrainSample], objective: Objective) -> UpdateStats:
        """One optimizer step on all `samples` (not empty).

        objective(batch, scores, reduce) -> (loss_sum, num_tokens, sums, maxima) sees one micro-batch at a time.
        loss_sum is a sum over tokens; it is divided by the step's tokens over all ranks and micro-batches. reduce(t)
        sums a small tensor over the context-parallel ranks that hold other tokens of the same samples.
        Raises NonFiniteGradient.
        """

        def loss(micro: MicroBatch, outputs: Tuple[Tensor, ...]):
            scores = TokenScores(*outputs)
            loss_sum, tokens, sums, maxima = objective(micro.batch, scores, _sum_over_context)
            count = torch.tensor(tokens, dtype=torch.int, device=loss_sum.device)
            return loss_sum, count, {"tokens": count, "sums": sums, "maxima": maxima}

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        results, micro_batches = self._run(samples, loss, forward_only=False)
        lr = set_rates(self._optimizer, self._config.policy.optimizer, self._updates + 1)
        with cuda_tensors():
            _, grad_norm, _ = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(f"gradient norm {grad_norm} at update {self._updates + 1}")
        self._updates += 1
        sums, maxima, tokens = _from_last_stage(_reduce_stats, results)
        return UpdateStats(sums, maxima, tokens, float(grad_norm), lr, micro_batches)

    def score(self, samples: List[TrainSample]) -> List[TokenScores]:
        """Scores of every response token, on every rank, as an update would see them; CPU tensors, no graph."""
        starts = [0]
        for sample in samples:
            starts.append(starts[-1] + sample.response_length)

        def keep(micro: MicroBatch, outputs: Tuple[Tensor, ...]):
            return outputs[0].sum(), torch.tensor(0, dtype=torch.int), (micro, torch.stack(outputs))

        with torch.no_grad():
            results, _ = self._run(samples, keep, forward_only=True)
        flat = torch.zeros((4, starts[-1]), dtype=torch.float32, device=device())
        for micro, scores in results:
            where = [starts[i] + offsets for i, offsets in zip(micro.members, micro.offsets)]  # noqa: B905
            if where:
                flat[:, torch.cat(where).to(flat.device)] = scores
        dist.all_reduce(flat, group=mpu.get_data_parallel_group(with_context_parallel=True))
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(flat, src=last, group=mpu.get_pipeline_model_parallel_group())
        lengths = [s.response_length for s in samples]
        return [TokenScores(*part) for part in flat.cpu().split(lengths, dim=1)]

    def hf_tensors(self) -> Iterator[Tuple[str, Tensor]]:
        """(name, full tensor on the CPU) of the HF tensors this rank has to write.

        Over all ranks every HF tensor comes exactly once. All ranks must exhaust the iterator: shards are gathered.
        """
        gather_parameters(self._chunks)
        return export_hf(self._models, self._megatron, self._arch)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step under <run.dir>/checkpoints, and drop those beyond checkpoint.keep_last.

        With checkpoint.asynchronous it is written while training goes on, and must be settled.
        """
        gather_parameters(self._chunks)
        self._checkpoints.save(step, self._state(loading=False) | {"updates": self._updates})

    def settle_checkpoint(self, *, wait: bool) -> Optional[int]:
        """Make the last save complete, if it is written (wait: wait for that).

        Returns the step of the oldest checkpoint that is left if one became complete since the last call, else None.
        """
        return self._checkpoints.settle(wait=wait)

    def load_latest(self) -> Optional[int]:
        """Resume from the latest checkpoint; returns its step, or None (and nothing changed) if there is none."""
        path = self._checkpoints.latest()
        if path is None:
            return None
        state = self._checkpoints.load(path, self._state(loading=True))
        restore(self._models, self._optimizer, state, state["updates"])
        torch.set_rng_state(state["generator"])
        self._updates = state["updates"]
        return state["step"]

    def _run(self, samples: List[TrainSample], loss: Callable, forward_only: bool) -> Tuple[List[Any], int]:
        """Megatron's schedule over this rank's micro-batches; what `loss` gave for each (last stage), their number."""
        mine = packing.plan(samples, self._rules)[mpu.get_data_parallel_rank()]
        build = partial(
            packing.build,
            samples,
            rules=self._rules,
            context_rank=mpu.get_context_parallel_rank(),
            device=device(),
        )

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module):
            micro = next(batches)
            outputs = model(
                micro.input_ids,
                micro.position_ids,
                None,
                packed_seq_params=micro.packed,
                output_processor=self._head,
                output_processor_context=micro,
            )
            return outputs, partial(loss, micro)

        batches = [map(build, mine) for _ in self._chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(mine),
            seq_length=self._rules.budget,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results, len(mine)

    def _state(self, *, loading: bool) -> Dict[str, Any]:
        """The sharded state dict of model, optimizer and generator, of this rank."""
        # Nothing in a step is drawn at random, so one rank's generator stands for all.
        generator = ShardedObject("generator", torch.get_rng_state(), (1,), (0,), replica_id=dist.get_rank())
        return {**sharded_state(self._models, self._optimizer, loading=loading), "generator": generator}


def _sum_over_context(values: Tensor) -> Tensor:
    if mpu.get_context_parallel_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values, group=mpu.get_context_parallel_group())
    return values


def _reduce_stats(results: List[Dict[str, Any]]) -> Tuple[Dict[str, float], Dict[str, float], int]:
    """(sums, maxima, tokens) over the micro-batches and the ranks that hold other tokens."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)

    def reduce(key: str, over_micro_batches: Callable, operation) -> Dict[str, float]:
        names = list(results[0][key])
        if not names:
            return {}
        values = torch.stack([torch.stack([r[key][name].double() for name in names]) for r in results])
        values = over_micro_batches(values, 0)
        dist.all_reduce(values, op=operation, group=group)
        return dict(zip(names, values.tolist(), strict=True))

    tokens = torch.stack([r["tokens"] for r in results]).long().sum()
    dist.all_reduce(tokens, group=group)
    sums = reduce("sums", torch.sum, dist.ReduceOp.SUM)
    return sums, reduce("maxima", torch.amax, dist.ReduceOp.MAX), int(tokens)


def _from_last_stage(compute: Callable, *args):
    """compute(*args) of the last pipeline stage, the only one with results, on every stage."""
    result = compute(*args) if mpu.is_pipeline_last_stage(ignore_virtual=True) else None
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return result
    box = [result]
    last = mpu.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=last, group=mpu.get_pipeline_model_parallel_group())
    return box[0]
