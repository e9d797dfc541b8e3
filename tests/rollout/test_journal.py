"""Segments and verdicts are on disk soon after they arrive, and the step that is done again takes them up."""

import asyncio
import shutil
import time
from contextlib import contextmanager

import pytest

from tests.rollout.test_pools import Prompts, pools_over
from tests.rollout.test_scheduler import ScriptedPool, config
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout import journal
from ulorl_megatron.rollout.client import Finish, Generation
from ulorl_megatron.rollout.journal import Journal
from ulorl_megatron.rollout.sample import Status
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.store import PoolStore

ROLLOUT = config(length=32, segments=4)  # segments of 8


@pytest.fixture
def store(tmp_path):
    return PoolStore(tmp_path / "pools.sqlite")


@contextmanager
def as_after_a_kill(store):
    """What a kill at this moment would leave: the files as they are, opened by another process."""
    folder = store.path.parent / "killed"
    folder.mkdir()
    for file in store.path.parent.glob("pools.sqlite*"):
        shutil.copy(file, folder)
    copy = PoolStore(folder / "pools.sqlite")
    yield copy
    copy.close()
    shutil.rmtree(folder)


class Servers(ScriptedPool):
    """Every request gets a whole segment of its first id, sampled or not; those of `held` wait for `let_go`."""

    def __init__(self, held=(), finish=Finish.length):
        super().__init__()
        self.held, self.let_go, self.finish = set(held), asyncio.Event(), finish

    async def generate(self, input_ids, sampling, max_new_tokens, group, cut):
        self.calls.append(len(self.calls))
        number = self.calls[-1]
        await asyncio.sleep(0)
        if number in self.held:
            await self.let_go.wait()
        return Generation([5] * max_new_tokens, [-0.5] * max_new_tokens, [0] * max_new_tokens, self.finish)


async def judge(sample):
    return float(sample.id % 2)


async def collect(store, samples, servers, verify=judge, step=1):
    async with Journal(store).open(step) as keep:
        return await SegmentRollout(servers, ROLLOUT).collect(step, samples, verify, keep)


async def arrived(store, count):
    for _ in range(500):
        if len(store._arrived) >= count:  # committed, and nothing is being written
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{count} segments were not on disk after 10 s")


def test_what_arrived_before_a_kill_is_not_decoded_again(store):
    """6 of 8 segments arrive, then the trainer is killed: the next one asks for the other two only."""
    samples = pools_over(store).admit(1, Prompts())

    async def until_killed():
        decoding = asyncio.create_task(collect(store, samples, Servers(held={2, 5}, finish=Finish.eos)))
        await arrived(store, 6)
        with as_after_a_kill(store) as copy:
            copy.rewind(0)
            pools = pools_over(copy)
            pools.admit(1, Prompts())
            in_flight = pools.unfinished
            assert pools.recall(1) == 6
            servers = Servers(finish=Finish.eos)
            stats = await collect(copy, in_flight, servers)
            assert len(servers.calls) == 2 and (stats.recalled, stats.finished) == (6, 8)
            assert [s.reward for s in in_flight] == [0.0, 1.0] * 4
            released = pools.release(1)
            assert [s.id for s, _ in released] == list(range(8))
            pools.commit(1)
        decoding.cancel()
        await asyncio.wait({decoding})

    asyncio.run(until_killed())


def test_a_segment_without_its_verdict_is_judged_and_not_decoded(store):
    samples = pools_over(store).admit(1, Prompts())
    never = asyncio.Event()

    async def no_verdict(sample):
        await never.wait()

    async def until_killed():
        decoding = asyncio.create_task(collect(store, samples, Servers(finish=Finish.eos), no_verdict))
        await arrived(store, 8)
        with as_after_a_kill(store) as copy:
            pools = pools_over(copy)
            pools.admit(1, Prompts())
            in_flight = pools.unfinished
            assert pools.recall(1) == 8 and all(s.finished and s.status is Status.unfinished for s in in_flight)
            servers = Servers()
            stats = await collect(copy, in_flight, servers)
            assert servers.calls == [] and (stats.tokens, stats.finished) == (0, 8)
            assert [s.reward for s in in_flight] == [0.0, 1.0] * 4
        decoding.cancel()
        await asyncio.wait({decoding})

    asyncio.run(until_killed())


def test_it_is_on_disk_within_the_period_while_others_decode(store):
    samples = pools_over(store).admit(1, Prompts())

    async def measure():
        servers = Servers(held={7})
        decoding = asyncio.create_task(collect(store, samples, servers))
        begin = time.monotonic()
        await arrived(store, 7)
        seconds = time.monotonic() - begin
        servers.let_go.set()
        await decoding
        return seconds

    assert asyncio.run(measure()) < journal.PERIOD_S + 2.0  # a busy machine


def test_when_no_server_is_left_what_arrived_is_on_disk(store):
    samples = pools_over(store).admit(1, Prompts())

    class Last(Servers):
        async def generate(self, *arguments):
            if len(self.calls) == 5:
                raise UserError("no server is left")
            return await super().generate(*arguments)

    with pytest.raises(UserError, match="no server is left"):
        asyncio.run(collect(store, samples, Last()))
    assert len(store.arrivals()) == 5


def test_an_error_of_the_disk_stops_the_step(store, monkeypatch):
    samples = pools_over(store).admit(1, Prompts())

    def full(step, samples):
        raise OSError("No space left on device")

    monkeypatch.setattr(store, "arrive", full)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(collect(store, samples, Servers()))


def test_a_slow_disk_does_not_slow_decoding(store, monkeypatch):
    """Each write takes half a second; the event loop goes on meanwhile."""
    samples = pools_over(store).admit(1, Prompts())
    real = store.arrive

    def slow(step, samples):
        time.sleep(0.5)
        real(step, samples)

    monkeypatch.setattr(store, "arrive", slow)

    async def longest_pause():
        servers = Servers(held={7})
        decoding = asyncio.create_task(collect(store, samples, servers))
        longest = 0.0
        for _ in range(60):
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begin)
        servers.let_go.set()
        await decoding
        return longest

    assert asyncio.run(longest_pause()) < 0.4
    assert len(store.arrivals()) == 8


def test_a_step_without_news_ends_at_once(store):
    begin = time.monotonic()
    asyncio.run(collect(store, [], Servers()))
    assert time.monotonic() - begin < journal.PERIOD_S
