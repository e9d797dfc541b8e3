"""The Megatron-Core trainer: one class, `Policy`, and what its update returns."""

import logging
import warnings

# Said on every run, with nothing to do about it: that GPTModel will give way to HybridModel (today's
# checkpoints and tools are GPTModel's), that saving goes through deprecated names inside Megatron, that the
# rerun machine is off, that DDP computes its own layout of the gradient buffers.
for _module in (
    "models.gpt.gpt_model",
    "dist_checkpointing.strategies.torch",
    "rerun_state_machine",
    "distributed.distributed_data_parallel",
):
    logging.getLogger(f"megatron.core.{_module}").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"torch\.distributed\.(c10d_logger|checkpoint)")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", module=r"megatron")

with warnings.catch_warnings():
    # Both are optional here, and Megatron says so once a module.
    warnings.filterwarnings("ignore", message="(Transformer Engine|Apex)")
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

from ulorl_megatron.policy.platform import adapt_megatron  # noqa: E402

adapt_megatron()  # before anything below calls into megatron.core

from ulorl_megatron.policy.policy import NonFiniteGradient, Policy, UpdateStats  # noqa: E402

__all__ = ["NonFiniteGradient", "Policy", "UpdateStats"]
