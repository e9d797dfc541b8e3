"""What a checkpoint holds of model and optimizer: Megatron's sharded tensors, whose names say nothing of the layout.

Megatron's own state of a chained optimizer also has the settings of the parameter groups, one list for each of its
parts, and how many parts there are depends on the layout (experts are a part of their own with expert parallelism).
All that they say is known without them, the number of updates excepted. They stay out, and a checkpoint of any layout
resumes in any other.
"""

from typing import Any, Dict, List

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from ulorl_megatron.policy.platform import cuda_tensors

_SHARDING = "fully_reshardable"
# Scales of 8-bit floats, one object a linear layer and expert, empty here. Which layers have one differs between the
# implementations of the layers, so these stay out as well.
_EXTRA = "_extra_state"


def sharded_state(models: List[GPTModel], optimizer: MegatronOptimizer, *, loading: bool) -> Dict[str, Any]:
    """Weights, float32 masters and Adam's moments of this rank as sharded tensors; collective.

    Masters and moments are gathered in host memory: 12 bytes a parameter, over the parameters that the ranks with the
    same data-parallel group share. When saving only the first of such a group holds them, when loading each does.
    """
    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    chunks = {}
    for i, model in enumerate(models):
        shards = model.sharded_state_dict(metadata=metadata)
        chunks[f"model{i}"] = {name: value for name, value in shards.items() if _EXTRA not in name}
    state = dict(chunks)
    with cuda_tensors():
        for i, part in enumerate(optimizer.chained_optimizers):
            moments = part.sharded_state_dict(chunks, is_loading=loading, metadata=metadata)["param_state"]
            if moments is not None:
                state[f"optimizer{i}"] = moments
    return state


def restore(models: List[GPTModel], optimizer: MegatronOptimizer, state: Dict[str, Any], updates: int) -> None:
    """Put `state`, a sharded_state that was loaded, into model and optimizer. updates: optimizer steps so far."""
    for i, model in enumerate(models):
        missing, unexpected = model.load_state_dict(state[f"model{i}"], strict=False)
        if wrong := [name for name in (*missing, *unexpected) if _EXTRA not in name]:
            raise RuntimeError(f"the loaded state lacks, or has beyond the model: {wrong[:3]}")
    with cuda_tensors():
        for i, part in enumerate(optimizer.chained_optimizers):
            own = part.state_dict()
            for group in own["optimizer"]["param_groups"]:
                group["step"] = updates  # Adam's bias correction
            loaded = {"param_state": state[f"optimizer{i}"], "param_state_sharding_type": _SHARDING}
            part.load_state_dict(own | loaded)
