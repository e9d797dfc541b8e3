"""AdamW in Megatron's distributed optimizer, and the learning rate's warm-up."""

from typing import List

import megatron.core.optimizer
import torch
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch.optim.adamw import adamw

from ulorl_megatron.config.schema import OptimizerConfig
from ulorl_megatron.policy.platform import cuda_tensors


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the interface of Transformer Engine's FusedAdam, in torch's fused kernel.

    Megatron can neither load nor reshard the state of torch's own AdamW. State: exp_avg and exp_avg_sq per
    parameter; `step` is the group's.
    """

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, capturable):
        if not adam_w_mode or capturable:
            raise ValueError("only decoupled weight decay without CUDA graphs is implemented here")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self.state[p] for p in params]
            for p, state in zip(params, states, strict=True):
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            adamw(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(group["step"] - 1), device=p.device) for p in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )


def _use_own_adam() -> None:
    """Have Megatron take FusedAdam above where neither Transformer Engine nor Apex brought one."""
    if megatron.core.optimizer.USING_PYTORCH_OPTIMIZER:
        megatron.core.optimizer.Adam = FusedAdam
        megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def build_optimizer(config: OptimizerConfig, chunks: List[torch.nn.Module], dtype: torch.dtype) -> MegatronOptimizer:
    """The distributed optimizer over DDP-wrapped `chunks`; float32 masters of bfloat16 weights are made here."""
    _use_own_adam()
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    with cuda_tensors():
        optimizer = get_megatron_optimizer(settings, chunks)
    for part in optimizer.chained_optimizers:  # so that there is a state to save before the first update
        part.init_state_fn(part.optimizer, part.config)
    return optimizer


def set_rates(optimizer: MegatronOptimizer, config: OptimizerConfig, update: int) -> float:
    """Learning rate and weight decay of update number `update` (from 1); returns the former.

    Norms are not decayed: Megatron marks their group, and leaves it to the scheduler to act on it.
    """
    lr = learning_rate(config, update)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return lr


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Linear up to `lr` at update number warmup_steps, constant after."""
    return config.lr * min(1.0, update / config.warmup_steps) if config.warmup_steps else config.lr
