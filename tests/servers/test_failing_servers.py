"""Two real SGLang servers that are killed or stopped: in mid-decode, while weights are updated, and at their start.

tests/rollout/test_own_servers.py does more of this, in seconds, with the stand-in.
"""

import asyncio
import os
import signal
import threading
import time

import pytest

from tests.conftest import tiny_config
from tests.tiny_models import tiny_model
from ulorl_megatron.rollout.client import Sampling
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

pytestmark = pytest.mark.slow

PROMPT = list(b"What is 2 + 3?")
GREEDY = Sampling(temperature=0.0)
LENGTH = 300


@pytest.fixture(scope="module")
def pool(tmp_path_factory, tiny_moe):
    """Two servers, of which the first was killed two seconds after its start and the second stopped."""
    config = tiny_config(tmp_path_factory.mktemp("pair"), tiny_moe)
    config.data.max_prompt_length = 960
    config.servers.count = 2
    config.servers.start_timeout_s = 300.0
    config.servers.hang_timeout_s = 15.0
    config.servers.max_restarts = 10
    pool = ServerPool(config, ServedModel.from_path(tiny_moe))
    pool.start()

    def hit_both():
        time.sleep(2)
        hit(pool, 0, signal.SIGKILL)
        hit(pool, 1, signal.SIGSTOP)
        pool.members[1].deadline = time.monotonic()  # as if servers.start_timeout_s had passed

    striker = threading.Thread(target=hit_both)
    striker.start()
    try:
        in_a_loop(pool, pool.wait_ready)
        striker.join()
        yield pool
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("other") / "moe", "moe", seed=7)


def in_a_loop(pool, work):
    async def run():
        try:
            return await work()
        finally:
            for member in pool.members:
                await member.client.close()

    return asyncio.run(run())


def hit(pool, index, sign):
    os.killpg(pool.members[index].process.pid, sign)


async def decode(pool):
    """(tokens, versions) of 8 responses, on both servers if there are two."""
    got = await asyncio.gather(*(pool.generate([*PROMPT, i], GREEDY, LENGTH) for i in range(8)))
    return [g.tokens for g in got], {v for g in got for v in g.versions}


async def recovered(pool):
    deadline = time.monotonic() + 300
    while len(pool.serving()) < 2:
        assert time.monotonic() < deadline, [m.fault for m in pool.members]
        await asyncio.sleep(0.1)


async def by_each(pool):
    """One greedy response of each server by itself: they hold the same weights only if these are equal."""
    return [(await member.client.generate(PROMPT, GREEDY, 40, timeout_s=60.0)).tokens for member in pool.members]


def test_at_the_start(pool):
    """See the fixture: both were started again, and work."""
    assert [(member.version, member.returns) for member in pool.members] == [(0, 1), (0, 1)]
    first, second = in_a_loop(pool, lambda: by_each(pool))
    assert first == second


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_in_the_middle_of_decoding(pool, other, sign):  # NeMo-RL#3187, verl#7155
    version = 10 + int(sign)

    async def work():
        await pool.update_weights(other, version)
        async with pool.kept():
            undisturbed = await decode(pool)
            decoding = asyncio.create_task(decode(pool))
            await asyncio.sleep(0.5)
            assert pool.members[0].outstanding > 0
            hit(pool, 0, sign)
            disturbed = await decoding
            await recovered(pool)
            return undisturbed, disturbed, await by_each(pool)

    undisturbed, disturbed, (first, second) = in_a_loop(pool, work)
    assert undisturbed == disturbed and disturbed[1] == {version}
    assert first == second, "the new process got the weights of the run before any work"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_while_weights_are_updated(pool, tiny_moe, other, sign):
    version = 100 + int(sign)

    async def work():
        await pool.update_weights(tiny_moe, version - 1)
        hit(pool, 1, signal.SIGSTOP)  # so that the update is surely in progress
        update = asyncio.create_task(pool.update_weights(other, version))
        await asyncio.sleep(0.3)
        hit(pool, 1, sign)
        await update
        confirmed = [member.version for member in pool.members]
        async with pool.kept():
            _, versions = await decode(pool)
            await recovered(pool)
            return confirmed, versions, await by_each(pool)

    confirmed, versions, (first, second) = in_a_loop(pool, work)
    assert confirmed == [version, None] and versions == {version}
    assert first == second
