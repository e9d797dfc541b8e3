"""The Megatron-Core trainer: one class, `Policy`, and what its update returns."""

import warnings

from ulorl_megatron.policy import platform

platform.prepare_torch()  # before anything below imports megatron.core
with warnings.catch_warnings():
    # Both are optional here, and Megatron says so once a module.
    warnings.filterwarnings("ignore", message="(Transformer Engine|Apex)")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

platform.adapt_megatron()
