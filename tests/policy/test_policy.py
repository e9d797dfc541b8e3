"""Updates and scores on one rank."""

import math

import pytest
import torch

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
from ulorl_megatron.config.schema import Distribution
from ulorl_megatron.policy import NonFiniteGradient, Policy


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


def test_weights_of_another_directory(config, tmp_path):
    other = tiny_model(tmp_path / "other", "moe", seed=5)
    samples = make_samples(2)
    scores = Policy(config, weights=str(other)).score(samples)
    expected = reference(other, samples, TEMPERATURE)
    torch.testing.assert_close(scores[0].log_probs, expected.log_probs[0], atol=1e-5, rtol=0)
