import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.sample import Sample, Segment, Status, lost
from ulorl_megatron.rollout.store import ConservationError, PoolStore

CAP = 12


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pools.sqlite"


def sample(id: int, step: int = 1) -> Sample:
    return Sample(id, group_id=id // 2, prompt_index=id, prompt_tokens=[7, 8, id], answer=str(id), created_step=step)


def grow(sample: Sample, step: int, *, finished: bool = False) -> Sample:
    """Four tokens with log-probs that float32 holds exactly."""
    at = sample.length
    segment = Segment(step, [at, at + 1, at + 2, at + 3], [-0.5, -1.25, 0.0, -7.0], [step - 1] * 4)
    sample.grow(segment, finished=finished, global_max_length=CAP)
    if sample.complete:
        sample.reward, sample.status = float(finished), Status.waiting
    return sample


def settle(sample: Sample, step: int, status: Status = Status.trained) -> Sample:
    sample.status, sample.settled_step = status, step
    return sample


def three_steps(store: PoolStore) -> list:
    """Two groups; returns what load() must give after each step."""
    a, b, c, d = (sample(i) for i in range(4))
    for s in (a, c, d):
        grow(s, 1)
    grow(b, 1, finished=True)
    states = [store.load()]
    store.commit(1, 4, [a, b, c, d])
    states.append(store.load())
    grow(a, 2, finished=True)
    grow(c, 2)
    for s in (a, b):
        settle(s, 2)
    e = grow(sample(4, step=2), 2)
    store.commit(2, 1, [a, b, c, d, e])
    states.append(store.load())
    grow(c, 3)
    settle(c, 3, Status.filtered)
    settle(grow(d, 3, finished=True), 3, Status.failed)
    store.commit(3, 0, [c, d, e])
    states.append(store.load())
    return states


def test_what_was_committed_is_there_again(path):
    store = PoolStore(path)
    one, two = grow(sample(0), 1), grow(sample(1), 1, finished=True)
    store.commit(1, 2, [one, two])
    store.close()

    again = PoolStore(path)
    assert again.load() == [one, two]
    assert (again.last_step, again.groups_issued) == (1, 1)
    assert again.check_conservation() == {
        Status.unfinished: 1, Status.waiting: 1, Status.trained: 0, Status.filtered: 0, Status.failed: 0
    }  # fmt: skip


def test_settled_samples_of_open_groups_come_with_reward_and_without_tokens(path):
    store = PoolStore(path)
    one, two = grow(sample(0), 1), settle(grow(sample(1), 1, finished=True), 1)
    store.commit(1, 2, [one, two])
    assert store.load() == [one, replace(two, segments=[])]
    assert store.trained() == {1: 1}


def test_rewind_restores_exactly_the_state_after_a_step(path):
    store = PoolStore(path)
    states = three_steps(store)
    assert store.counts() == {
        Status.unfinished: 1, Status.waiting: 0, Status.trained: 2, Status.filtered: 1, Status.failed: 1
    }  # fmt: skip
    for step in (3, 2, 1, 0):
        store.rewind(step)
        assert store.load() == states[step]
        assert store.last_step == step
        store.check_conservation()
    assert three_steps(store) == states, "the steps can be done again"


def test_rewind_ahead_or_behind_what_was_forgotten_is_refused(path):
    store = PoolStore(path)
    states = three_steps(store)
    with pytest.raises(ValueError, match="cannot rewind to step 4"):
        store.rewind(4)
    store.forget(2)
    with pytest.raises(ValueError, match="hold steps 2 to 3"):
        store.rewind(1)
    store.rewind(2)
    assert store.load() == states[2]


def test_forget_drops_tokens_of_settled_samples_only(path):
    store = PoolStore(path)
    three_steps(store)
    store.forget(2)
    store.close()
    with sqlite3.connect(path) as db:
        kept = {row[0] for row in db.execute("SELECT sample_id FROM segments")}
    assert kept == {2, 3, 4}, "0 and 1 trained in step 2; 2 and 3 settled later; 4 is unfinished"


def test_a_segment_that_arrived_outlives_the_process_before_any_commit(path):
    store = PoolStore(path)
    one, two = grow(sample(0), 1), grow(sample(1), 1, finished=True)
    judged = two.reward
    two.reward, two.status = None, Status.unfinished
    store.arrive(1, [one, two])
    two.reward = judged
    store.arrive(1, [two])
    store.close()

    again = PoolStore(path)
    assert again.load() == [] and again.last_step == 0
    first, second = again.arrivals()[0], again.arrivals()[1]
    assert (first.segment, first.finished, first.reward) == (one.segments[0], False, None)
    assert (second.segment, second.finished, second.reward) == (two.segments[0], True, 1.0)
    assert first.continues(sample(0)) and not first.continues(sample(1)), "their prompts differ"
    assert not first.continues(one), "it is the first segment, not the second"


def test_what_arrived_is_committed_once(path):
    store = PoolStore(path)
    one, two = grow(sample(0), 1), grow(sample(1), 1)
    store.arrive(1, [one])
    store.commit(1, 2, [one, two])
    assert store.load() == [one, two] and store.arrivals() == {}
    grow(one, 2)
    store.arrive(2, [one])
    assert store.load() == [replace(one, segments=one.segments[:1]), two], "not part of the pools before its commit"
    store.commit(2, 0, [one])
    assert store.load() == [one, two]


def test_segments_arrive_while_another_thread_forgets(path):
    """With rollout.overlap the journal writes while the main thread drops what old checkpoints needed."""
    store = PoolStore(path)
    three_steps(store)
    late = [grow(Sample(10 + i, 5 + i, 0, [7], "", created_step=4), 4) for i in range(200)]
    with ThreadPoolExecutor(1) as thread:
        writing = [thread.submit(store.arrive, 4, [one]) for one in late]
        for _ in range(50):
            store.forget(2)
        for future in writing:
            future.result()
    assert len(store.arrivals()) == 200 and store.last_step == 3


def test_only_segments_of_the_next_step_arrive(path):
    store = PoolStore(path)
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"a segment of step {step} cannot arrive after step 0"):
            store.arrive(step, [grow(sample(0), step)])


