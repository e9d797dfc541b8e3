"""Megatron-Core on a machine without CUDA: what it asks of torch.cuda is answered by the CPU.

Megatron-Core names CUDA devices, streams and generators unconditionally. `prepare_torch` must run before
megatron.core is imported, `adapt_megatron` after. With CUDA both do nothing, and the `cuda_type_names` context is
empty. Everything else in this package may then be written once, for both.
"""

import contextlib
import functools
import sys
from typing import Callable, ContextManager, Iterator, List

import torch
import torch._dynamo
import torch.distributed as dist


class _Stream:
    """A torch.cuda.Stream or Event where all work is done in order anyway."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, event=None):
        return event or _Stream()

    def _nothing(self, *args, **kwargs) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def __eq__(self, other):
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def prepare_torch() -> None:
    """Let torch.cuda's device, stream and generator calls mean the CPU. Call before importing megatron.core."""
    if torch.cuda.is_available():
        return
    if "megatron.core.tensor_parallel" in sys.modules:
        raise RuntimeError("megatron.core was imported before ulorl_megatron.policy, which prepares torch for it")
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    # One generator on this machine: the CPU's.
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    for name in ("empty", "zeros", "tensor", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron compiles small functions, for kernels a CPU does not gain from: 10 s each and a C++ compiler.
    torch._dynamo.config.disable = True


def _on_cpu(factory: Callable) -> Callable:
    """The tensor factory with device="cuda" read as the CPU, and no pinned memory."""

    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def adapt_megatron() -> None:
    """Mend the places in megatron.core 0.19 that work on CUDA tensors or NCCL only. Call after importing it."""
    if torch.cuda.is_available():
        return
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # All-to-all split sizes become lists only when they come from a CUDA tensor.
    move = moe_utils.maybe_move_tensor_to_cpu

    def to_list(tensor, as_numpy=False, record_stream=False):
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_list
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    _save_in_this_process(filesystem_async)


def _uneven_all_gather(all_gather: Callable) -> Callable:
    """gloo gathers equal shapes only; expert tensor parallelism sends each rank's own number of tokens."""

    def gather(outputs: List[torch.Tensor], tensor: torch.Tensor, group=None, async_op=False):
        sizes = [output.size(0) for output in outputs]
        if len(set(sizes)) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        flat = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        copies = torch.cat([tensor] * len(outputs))
        dist.all_to_all_single(flat, copies, sizes, [tensor.size(0)] * len(outputs), group=group)
        for output, part in zip(outputs, flat.split(sizes), strict=True):
            output.copy_(part)
        return None

    return gather


def _save_in_this_process(filesystem_async) -> None:
    """A synchronous save needs no manager process for its results: starting one takes seconds, every save."""
    import queue

    filesystem_async._results_queue = queue.Queue()


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    name_of = torch.Tensor.type

    def cuda_name(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return name_of(self).replace("torch.", "torch.cuda.", 1)
        return name_of(self, dtype, *args, **kwargs)

    torch.Tensor.type = cuda_name
    try:
        yield
    finally:
        torch.Tensor.type = name_of


def cuda_type_names() -> ContextManager[None]:
    """Megatron's optimizers compare Tensor.type() with "torch.cuda.FloatTensor": needed where they run."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _cuda_type_names()
