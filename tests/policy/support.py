"""A small configuration, samples of unequal lengths, and the same computation with transformers alone."""

from pathlib import Path
from typing import Dict, List, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.algorithm.objective import Mastery, UloRLObjective
from ulorl_megatron.config.schema import Config, Dtype, ParallelConfig
from ulorl_megatron.policy import Policy

TEMPERATURE = 0.85


def policy_config(model: Path, run_dir: Path, parallel: ParallelConfig | None = None) -> Config:
    """float32, several samples a micro-batch and micro-batches a step, AdamW without decay, synchronous saves."""
    config = Config()
    config.run.dir = str(run_dir)
    config.model.path = str(model)
    config.model.dtype = Dtype.float32
    config.rollout.temperature = TEMPERATURE
    config.policy.max_tokens_per_rank = 64
    config.policy.head_chunk_tokens = 16
    config.policy.parallel = parallel or ParallelConfig()
    config.policy.optimizer.lr = 1e-3
    config.policy.optimizer.weight_decay = 0.0
    config.checkpoint.asynchronous = False
    return config


def read_out_gradients(config: Config) -> None:
    """Make an update subtract the gradient, 1000 times enlarged: Adam without memory, with an eps far above any.

    With the distributed optimizer a gradient is nowhere whole; this shows it in the weights, through all that an
    update does, and without Adam's amplification of rounding noise.
    """
    optimizer = config.policy.optimizer
    optimizer.beta1, optimizer.beta2 = 0.0, 0.0
    optimizer.eps, optimizer.lr, optimizer.clip_grad = 1e4, 1e7, 0.0


def make_samples(count: int = 9, seed: int = 1, longest: int = 60) -> List[TrainSample]:
    """Random tokens, rewards and advantages; prompts of 1 token and responses of 1 token among them."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        n = int(torch.randint(3, longest, (1,), generator=g))
        prompt = (1, n - 1, int(torch.randint(1, n, (1,), generator=g)))[min(i, 2)]
        samples.append(
            TrainSample(
                sample_id=i,
                tokens=torch.randint(0, 256, (n,), generator=g),
                prompt_length=prompt,
                reward=float(i % 2),
                advantage=float(torch.randn((), generator=g)),
                behaviour_log_probs=-torch.rand(n - prompt, generator=g),
                ages=(torch.arange(n - prompt).flip(0) // 3),
            )
        )
    return samples


def objective(mode: str = "off", sigma: float = 0.2, tau: float = 0.99) -> UloRLObjective:
    return UloRLObjective("pois", 0.2, 0.28, Mastery(mode, tau, sigma, "sample"))


def hf_weights(policy: Policy) -> Dict[str, Tensor]:
    """A copy of what this rank exports."""
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


class Reference(NamedTuple):
    """What transformers computes: per sample, and the gradient of the policy loss under its names on disk."""

    log_probs: List[Tensor]
    entropies: List[Tensor]
    gradients: Dict[str, Tensor]


def reference(model: Path, samples: List[TrainSample], temperature: float = TEMPERATURE) -> Reference:
    """One sample at a time, full logits, plain autograd. Loss: -sum A log p / response tokens (Eq. 7, ratio 1)."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_probs, entropies = [], []
    for sample in samples:
        logits = hf(input_ids=sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1] / temperature
        distribution = torch.log_softmax(logits, -1)
        log_probs.append(distribution.gather(-1, sample.tokens[sample.prompt_length :, None])[:, 0])
        entropies.append(-(distribution.exp() * distribution).sum(-1).detach())
    tokens = sum(s.response_length for s in samples)
    loss = -sum(s.advantage * x.sum() for s, x in zip(samples, log_probs, strict=True)) / tokens
    loss.backward()
    gradients = _on_disk({name: p.grad for name, p in hf.named_parameters()})
    return Reference([x.detach() for x in log_probs], entropies, gradients)


def _on_disk(fused: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """transformers fuses the experts of a layer in memory, and keeps them apart on disk."""
    apart = {}
    for name, tensor in fused.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                apart[f"{prefix}.{expert}.gate_proj.weight"] = gate
                apart[f"{prefix}.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                apart[f"{prefix}.{expert}.down_proj.weight"] = down
        else:
            apart[name] = tensor
    return apart


def assert_gradients_close(actual: Dict[str, Tensor], expected: Dict[str, Tensor], tolerance: float) -> None:
    """Largest difference of each tensor, relative to its largest element."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        difference = (actual[name] - gradient).abs().max() / scale
        assert scale > 0 and difference < tolerance, f"{name}: {difference:.1e}"