def test_a_stored_segment_that_no_sample_has_breaks_the_law(path):
    store = PoolStore(path)
    store.arrive(1, [grow(sample(0), 1), grow(sample(1), 1)])
    with pytest.raises(ConservationError, match="2 segments of step 1 are stored, the samples have 1"):
        store.commit(1, 2, [sample(0), grow(sample(1), 1)])
    store.discard([0])
    store.commit(1, 2, [sample(0), grow(sample(1), 1)])


def test_after_a_rewind_later_segments_wait_for_their_step_and_lost_weights_are_called_so(path):
    """Checkpoint of step 1, pools of step 3, segments of step 4: weights 1 are there again, weights 2 and 3 never."""
    store = PoolStore(path)
    three_steps(store)
    in_flight = Sample(5, 2, 5, [7, 8, 5], "5", created_step=4)
    store.arrive(4, [grow(in_flight, 4)])
    store.rewind(1)
    assert {id: set(a.segment.versions) for id, a in store.arrivals().items()} == {0: {1}, 2: {1}, 4: {1}}
    a, b, c, d = (s for s in store.load())
    store.commit(2, 1, [grow(a, 2, finished=True), grow(c, 2), grow(sample(4, step=2), 2)])
    assert {id: set(a.segment.versions) for id, a in store.arrivals().items()} == {2: {lost(2)}, 3: {lost(2)}}
    store.discard([2, 3])
    store.commit(3, 0, [])
    assert {id: set(a.segment.versions) for id, a in store.arrivals().items()} == {5: {lost(3)}}
    store.rewind(0)
    store.rewind(0)
    assert {v for v in store._db.execute("SELECT versions FROM segments WHERE step = 4")} == {
        (np.array([lost(3)] * 4, dtype=np.int32).tobytes(),)
    }, "lost once and for all"


def test_a_first_step_under_another_origin_takes_nothing_up(path):
    store = PoolStore(path)
    assert store.begin_as("model A") == 0
    store.arrive(1, [grow(sample(0), 1)])
    store.close()
    store = PoolStore(path)
    assert store.begin_as("model A") == 0 and set(store.arrivals()) == {0}
    assert store.begin_as("model B") == 1 and store.arrivals() == {}


def test_a_settled_sample_cannot_train_again(path):
    store = PoolStore(path)
    one, two = settle(grow(sample(0), 1, finished=True), 1), grow(sample(1), 1)
    store.commit(1, 2, [one, two])
    with pytest.raises(ConservationError, match="sample 0"):
        store.commit(2, 0, [settle(one, 2)])
    assert store.last_step == 1 and store.trained() == {0: 1}


def test_steps_follow_each_other(path):
    store = PoolStore(path)
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"step {step}"):
            store.commit(step, 0, [])


