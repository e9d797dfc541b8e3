import random
from dataclasses import dataclass
from typing import List

import pytest

from ulorl_megatron.config.schema import ExperienceConfig, Release, RolloutConfig
from ulorl_megatron.rollout.pools import Pools
from ulorl_megatron.rollout.sample import Segment, Status
from ulorl_megatron.rollout.store import ConservationError, PoolStore

CAP, SEGMENT = 32, 8


@dataclass
class Prompt:
    index: int
    tokens: List[int]
    answer: str


class Prompts:
    """Row i % 5 at position i; remembers what was taken."""

    def __init__(self):
        self.taken = []

    def take(self, position, n):
        self.taken += range(position, position + n)
        return [Prompt((position + i) % 5, [position + i], "42") for i in range(n)]


@pytest.fixture
def store(tmp_path):
    return PoolStore(tmp_path / "pools.sqlite")


def pools_over(store, *, release="sample", dynamic_sampling=True, prompts=2, group=4) -> Pools:
    rollout = RolloutConfig(global_max_length=CAP, prompts_per_step=prompts, group_size=group)
    return Pools(store, rollout, ExperienceConfig(Release(release), dynamic_sampling))


def complete(sample, reward, step=1):
    sample.grow(Segment(step, [1], [-1.0], [0]), finished=True, global_max_length=CAP)
    sample.reward, sample.status = float(reward), Status.waiting


def fail(sample, step=1):
    sample.grow(Segment(step, [1], [-1.0], [0]), finished=True, global_max_length=CAP)
    sample.status, sample.settled_step = Status.failed, step


def ids(released):
    return [sample.id for sample, _ in released]


def test_a_fresh_start_fills_the_room(store):
    prompts = Prompts()
    pools = pools_over(store)
    new = pools.admit(1, prompts)
    assert [s.id for s in new] == list(range(8)) and pools.unfinished == new
    assert [s.group_id for s in new] == [0] * 4 + [1] * 4
    assert prompts.taken == [0, 1]


def test_only_whole_groups_enter_beside_the_unfinished(store):
    prompts, pools = Prompts(), pools_over(store)
    new = pools.admit(1, prompts)
    for s in new[:3] + new[4:7]:
        complete(s, 0)
    pools.commit(1)
    assert [s.group_id for s in pools.admit(2, prompts)] == [2] * 4, "6 places are free: one group of 4"
    assert len(pools.unfinished) == 6


def test_a_resume_admits_what_an_unbroken_run_would(store):  # AReaL#1345
    unbroken, resumed = Prompts(), Prompts()
    pools = pools_over(store)
    for s in pools.admit(1, unbroken)[:5]:
        complete(s, 0)
    pools.commit(1)
    new = pools.admit(2, unbroken)  # the process ends here, before commit

    again = pools_over(store)
    assert again.admit(2, resumed) == new
    assert again.unfinished == pools.unfinished
    assert resumed.taken == [t for t in unbroken.taken if t >= 2]


def test_a_prompt_row_may_come_again_as_another_group(store):
    pools = pools_over(store, prompts=7, group=2)
    new = pools.admit(1, Prompts())
    rows = [(s.group_id, s.prompt_index) for s in new[::2]]
    assert rows == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 0), (6, 1)]


def test_sample_release_waits_for_a_right_and_a_wrong_member(store):
    pools = pools_over(store)
    a, b, c, d = pools.admit(1, Prompts())[:4]
    complete(a, 1)
    complete(b, 1)
    assert pools.release(1) == []
    pools.commit(1)
    pools.admit(2, Prompts())
    complete(c, 0, step=2)
    released = dict((s.id, advantage) for s, advantage in pools.release(2))
    std = (1 / 3) ** 0.5  # of 1, 1, 0 with Bessel's correction
    assert released == pytest.approx({0: (1 / 3) / std, 1: (1 / 3) / std, 2: (-2 / 3) / std}, rel=1e-5)
    assert all(s.status is Status.trained and s.settled_step == 2 for s in (a, b, c))
    assert d.status is Status.unfinished


def test_members_trained_earlier_count_but_do_not_train_again(store):
    pools = pools_over(store)
    a, b, c, d = pools.admit(1, Prompts())[:4]
    complete(a, 1)
    complete(b, 0)
    assert ids(pools.release(1)) == [0, 1]
    pools.commit(1)

    pools = pools_over(store)  # also after a restart
    pools.admit(2, Prompts())
    c, d = (s for s in pools.unfinished if s.id in (2, 3))
    complete(c, 1, step=2)
    ((sample, advantage),) = pools.release(2)
    assert sample is c
    assert advantage == pytest.approx((1 / 3) / (1 / 3) ** 0.5, rel=1e-5), "mean and std over 1, 0, 1"
    pools.commit(2)
    assert store.trained() == {0: 1, 1: 1, 2: 2}


@pytest.mark.parametrize("reward", [0, 1])
def test_a_whole_group_of_equal_rewards_is_filtered(store, reward):
    pools = pools_over(store)
    group = pools.admit(1, Prompts())[:4]
    for s in group[:3]:
        complete(s, reward)
    assert pools.release(1) == [] and group[0].status is Status.waiting
    complete(group[3], reward)
    assert pools.release(1) == []
    assert all(s.status is Status.filtered and s.settled_step == 1 for s in group)


def test_without_dynamic_sampling_equal_rewards_train_with_advantage_0(store):
    pools = pools_over(store, dynamic_sampling=False)
    group = pools.admit(1, Prompts())[:4]
    for s in group:
        complete(s, 1)
    assert [a for _, a in pools.release(1)] == [0.0] * 4


