"""What the reference vectors do not show: equality of the three ratios, scopes, edges."""

import math

import pytest
import torch

from ulorl_megatron.algorithm import group_advantages, importance_ratio, mastered_positive_mask, policy_loss
from ulorl_megatron.algorithm.batch import TokenBatch, TokenScores
from ulorl_megatron.algorithm.objective import Mastery, RatioNotOne, UloRLObjective


def make_batch(tokens=40, samples=6, seed=0, old=None):
    g = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(tokens, generator=g, dtype=torch.float64)
    index = torch.sort(torch.randint(0, samples, (tokens,), generator=g)).values
    rewards = (torch.rand(samples, generator=g) < 0.5).double()
    batch = TokenBatch(
        sample_index=index,
        rewards=rewards,
        advantages=group_advantages(rewards, torch.arange(samples) // 3),
        behaviour_log_probs=log_probs.clone(),
        ages=torch.zeros(tokens, dtype=torch.int64),
        old_log_probs=old,
    )
    return batch, log_probs


def gradient(importance, batch, log_probs, mastery=None, tis_cap=None):
    x = log_probs.clone().requires_grad_()
    entropies = torch.full_like(log_probs, 0.1)
    scores = TokenScores(x, entropies, x.detach(), entropies)
    objective = UloRLObjective(importance, 0.2, 0.28, mastery or Mastery("off", 0.99, 0.2, "sample"), tis_cap)
    loss, tokens, sums, maxima = objective(batch, scores, lambda t: t)
    loss.backward()
    return x.grad, sums, maxima


def test_without_lag_the_three_ratios_give_the_same_gradient():
    batch, log_probs = make_batch()
    tois, pois, sais = (gradient(mode, batch, log_probs)[0] for mode in ("tois", "pois", "sais"))
    assert tois.abs().max() > 0
    assert torch.equal(tois, pois) and torch.equal(tois, sais)


def test_pois_ratio_is_exactly_one_or_the_run_stops():
    batch, log_probs = make_batch()
    _, sums, maxima = gradient("pois", batch, log_probs)
    assert sums["ratio_deviation"] == 0 and maxima["ratio_deviation"] == 0
    log_probs[3] = float("nan")  # a NaN log-prob has no ratio of 1 either
    with pytest.raises(RatioNotOne, match="1 of 40"):
        gradient("pois", batch, log_probs)


def test_lag_is_seen_by_sais_alone():
    batch, log_probs = make_batch()
    batch.behaviour_log_probs = log_probs - 0.05
    pois, sums, _ = gradient("pois", batch, log_probs)
    sais, _, maxima = gradient("sais", batch, log_probs)
    torch.testing.assert_close(sais, pois * math.exp(0.05))
    assert maxima["ratio_deviation"] == pytest.approx(math.exp(0.05) - 1)
    assert sums["mismatch"] == pytest.approx(0.05 * 40)


def test_truncated_importance_sampling_weighs_each_token_by_a_capped_constant():
    batch, log_probs = make_batch()
    plain, _, _ = gradient("pois", batch, log_probs)
    batch.behaviour_log_probs = log_probs - torch.linspace(-1.0, 1.0, 40).double()
    weighted, sums, _ = gradient("pois", batch, log_probs, tis_cap=1.5)
    expected = torch.linspace(-1.0, 1.0, 40).double().exp().clamp(max=1.5)
    assert (expected == 1.5).any() and (expected < 1).any()
    torch.testing.assert_close(weighted, plain * expected)
    assert sums["ratio_deviation"] == 0  # the ratio of the clip stays POIS's
    batch.old_log_probs = log_probs - 0.1  # several updates a step: the weight is of the policy at its start
    later, _, _ = gradient("pois", batch, log_probs, tis_cap=1.5)
    expected = (batch.old_log_probs - batch.behaviour_log_probs).exp().clamp(max=1.5)
    torch.testing.assert_close(later, plain * expected * math.exp(0.1))


def test_staleness_is_told_by_the_age_of_the_weights():
    batch, log_probs = make_batch()
    batch.ages = torch.arange(40) % 6
    batch.behaviour_log_probs = log_probs - 0.02 * batch.ages
    _, sums, _ = gradient("pois", batch, log_probs)
    for age, members in {"0": [0], "1": [1], "2-3": [2, 3], "4-up": [4, 5]}.items():
        of_age = torch.isin(batch.ages, torch.tensor(members))
        ratio = (0.02 * batch.ages[of_age]).double().exp()
        index = batch.sample_index[of_age]
        expected = {
            "tokens": of_age.sum(),
            "ratio_deviation": (ratio - 1).sum(),
            "kl": (ratio * ratio.log() - ratio + 1).sum(),
            "outside_clip": 0,
            "reward": batch.rewards[index].sum(),
            "advantage": batch.advantages[index].sum(),
        }
        assert {name: sums[f"age-{age}/{name}"].item() for name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, abs=1e-12
        )
    batch.behaviour_log_probs = log_probs - 0.1 * batch.ages
    _, sums, _ = gradient("pois", batch, log_probs)  # exp(0.3) - 1 = 0.35 is above clip_high 0.28
    assert sums["age-2-3/outside_clip"] == (batch.ages == 3).sum()
    assert sums["mismatch_tokens"] == (batch.ages == 0).sum()


def test_mastery_modes():
    batch, log_probs = make_batch()
    positive = batch.rewards[batch.sample_index] == 1
    log_probs[:] = -0.001
    log_probs[positive.nonzero()[0]] = -0.02  # p = 0.98
    modes = ("off", "dynamic", "always")
    sums = {mode: gradient("pois", batch, log_probs, Mastery(mode, 0.99, 0.05, "sample"))[1] for mode in modes}
    mastered = int(positive.sum()) - 1
    assert [sums[mode]["masked_tokens"] for mode in modes] == [0, 0, mastered]  # entropy 0.1 is not below sigma 0.05
    assert all(sums[mode]["mastered_tokens"] == mastered for mode in modes)


def test_equal_rewards_give_exactly_zero():  # NeMo-RL#4158
    rewards = torch.full((7,), 0.1)
    assert torch.equal(group_advantages(rewards, torch.zeros(7, dtype=torch.long)), torch.zeros(7))
    assert torch.equal(group_advantages(torch.ones(1), torch.zeros(1, dtype=torch.long)), torch.zeros(1))


def test_advantages_use_bessel_correction():
    a = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(a, torch.tensor([0.75, -0.25, -0.25, -0.25]).double() / (0.5 + 1e-6))


def test_entropy_is_summed_over_the_ranks_of_a_sample():
    """Two context-parallel halves of one sample mask alike, by the mean over both."""
    log_probs, entropies = torch.zeros(4), torch.tensor([0.0, 0.0, 0.3, 0.3])
    kwargs = dict(tau=0.99, sigma=0.2, entropy_scope="sample")
    rewards, whole = torch.ones(1), torch.tensor([[0.6], [4.0]])
    one = torch.zeros(2, dtype=torch.long)
    for half in (slice(0, 2), slice(2, 4)):
        mask = mastered_positive_mask(log_probs[half], entropies[half], rewards, one, reduce=lambda s: whole, **kwargs)
        assert mask.all()
    assert not mastered_positive_mask(log_probs[2:], entropies[2:], rewards, one, **kwargs).any()


def test_masked_tokens_count_in_the_denominator_and_nowhere_else():
    log_probs = torch.zeros(3, requires_grad=True)
    ratio = importance_ratio("pois", log_probs, None, None)
    ratio = torch.where(torch.tensor([False, True, False]), torch.tensor(math.inf), ratio)
    loss, stats = policy_loss(
        log_probs, ratio, torch.tensor([1.0]), torch.zeros(3, dtype=torch.long), torch.tensor([False, True, False]),
        clip_low=0.2, clip_high=0.2, num_tokens=3,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-2 / 3) and stats["masked_tokens"] == 1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="importance mode"):
        importance_ratio("ppo", torch.zeros(1), None, None)
    with pytest.raises(ValueError, match="generated each segment"):
        importance_ratio("sais", torch.zeros(1), None, None)
    with pytest.raises(ValueError, match="entropy_scope"):
        mastered_positive_mask(
            torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long),
            tau=0.9, sigma=0.2, entropy_scope="group",
        )  # fmt: skip
