"""AdamW in Megatron's distributed optimizer, and the schedule of the learning rate."""

import math
from typing import List

import megatron.core.optimizer
import torch
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor
from torch.optim.adamw import adamw

from ulorl_megatron.config.schema import OptimizerConfig, Schedule
from ulorl_megatron.policy.platform import cuda_tensors

_MEGATRONS_ADAM = megatron.core.optimizer.Adam  # Transformer Engine's, else Apex', else torch's


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
            self._update(group, params)

    def create_moments(self) -> None:
        """Zero moments where there are none, so that there is a state to save before the first update."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(exp_avg=self._zeros(p), exp_avg_sq=self._zeros(p))

    def load_state_dict(self, state_dict) -> None:
        """Takes the tensors as they are, where they are; torch's would move them to the parameters' device."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        params = [p for group in self.param_groups for p in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[params[index]] = state

    def _zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def _update(self, group: dict, params: List[Tensor]) -> None:
        moments = [(self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in params]
        _adamw(group, params, [m for m, _ in moments], [v for _, v in moments])


class OffloadedAdam(FusedAdam):
    """The same with the moments in (pinned) host memory. A step brings those of one parameter after the other to its
    device, computes there and takes them back: 16 bytes a parameter over the bus."""

    def _zeros(self, p: Tensor) -> Tensor:
        return torch.zeros(p.shape, dtype=p.dtype, pin_memory=p.is_cuda)

    def _update(self, group: dict, params: List[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            m, v = (state[name].to(p.device, non_blocking=True) for name in ("exp_avg", "exp_avg_sq"))
            _adamw(group, [p], [m], [v])
            state["exp_avg"].copy_(m, non_blocking=True)
            state["exp_avg_sq"].copy_(v, non_blocking=True)
        if params[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # whoever reads the moments on the host must find them there


def _adamw(group: dict, params: List[Tensor], exp_avgs: List[Tensor], exp_avg_sqs: List[Tensor]) -> None:
    """One update, number group["step"]."""
    beta1, beta2 = group["betas"]
    adamw(
        params,
        [p.grad for p in params],
        exp_avgs,
        exp_avg_sqs,
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


def _choose_adam(offload: bool) -> None:
    """Have Megatron build OffloadedAdam, or FusedAdam where neither Transformer Engine nor Apex brought one."""
    adam = _MEGATRONS_ADAM
    if offload:
        adam = OffloadedAdam
    elif issubclass(adam, torch.optim.AdamW):
        adam = FusedAdam
    megatron.core.optimizer.Adam = adam
    if megatron.core.optimizer.USING_PYTORCH_OPTIMIZER:
        megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def build_optimizer(
    config: OptimizerConfig, chunks: List[torch.nn.Module], dtype: torch.dtype, *, overlap_param_gather: bool
) -> MegatronOptimizer:
    """The distributed optimizer over DDP-wrapped `chunks`; float32 masters of bfloat16 weights are made here."""
    _choose_adam(config.offload)
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
        overlap_param_gather=overlap_param_gather,
    )
    with cuda_tensors():
        optimizer = get_megatron_optimizer(settings, chunks)
    for part in optimizer.chained_optimizers:  # so that there is a state to save before the first update
        if isinstance(part.optimizer, FusedAdam):
            part.optimizer.create_moments()
        else:
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
    """Of update number `update` (from 1): linear up to `lr` at number warmup_steps, then as config.schedule says."""
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    if config.schedule is Schedule.constant:
        return config.lr
    progress = min(1.0, (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