def test_group_release_waits_for_the_whole_group(store):
    pools = pools_over(store, release="group")
    a, b, c, d = pools.admit(1, Prompts())[:4]
    complete(a, 1)
    complete(b, 0)
    complete(c, 0)
    assert pools.release(1) == []
    fail(d)
    assert ids(pools.release(1)) == [0, 1, 2], "a failed member is not waited for, and does not count"


def test_a_failed_member_has_no_reward_in_the_group(store):
    pools = pools_over(store)
    a, b, c, d = pools.admit(1, Prompts())[:4]
    for s in (a, b, c):
        complete(s, 1)
    fail(d)
    assert pools.release(1) == []
    assert a.status is Status.filtered and d.status is Status.failed and d.reward is None


def test_settled_samples_of_open_groups_keep_no_tokens_in_memory(store):
    pools = pools_over(store)
    a, b, *_ = pools.admit(1, Prompts())[:4]
    complete(a, 1)
    complete(b, 0)
    released = pools.release(1)
    pools.commit(1)
    held = [s for group in pools._groups.values() for s in group if s.status is Status.trained]
    assert [s.segments for s in held] == [[], []]
    assert all(s.length == 1 for s, _ in released), "those handed out keep theirs"


@pytest.mark.parametrize("release", ["sample", "group"])
@pytest.mark.parametrize("restart", [False, True])
def test_the_law_holds_over_a_random_run_and_none_trains_twice(store, release, restart):  # slime#2238
    rng = random.Random(3)
    prompts, pools, trained = Prompts(), pools_over(store, release=release), {}
    for step in range(1, 40):
        if restart and step % 3 == 0:
            pools = pools_over(store, release=release)
        pools.admit(step, prompts)
        assert len(pools.unfinished) <= 8
        for s in pools.unfinished:
            outcome = rng.random()
            if outcome < 0.1:
                continue  # its request failed
            if outcome < 0.6:
                s.grow(Segment(step, [1] * SEGMENT, [-1.0] * SEGMENT, [0] * SEGMENT), finished=False,
                       global_max_length=CAP)  # fmt: skip
                if s.truncated:
                    s.reward, s.status = 0.0, Status.waiting
            elif outcome < 0.65:
                fail(s, step)
            else:
                complete(s, rng.randint(0, 1), step)
        for s, _ in pools.release(step):
            assert s.id not in trained
            trained[s.id] = step
        counts = pools.commit(step)
        assert sum(counts.values()) == 4 * len(set(prompts.taken))
        assert counts == store.check_conservation()
    assert store.trained() == trained
    assert min(counts[s] for s in (Status.trained, Status.filtered, Status.failed)) > 0
    assert prompts.taken == sorted(set(prompts.taken)), "no prompt is issued twice or left out"


def recalled(store, step=1):
    """Pools as after a kill: the step begins again, and takes up what arrived."""
    pools = pools_over(store)
    pools.admit(step, Prompts())
    return pools, pools.recall(step)


def test_what_arrived_is_given_back_as_it_was(store):
    pools = pools_over(store)
    pools.admit(1, Prompts())
    a, b, c, d, *_ = pools.unfinished
    complete(a, 1)
    complete(b, 0)
    b.reward, b.status = None, Status.unfinished  # killed before its verdict
    c.grow(Segment(1, [1, 2], [-1.0, -2.0], [0, 0]), finished=False, global_max_length=CAP)
    store.arrive(1, [a, b, c])

    pools, count = recalled(store)
    assert count == 3
    again = {s.id: s for group in pools._groups.values() for s in group}
    assert [again[s.id] for s in (a, b, c, d)] == [a, b, c, d]
    assert again[1].finished and again[1] in pools.unfinished, "to be judged, not to be decoded"


def test_what_does_not_continue_a_sample_is_dropped(store):
    pools = pools_over(store)
    samples = pools.admit(1, Prompts())
    for s in samples[:3]:
        complete(s, 1)
    samples[0].prompt_tokens.append(99)  # the data set has another row there now
    samples[1].segments[0].versions[:] = [1]  # of weights that come after the step
    samples[2].id = 77  # no such sample
    store.arrive(1, samples[:3])
    pools, count = recalled(store)
    assert count == 0 and store.arrivals() == {}
    assert all(not s.segments for s in pools.unfinished)
    pools.commit(1)


@pytest.mark.parametrize("release", ["sample", "group"])
def test_steps_done_again_after_a_rewind_find_every_segment(store, release):
    """Whatever step the checkpoint is of, nothing is decoded again and the same samples train in the same steps."""
    rng = random.Random(5)
    prompts = Prompts()

    def run(first, last, decode):
        pools = pools_over(store, release=release)
        for step in range(first, last + 1):
            pools.admit(step, prompts)
            in_flight = pools.unfinished
            pools.recall(step)
            for s in in_flight:
                decode(s, step)
            pools.release(step)
            pools.commit(step)

    def decode(s, step):
        if rng.random() < 0.5:
            s.grow(Segment(step, [1] * SEGMENT, [-1.0] * SEGMENT, [step - 1] * SEGMENT), finished=False,
                   global_max_length=CAP)  # fmt: skip
            if s.truncated:
                s.reward, s.status = 0.0, Status.waiting
        else:
            complete(s, rng.randint(0, 1), step)

    def nothing_to_decode(s, step):
        assert s.segments[-1].step == step

    run(1, 12, decode)
    trained, counts = store.trained(), store.counts()
    assert len(trained) > 10
    for step in (11, 7, 0):
        store.rewind(step)
        run(step + 1, 12, nothing_to_decode)
        assert (store.trained(), store.counts()) == (trained, counts)


def test_a_sample_lost_in_memory_is_noticed(store):
    pools = pools_over(store)
    pools.admit(1, Prompts())
    del pools._groups[0][0]
    with pytest.raises(ConservationError, match="in memory"):
        pools.commit(1)
