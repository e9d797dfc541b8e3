"""pass@k, intervals and the paired test, against their definitions."""

from itertools import combinations, product

import numpy as np
import pytest

from ulorl_megatron.evaluation.statistics import compare, estimate, holm, pass_at_k, powers_up_to


@pytest.mark.parametrize(("n", "c", "k"), list(product([1, 5, 6], [0, 1, 3], [1, 2, 5])))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one(n, c, k):
    if c > n or k > n:
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(n, c, k)
        return
    attempts = [1] * c + [0] * (n - c)
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in combinations(attempts, k)]))


def test_pass_at_k_is_unbiased():
    """Its mean over draws of 8 attempts is 1 - (1 - p)^k; the mean of 'any of the first k' is too, but noisier."""
    right = np.random.default_rng(0).binomial(8, 0.3, size=4000)
    assert np.mean([pass_at_k(8, c, 4) for c in right]) == pytest.approx(1 - 0.7**4, abs=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Problems of unequal difficulty, 4 attempts each: a binomial interval over all attempts would be too narrow."""
    rng = np.random.default_rng(1)
    covered, binomial = 0, 0
    for _ in range(100):
        scores = rng.binomial(4, rng.beta(0.5, 0.5, size=40)) / 4
        found = estimate(scores)
        covered += found.low <= 0.5 <= found.high
        binomial += abs(scores.mean() - 0.5) <= 1.96 * (0.25 / 160) ** 0.5
    assert 88 <= covered <= 99 and binomial < covered - 10


def test_all_figures_are_reproducible():
    scores = np.random.default_rng(2).random(30)
    assert estimate(scores) == estimate(list(scores)) and compare(scores, scores[::-1]) == compare(scores, scores[::-1])


def test_few_differences_are_tested_exactly():
    found = compare([0.0, 0.0, 0.5, 0.25], [1.0, 0.5, 1.0, 0.25])
    assert (found.better, found.worse, found.problems) == (3, 0, 4)
    assert found.p_value == 2 / 2**3  # of the 8 sign patterns of the three that differ, two reach the sum
    assert found.difference.value == pytest.approx(0.5)
    assert compare([0.5, 1.0], [0.5, 1.0]).p_value == 1.0


def test_the_test_finds_what_is_there_and_nothing_else():
    """Of 200 comparisons of a policy with itself about 5 % are below 0.05; a real gain is found."""
    rng = np.random.default_rng(3)
    hard = rng.beta(0.4, 0.4, size=40)
    same = [compare(rng.binomial(8, hard) / 8, rng.binomial(8, hard) / 8).p_value for _ in range(200)]
    assert 2 <= sum(p < 0.05 for p in same) <= 22
    better = np.clip(hard + 0.15, 0, 1)
    assert compare(rng.binomial(8, hard) / 8, rng.binomial(8, better) / 8).p_value < 0.01


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_shown_ks():
    assert powers_up_to(1) == [1] and powers_up_to(32) == [1, 2, 4, 8, 16, 32] and powers_up_to(6) == [1, 2, 4, 6]
