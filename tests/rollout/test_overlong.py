"""What long and truncated responses are worth: experience.overlong zero, filter, soft."""

import pytest

from tests.rollout.test_pools import CAP, Prompts, complete
from ulorl_megatron.algorithm import overlong_penalty
from ulorl_megatron.config.schema import ExperienceConfig, Overlong, Release, RolloutConfig
from ulorl_megatron.rollout.pools import Pools
from ulorl_megatron.rollout.sample import Segment, Status
from ulorl_megatron.rollout.store import PoolStore

CACHE = 8


@pytest.fixture
def store(tmp_path):
    return PoolStore(tmp_path / "pools.sqlite")


def pools_over(store, overlong, dynamic_sampling=True):
    cache = CACHE if overlong is Overlong.soft else 0
    experience = ExperienceConfig(Release.sample, dynamic_sampling, overlong, cache)
    return Pools(store, RolloutConfig(global_max_length=CAP, prompts_per_step=2, group_size=4), experience)


def grow(sample, length, reward, step=1):
    """`length` tokens and EOS, or truncated at CAP with reward None."""
    segment = Segment(step, [1] * length, [-1.0] * length, [0] * length)
    sample.grow(segment, finished=reward is not None, global_max_length=CAP)
    sample.reward, sample.status = reward or 0.0, Status.waiting
    return sample


def released(pools, step=1):
    return {sample.id: advantage for sample, advantage in pools.release(step)}


def advantages(*rewards):
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / std for r in rewards]


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (CAP - CACHE, 0.0), (CAP - CACHE + 2, -0.25), (CAP - 1, -0.875), (CAP, -1.0)]
)
def test_the_penalty_falls_over_the_cache(length, penalty):
    assert overlong_penalty(length, CAP, CACHE) == penalty


def test_zero_a_truncated_sample_is_a_wrong_one(store):
    pools = pools_over(store, Overlong.zero)
    group = pools.admit(1, Prompts())[:4]
    grow(group[0], 5, 1.0), grow(group[1], CAP, None)
    assert list(released(pools).values()) == pytest.approx(advantages(1, 0), rel=1e-5)


def test_soft_lowers_the_advantage_of_long_responses(store):
    """Those that trained before count with their own penalty, from the store too."""
    pools = pools_over(store, Overlong.soft)
    a, b, c, d = pools.admit(1, Prompts())[:4]
    grow(a, 5, 1.0), grow(b, CAP - 4, 1.0), grow(c, CAP, None)
    assert list(released(pools).values()) == pytest.approx(advantages(1, 0.5, -1), rel=1e-5)
    assert [s.reward for s in (a, b, c)] == [1.0, 1.0, 0.0]  # the verdict stays what it is
    pools.commit(1)
    for again in (pools, pools_over(store, Overlong.soft)):
        again.admit(2, Prompts())
        last = next(s for s in again.unfinished if s.id == d.id)
        grow(last, CAP - 2, 1.0, step=2)
        assert released(again, 2) == pytest.approx({d.id: advantages(1, 0.5, -1, 0.25)[3]}, rel=1e-5)


def test_soft_right_answers_of_different_lengths_are_no_contrast(store):
    pools = pools_over(store, Overlong.soft)
    group = pools.admit(1, Prompts())[:4]
    for sample, length in zip(group, (5, CAP - 4, CAP - 2, CAP - 1), strict=True):
        grow(sample, length, 1.0)
    assert released(pools) == {} and all(s.status is Status.filtered for s in group)


def test_soft_without_dynamic_sampling_lengths_alone_train(store):
    pools = pools_over(store, Overlong.soft, dynamic_sampling=False)
    group = pools.admit(1, Prompts())[:4]
    for sample, length in zip(group, (5, 5, 5, CAP - 4), strict=True):
        grow(sample, length, 1.0)
    assert list(released(pools).values()) == pytest.approx(advantages(1, 1, 1, 0.5), rel=1e-5)


def test_filter_truncated_samples_leave_and_do_not_count(store):
    pools = pools_over(store, Overlong.filter)
    new = pools.admit(1, Prompts())
    a, b, c, d = new[:4]
    grow(a, 5, 1.0), grow(b, CAP, None)
    assert released(pools) == {} and b.status is Status.filtered  # no wrong member yet
    counts = pools.commit(1)
    assert (counts[Status.filtered], counts[Status.waiting], counts[Status.unfinished]) == (1, 1, 6)
    pools = pools_over(store, Overlong.filter)  # a resumed run knows it too
    pools.admit(2, Prompts())
    by_id = {s.id: s for s in pools.unfinished}
    complete(by_id[c.id], 0, step=2), complete(by_id[d.id], 1, step=2)
    assert list(released(pools, 2).values()) == pytest.approx(advantages(1, 0, 1), rel=1e-5)
    assert pools.commit(2)[Status.trained] == 3  # and the conservation law held, which commit checks


def test_filter_a_group_that_is_all_truncated_leaves_whole(store):
    pools = pools_over(store, Overlong.filter, dynamic_sampling=False)
    for sample in pools.admit(1, Prompts())[:4]:
        grow(sample, CAP, None)
    assert released(pools) == {}
    counts = pools.commit(1)
    assert counts[Status.filtered] == 4 and counts[Status.trained] == 0
