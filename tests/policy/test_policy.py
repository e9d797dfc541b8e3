"""Updates, scores, checkpoints on one rank."""

import math
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.policy.support import (
    TEMPERATURE,
    assert_gradients_close,
    hf_weights,
    make_samples,
    objective,
    policy_config,
    read_out_gradients,
    reference,
)
from tests.tiny_models import tiny_model
from ulorl_megatron.algorithm.objective import cross_entropy_objective
from ulorl_megatron.config.schema import Distribution, Dtype, OptimizerConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy import NonFiniteGradient, Policy
from ulorl_megatron.policy.optimizer import learning_rate


@pytest.fixture
def config(tiny, tmp_path):
    return policy_config(tiny(), tmp_path)


def gradients(config, samples):
    read_out_gradients(config)
    policy = Policy(config)
    before = hf_weights(policy)
    policy.update(samples, objective())
    after = hf_weights(policy)
    return {name: before[name] - after[name] for name in before}


def test_scores_equal_transformers_in_the_order_given(config):
    samples = make_samples()
    expected = reference(config.model.path, samples)
    scores = Policy(config).score(samples)
    for actual, log_probs, entropies in zip(scores, expected.log_probs, expected.entropies, strict=True):
        torch.testing.assert_close(actual.log_probs, log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(actual.entropies, entropies, atol=1e-5, rtol=0)
        assert not actual.log_probs.requires_grad


def test_mastery_scores_follow_the_configured_distribution(config):  # OpenRLHF#1319
    samples = make_samples(3)
    tempered = Policy(config).score(samples)
    config.dmmpt.distribution = Distribution.raw
    raw = Policy(config).score(samples)
    at_one = reference(config.model.path, samples, temperature=1.0)
    for a, b, log_probs, entropies in zip(tempered, raw, at_one.log_probs, at_one.entropies, strict=True):
        assert torch.equal(a.mastery_log_probs, a.log_probs) and torch.equal(a.mastery_entropies, a.entropies)
        assert torch.equal(a.log_probs, b.log_probs)
        torch.testing.assert_close(b.mastery_log_probs, log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(b.mastery_entropies, entropies, atol=1e-5, rtol=0)


def test_an_update_sees_the_scores_of_score(config):
    samples = make_samples()
    policy = Policy(config)
    expected = torch.cat([s.log_probs for s in policy.score(samples)]).double().sum()
    stats = policy.update(samples, cross_entropy_objective)
    assert stats.sums["loss"] == pytest.approx(-expected.item(), rel=1e-6)
    assert stats.tokens == sum(s.response_length for s in samples)


def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(config):  # verl#906, #7200, #7321
    samples = make_samples()
    counts = []
    expected = None
    for budget in (8, 64, 10_000):
        config.policy.max_tokens_per_rank = budget
        actual = gradients(config, samples)
        counts.append(Policy(config).update(samples, objective()).micro_batches)
        expected = expected or actual
        assert_gradients_close(actual, expected, tolerance=1e-4)
    assert counts[0] == len(samples) and counts[-1] == 1


def test_the_gradient_does_not_depend_on_the_order_of_samples(config):
    samples = make_samples()
    assert_gradients_close(gradients(config, samples[::-1]), gradients(config, samples), tolerance=1e-4)


def test_the_loss_is_divided_once_by_the_tokens_of_the_step(config):  # AReaL#1273
    """Everything twice is twice the sum over twice the tokens; in one micro-batch or in many."""
    samples = make_samples()
    once = Policy(config).update(samples, objective())
    twice = Policy(config).update(samples + samples, objective())
    assert twice.micro_batches > once.micro_batches > 1
    assert twice.grad_norm == pytest.approx(once.grad_norm, rel=1e-5)
    assert twice.sums["loss"] == pytest.approx(2 * once.sums["loss"], rel=1e-6)
    grads = reference(config.model.path, samples).gradients
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    assert once.grad_norm == pytest.approx(norm, rel=1e-5)


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


def test_the_learning_rate_warms_up_and_stays(config):
    settings = OptimizerConfig(lr=1e-3, warmup_steps=4)
    assert [learning_rate(settings, n) for n in (1, 2, 4, 5, 1000)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    assert learning_rate(OptimizerConfig(lr=1e-3), 1) == 1e-3
    config.policy.optimizer.warmup_steps = 2
    policy = Policy(config)
    assert [policy.update(make_samples(), objective()).lr for _ in range(3)] == [5e-4, 1e-3, 1e-3]


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_an_undefined_gradient_stops_the_run(config, factor):
    def broken(batch, scores, reduce):
        return scores.log_probs.sum() * factor, scores.log_probs.numel(), {}, {}

    with pytest.raises(NonFiniteGradient, match="at update 1"):
        Policy(config).update(make_samples(), broken)


def test_the_gradient_norm_is_known_without_clipping(config):
    clipped = Policy(config).update(make_samples(), objective())
    config.policy.optimizer.clip_grad = 0.0
    assert Policy(config).update(make_samples(), objective()).grad_norm == clipped.grad_norm > 0


def test_stats_of_two_updates_of_a_step(config):
    policy = Policy(config)
    first, second = (policy.update(part, objective()) for part in (make_samples(5), make_samples(4, seed=2)))
    both = first + second
    assert both.tokens == first.tokens + second.tokens
    assert both.sums["loss"] == first.sums["loss"] + second.sums["loss"]
    assert both.maxima["mismatch"] == max(first.maxima["mismatch"], second.maxima["mismatch"])
    assert both.grad_norm == max(first.grad_norm, second.grad_norm)


def test_resuming_goes_on_exactly(config):
    samples = make_samples()
    policy = Policy(config)
    assert policy.load_latest() is None
    for _ in range(2):
        policy.update(samples, objective())
    policy.save(7)
    expected = [policy.update(samples, objective()) for _ in range(2)]
    weights = hf_weights(policy)
    resumed = Policy(config)
    assert resumed.load_latest() == 7
    assert [resumed.update(samples, objective()) for _ in range(2)] == expected
    assert all(torch.equal(w, weights[name]) for name, w in hf_weights(resumed).items())


def test_a_checkpoint_before_the_first_update_resumes_too(config):
    """A step may release no sample, and is saved all the same."""
    samples = make_samples()
    policy = Policy(config)
    policy.save(1)
    expected = policy.update(samples, objective())
    resumed = Policy(config)
    assert resumed.load_latest() == 1
    assert resumed.update(samples, objective()) == expected


def test_only_complete_checkpoints_count_and_old_ones_go(config, tmp_path):
    policy = Policy(config)
    directory = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        policy.save(step)
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000002", "step-000003"]
    (directory / ".step-000004.partial").mkdir()  # a kill while writing
    (directory / "step-000004").mkdir()  # and one before the pointer
    assert policy.load_latest() == 3
    policy.save(4)
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000003", "step-000004"]
    assert policy.load_latest() == 4


def test_a_pointer_that_leads_nowhere_is_told(config, tmp_path):
    policy = Policy(config)
    policy.save(1)
    (tmp_path / "checkpoints" / "latest").write_text("step-000009\n")
    with pytest.raises(UserError, match="step-000009, which is not a complete checkpoint"):
        policy.load_latest()


def test_weights_of_another_directory(config, tmp_path):
    other = tiny_model(tmp_path / "other", "moe", seed=5)
    samples = make_samples(2)
    scores = Policy(config, weights=str(other)).score(samples)
    expected = reference(other, samples, TEMPERATURE)
    torch.testing.assert_close(scores[0].log_probs, expected.log_probs[0], atol=1e-5, rtol=0)