def test_a_lost_sample_breaks_the_law_and_nothing_is_written(path):  # slime#2238
    store = PoolStore(path)
    with pytest.raises(ConservationError, match="issued 3 != 2 = 2 unfinished"):
        store.commit(1, 3, [sample(0), sample(1)])
    assert store.last_step == 0 and store.load() == []


def test_the_reward_of_what_was_issued_waits_for_the_last_of_it(path):
    store = PoolStore(path)
    assert store.mean_reward() is None
    a, b = grow(sample(0), 1, finished=True), grow(sample(1), 1)
    store.commit(1, 2, [a, b])
    assert store.mean_reward() is None, "b is unfinished, and may as well be wrong"
    c = grow(sample(2, step=2), 2, finished=True)
    store.commit(2, 1, [b, c])
    assert store.mean_reward() is None, "c is of a later step than b, and short ones come first"
    settle(b, 3, Status.failed)
    store.commit(3, 0, [b])
    assert store.mean_reward() == 1.0  # of c; of b there is none


def test_a_complete_sample_without_reward_breaks_the_law(path):
    store = PoolStore(path)
    one = grow(sample(0), 1, finished=True)
    one.reward = None
    with pytest.raises(ConservationError, match="neither a reward"):
        store.commit(1, 1, [one])


def test_a_second_process_is_refused_by_name(path):
    store = PoolStore(path)
    code = f"""
        from pathlib import Path
        from ulorl_megatron.rollout.store import PoolStore
        PoolStore(Path({str(path)!r}))
    """
    second = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert second.returncode != 0
    assert f"UserError: {path} is in use by process {os.getpid()} on " in second.stderr
    store.commit(1, 1, [sample(0)])
    store.close()
    PoolStore(path).close()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from ulorl_megatron.rollout.sample import Sample, Segment
    from ulorl_megatron.rollout.store import PoolStore

    def samples(step, count):
        n = 20000  # more than SQLite's page cache holds: the file itself is half written at the kill
        for i in range(count):
            segment = Segment(step, [1] * n, [-1.0] * n, [0] * n)
            yield Sample(1000 * step + i, step, 0, [1], "", step, [segment])

    def killed(samples):
        yield from samples
        os.kill(os.getpid(), signal.SIGKILL)

    store = PoolStore(Path(sys.argv[1]))
    store.commit(1, 4, samples(1, 4))
    store.commit(2, 50, killed(samples(2, int(sys.argv[2]))))
"""


@pytest.mark.parametrize("survivors", [1, 17, 50])
def test_a_kill_inside_a_commit_leaves_the_step_before(path, survivors):
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(path), str(survivors)])
    assert child.returncode == -signal.SIGKILL
    assert json.loads((path.parent / "pools.sqlite.owner").read_text())["pid"], "it had no time to tidy up"

    store = PoolStore(path)
    assert store.last_step == 1
    assert [s.id for s in store.load()] == [1000, 1001, 1002, 1003]
    assert all(s.length == 20000 for s in store.load())
    store.check_conservation()
    store.commit(2, 1, [sample(1, step=2)])


def test_any_history_can_be_rewound(path):
    """Random histories against the list of states they went through."""
    rng = random.Random(0)
    store = PoolStore(path)
    states, live, next_id = [store.load()], [], 0
    for step in range(1, 15):
        new = [sample(next_id + i, step) for i in range(rng.randint(0, 3))]
        next_id += len(new)
        live += new
        for s in live:
            if not s.complete and rng.random() < 0.8:
                grow(s, step, finished=rng.random() < 0.3)
            if s.complete and rng.random() < 0.4:
                settle(s, step, rng.choice([Status.trained, Status.filtered]))
        store.commit(step, len(new), live)
        live = [s for s in live if s.settled_step is None]
        states.append(store.load())
    for step in sorted(range(15), reverse=True):
        store.rewind(step)
        assert store.load() == states[step]


def test_a_file_that_is_no_pool_is_named(path):
    path.write_text("something else, and long enough to be no header of an empty database " * 20)
    with pytest.raises(UserError, match="is not a pool file"):
        PoolStore(path)


def test_another_format_is_named(path):
    PoolStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    with pytest.raises(UserError, match="has format 99"):
        PoolStore(path)


def test_no_shared_memory_and_no_write_ahead_log(path):
    store = PoolStore(path)
    store.commit(1, 1, [sample(0)])
    assert {p.name for p in path.parent.iterdir()} <= {
        "pools.sqlite", "pools.sqlite-journal", "pools.sqlite.owner"
    }  # fmt: skip
