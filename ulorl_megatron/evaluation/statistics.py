"""What k attempts at each of n problems say of a policy, and of the difference between two.

The unit of chance is the problem: attempts at one problem are alike, so resampling draws whole problems (a cluster
bootstrap), and the test pairs two policies problem by problem. All is seeded: the same attempts, the same figures.
"""

from dataclasses import dataclass
from itertools import product
from math import comb
from typing import List, Sequence

import numpy as np

_SEED = 0
_RESAMPLES = 10_000
_EXACT_UP_TO = 12  # problems that differ: 4096 sign patterns are all tried
_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """value, and its interval of 95 % from `low` to `high`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """difference: of avg@k, the second policy's minus the first's, with its interval. p_value: of the permutation test.
    better, worse: problems on which the second did so. problems: those both were judged on."""

    difference: Estimate
    p_value: float
    better: int
    worse: int
    problems: int


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Probability that one at least of k attempts is right, without bias, from `attempts` of which `right` were right.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, Eq. 1). Raises ValueError for k above n.
    """
    if not 1 <= k <= attempts or not 0 <= right <= attempts:
        raise ValueError(f"pass@{k} of {right} right in {attempts} attempts")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over problems, with the percentile interval of a bootstrap over problems. values: one a problem."""
    array = np.asarray(values, dtype=np.float64)
    low, high = _interval(array)
    return Estimate(float(array.mean()), low, high)


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Two policies on the same problems. first, second: mean reward of each problem, in the same order.

    The p-value is two-sided, of the paired permutation test: if the policies were alike, the sign of each problem's
    difference would be a coin's. All sign patterns are tried where few problems differ, else 10,000 drawn ones.
    """
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    low, high = _interval(differences)
    return Comparison(
        Estimate(float(differences.mean()), low, high),
        _permutation(differences[differences != 0]),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        len(differences),
    )


def _interval(values: np.ndarray) -> List[float]:
    rng = np.random.default_rng(_SEED)
    # A thousand resamples at a time: a set of thousands of problems would need gigabytes at once.
    draws = (rng.integers(len(values), size=(1000, len(values))) for _ in range(_RESAMPLES // 1000))
    means = [values[draw].mean(axis=1) for draw in draws]
    tail = (1 - _LEVEL) / 2
    return [float(edge) for edge in np.quantile(np.concatenate(means), [tail, 1 - tail])]


def _permutation(differences: np.ndarray) -> float:
    count = len(differences)
    if count == 0:
        return 1.0
    observed = abs(differences.sum()) * (1 - 1e-12)  # the same sum in another order counts as reached
    if count <= _EXACT_UP_TO:
        signs = np.array(list(product((-1, 1), repeat=count)))
        return float((abs(signs @ differences) >= observed).mean())
    rng = np.random.default_rng(_SEED)
    reached = 0
    for _ in range(_RESAMPLES // 1000):
        signs = rng.integers(2, size=(1000, count)) * 2 - 1
        reached += int((abs(signs @ differences) >= observed).sum())
    return (reached + 1) / (_RESAMPLES + 1)  # the observed pattern is one of them, so never 0


def holm(p_values: Sequence[float]) -> List[float]:
    """Adjusted for so many tests at once (Holm 1979): below 0.05 in any of them by chance in 5 % of all cases."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def powers_up_to(k: int) -> List[int]:
    """1, 2, 4, ... and k itself: the k of pass@k that are shown."""
    powers = [2**i for i in range(k.bit_length()) if 2**i < k]
    return [*powers, k]
