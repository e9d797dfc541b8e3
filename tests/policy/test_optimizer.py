"""AdamW with float32 masters, and the learning rate's schedule."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.policy.support import hf_weights, make_samples, objective, policy_config, reference
from ulorl_megatron.config.schema import Dtype, OptimizerConfig, Schedule
from ulorl_megatron.policy import Policy
from ulorl_megatron.policy.optimizer import learning_rate


@pytest.fixture
def config(tiny, tmp_path):
    return policy_config(tiny(), tmp_path)


def test_two_steps_equal_plain_adamw(config):
    samples = make_samples()
    config.policy.optimizer.weight_decay = 0.1
    optimizer = config.policy.optimizer
    policy = Policy(config)
    expected = hf_weights(policy)
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in expected.items()}
    for step in (1, 2):
        # The reference's gradient at the policy's own weights: what is compared is the optimizer's arithmetic.
        before = hf_weights(policy)
        stats = policy.update(samples, objective())
        after = hf_weights(policy)
        grads = reference_at(config, before, samples)
        clip = min(1.0, optimizer.clip_grad / (stats.grad_norm + 1e-6))
        for name, weight in before.items():
            m, v = moments[name]
            g = grads[name] * clip
            m.mul_(optimizer.beta1).add_(g, alpha=1 - optimizer.beta1)
            v.mul_(optimizer.beta2).addcmul_(g, g, value=1 - optimizer.beta2)
            m_hat, v_hat = m / (1 - optimizer.beta1**step), v / (1 - optimizer.beta2**step)
            decay = optimizer.weight_decay if weight.ndim > 1 else 0.0  # norms are not decayed
            wanted = weight * (1 - optimizer.lr * decay) - optimizer.lr * m_hat / (v_hat.sqrt() + optimizer.eps)
            clear = v_hat.sqrt() > 1e-5  # below, the direction of the step is rounding noise
            torch.testing.assert_close(after[name][clear], wanted[clear], atol=2e-6, rtol=1e-5)


def reference_at(config, weights, samples):
    directory = config.run.dir + "/at"
    shutil.copytree(config.model.path, directory, dirs_exist_ok=True)
    save_file({k: v.contiguous() for k, v in weights.items()}, directory + "/model.safetensors", {"format": "pt"})
    return reference(directory, samples).gradients


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_step_at_learning_rate_zero_changes_no_bit(config, dtype):  # SkyRL#2149, Megatron-LM#5071
    config.model.dtype = dtype
    config.policy.optimizer.lr = 0.0
    config.policy.optimizer.weight_decay = 0.1
    policy = Policy(config)
    before = hf_weights(policy)
    assert policy.update(make_samples(), objective()).grad_norm > 0
    after = hf_weights(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {t.dtype for t in after.values()} == {getattr(torch, dtype.value)}


def test_small_bfloat16_steps_add_up_in_the_masters(config):
    """Each step is far below bfloat16's resolution; without float32 masters nothing would ever move."""
    config.model.dtype = Dtype.bfloat16
    config.policy.optimizer.lr = 5e-4
    policy = Policy(config)
    before = hf_weights(policy)["model.norm.weight"].float()
    for _ in range(12):
        policy.update(make_samples(), objective())
    moved = hf_weights(policy)["model.norm.weight"].float() - before
    assert moved.abs().max() > 1e-3


def test_the_masters_are_the_loaded_weights(config):
    """Every bfloat16 weight is in one float32 master, of the same value to the last bit."""
    config.model.dtype = Dtype.bfloat16
    policy = Policy(config)
    elements = 0
    for part in policy._optimizer.chained_optimizers:
        for weights, masters in zip(part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                assert master.dtype is torch.float32 and torch.equal(master, weight.float())
                elements += master.numel()
    assert elements == sum(p.numel() for model in policy._models for p in model.parameters())


def test_constant_after_the_warm_up():
    settings = OptimizerConfig(lr=1e-3, warmup_steps=4)
    assert [learning_rate(settings, n) for n in (1, 2, 4, 5, 1000)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    assert learning_rate(OptimizerConfig(lr=1e-3), 1) == 1e-3


def test_cosine_from_the_warm_up_to_the_end():
    settings = OptimizerConfig(lr=1.0, min_lr=0.2, schedule=Schedule.cosine, warmup_steps=4, decay_steps=16)
    expected = {1: 0.25, 4: 1.0, 8: 0.8, 10: 0.6, 12: 0.4, 16: 0.2, 17: 0.2, 1000: 0.2}  # cos of 60, 90, 120 degrees
    assert {n: learning_rate(settings, n) for n in expected} == pytest.approx(expected, rel=1e-12)
    at_once = OptimizerConfig(lr=1.0, schedule=Schedule.cosine, decay_steps=2)
    assert [learning_rate(at_once, n) for n in (1, 2, 3)] == pytest.approx([0.5, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("schedule", Schedule)
def test_a_resumed_run_has_the_learning_rates_of_one_that_was_not_stopped(config, schedule):
    """Rates go by updates, not by steps: the checkpoint here is of step 9, after two of them."""
    config.policy.optimizer.warmup_steps = 3
    if schedule is Schedule.cosine:
        config.policy.optimizer.schedule = schedule
        config.policy.optimizer.decay_steps = 5
    whole = [learning_rate(config.policy.optimizer, n) for n in range(1, 7)]
    samples = make_samples(2)
    policy = Policy(config)
    assert [policy.update(samples, objective()).lr for _ in range(2)] == whole[:2]
    policy.save(9)
    resumed = Policy(config)
    resumed.load_latest()
    assert [resumed.update(samples, objective()).lr for _ in range(4)] == whole[2:]
