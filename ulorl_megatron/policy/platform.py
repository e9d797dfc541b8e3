"""Megatron-Core on a machine without CUDA.

Megatron-Core names CUDA devices, streams and generators unconditionally. Without CUDA its modules are given a
stand-in for the name `torch`, in which those mean the CPU; torch itself stays as it is, for everybody else in
the process (a patched torch.empty_like, for one, leaves a transformers model with undefined rope
frequencies). With CUDA nothing here does anything.
"""

import contextlib
import functools
import importlib
import sys
import types
from typing import Any, Callable, ContextManager, Iterator, List

import torch
import torch._dynamo
import torch.distributed as dist

_IMPORTED_LATE = (  # by functions of megatron.core, too late for the stand-in
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo.optimizer",
)


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def adapt_megatron() -> None:
    """Make every megatron.core module imported so far run on this machine. Call once, after importing them."""
    if torch.cuda.is_available():
        return
    # Megatron compiles small functions, for kernels a CPU does not gain from: 10 s each and a C++ compiler.
    torch._dynamo.config.disable = True
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    _mend_random()
    _mend_token_dispatcher()
    stand_in = _torch_for_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in


class _StandIn(types.ModuleType):
    """A module with some attributes replaced."""

    def __init__(self, original: types.ModuleType, **replaced: Any):
        super().__init__(original.__name__)
        self.__dict__.update(vars(original))
        self.__dict__.update(replaced)
        self._original = original

    def __getattr__(self, name: str) -> Any:  # what torch loads lazily
        return getattr(self._original, name)


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


def _torch_for_cpu() -> types.ModuleType:
    def nothing(*args, **kwargs) -> None:
        return None

    def cpu_generator(device=None) -> torch.Tensor:  # one generator on this machine: the CPU's
        return torch.get_rng_state()

    cuda = _StandIn(
        torch.cuda,
        random=_StandIn(torch.cuda.random, get_rng_state=cpu_generator),
        get_rng_state=cpu_generator,
        manual_seed=lambda seed: torch.manual_seed(seed) and None,
        current_device=lambda: torch.device("cpu"),
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda device=None: _Stream(),
        default_stream=lambda device=None: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    factories = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
    return _StandIn(
        torch,
        cuda=cuda,
        distributed=_StandIn(dist, all_gather=_uneven_all_gather),
        **{name: _on_cpu(getattr(torch, name)) for name in factories},
    )


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


def _uneven_all_gather(outputs: List[torch.Tensor], tensor: torch.Tensor, group=None, async_op=False):
    """gloo gathers equal shapes only; expert tensor parallelism sends each rank's own number of tokens."""
    sizes = [output.size(0) for output in outputs]
    if len(set(sizes)) == 1:
        return dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    flat = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
    copies = torch.cat([tensor] * len(outputs))
    dist.all_to_all_single(flat, copies, sizes, [tensor.size(0)] * len(outputs), group=group)
    for output, part in zip(outputs, flat.split(sizes), strict=True):
        output.copy_(part)
    return None


def _mend_random() -> None:
    """Activation recomputation restores the generator of a CUDA device by its index."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _mend_token_dispatcher() -> None:
    """All-to-all split sizes become lists only where they come from a CUDA tensor."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_list(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_list


def cuda_tensors() -> ContextManager[None]:
    """Around Megatron's optimizers, which test for "torch.cuda.FloatTensor" and call Tensor.cuda()."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _cuda_tensors()


@contextlib.contextmanager
def _cuda_tensors() -> Iterator[None]:
    name_of, cuda = torch.Tensor.type, torch.Tensor.cuda

    def cuda_name(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return name_of(self).replace("torch.", "torch.cuda.", 1)
        return name_of(self, dtype, *args, **kwargs)

    torch.Tensor.type, torch.Tensor.cuda = cuda_name, lambda self, *args, **kwargs: self
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = name_of, cuda
