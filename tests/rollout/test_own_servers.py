"""Own servers that are killed or stopped: started again within a budget, with the current weights before any work.

The processes are real, the program in them is the stand-in. tests/servers/test_failing_servers.py does it with SGLang.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import tiny_config
from tests.rollout.support import PROMPT, SAMPLING
from tests.tiny_models import EOS
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout import server
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

FAKE = Path(__file__).parents[1] / "fake_server.py"


@pytest.fixture
def start(monkeypatch, tmp_path, tiny_moe):
    """start(work, **settings): `await work(pool)` with a pool of two processes of our own, watched."""

    def command(config, index, port):
        return [sys.executable, str(FAKE), str(port), "0.3", "0"]

    monkeypatch.setattr(server, "command", command)

    def run(work, at_start=lambda pool: None, **settings):
        config = tiny_config(tmp_path, tiny_moe)
        config.servers.count = 2
        config.servers.hang_timeout_s = 2.0
        for name, value in settings.items():
            setattr(config.servers, name, value)
        pool = ServerPool(config, ServedModel(tiny_moe, 272, frozenset([EOS])), backoff_s=0.01)
        pool.start()
        at_start(pool)

        async def ready_and_work():
            await pool.wait_ready()
            return await work(pool)

        try:
            return asyncio.run(ready_and_work())
        finally:
            pool.stop()

    return run


async def decode(pool, n=12):
    return await asyncio.gather(*(pool.generate([*PROMPT, i], SAMPLING, 16) for i in range(n)))


async def recovered(pool):
    begin = time.monotonic()
    while len(pool.serving()) < len(pool.members):
        assert time.monotonic() < begin + 20
        await asyncio.sleep(0.02)


def hit(pool, sign, index=0):
    os.killpg(pool.members[index].process.pid, sign)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_in_the_middle_of_decoding(start, tiny_moe, sign):  # NeMo-RL#3187
    async def work(pool):
        await pool.update_weights(tiny_moe, 4)
        pid = pool.members[0].process.pid
        async with pool.kept():
            decoding = asyncio.create_task(decode(pool))
            await asyncio.sleep(0.1)
            hit(pool, sign)
            got = await decoding
            await recovered(pool)
            again = await decode(pool)
        return got, again, pid, pool.members[0].process.pid, pool.metrics()

    got, again, old, new, metrics = start(work)
    assert [g.tokens for g in got] == [g.tokens for g in again], "no answer was lost, and none is of other weights"
    assert {v for g in got + again for v in g.versions} == {4}
    assert old != new and metrics["servers/restarts"] == 1 and metrics["servers/serving"] == 2


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_while_weights_are_updated(start, tiny_moe, sign):
    async def work(pool):
        hit(pool, signal.SIGSTOP)  # so that the update is surely in progress
        update = asyncio.create_task(pool.update_weights(tiny_moe, 4))
        await asyncio.sleep(0.1)
        hit(pool, sign)
        await update
        before = [member.version for member in pool.members]
        async with pool.kept():
            got = await decode(pool, 4)
            await recovered(pool)
        return before, got, [member.version for member in pool.members]

    before, got, after = start(work)
    assert before == [None, 4] and after == [4, 4]
    assert {v for g in got for v in g.versions} == {4}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_at_the_start(start, sign):
    async def work(pool):
        async with pool.kept():
            await decode(pool, 4)
            return [(member.version, member.returns) for member in pool.members]

    assert start(work, at_start=lambda pool: hit(pool, sign), start_timeout_s=5.0) == [(0, 1), (0, 0)]


def test_between_the_steps_it_is_started_again_at_the_next(start, tiny_moe):
    """No event loop runs while the policy trains; a server that died then is found by the update."""

    async def work(pool):
        hit(pool, signal.SIGKILL)
        await asyncio.to_thread(time.sleep, 0.2)
        await pool.update_weights(tiny_moe, 1)
        async with pool.kept():
            await recovered(pool)
            return [member.version for member in pool.members]

    assert start(work) == [1, 1]


def test_all_at_once_and_the_requests_still_come(start, tiny_moe):
    async def work(pool):
        await pool.update_weights(tiny_moe, 4)
        async with pool.kept():
            decoding = asyncio.create_task(decode(pool))
            await asyncio.sleep(0.1)
            hit(pool, signal.SIGKILL, 0)
            hit(pool, signal.SIGKILL, 1)
            return await decoding, await decode(pool)

    got, again = start(work)
    assert [g.tokens for g in got] == [g.tokens for g in again]


def test_the_budget_ends_and_the_run_stops_with_the_end_of_the_logs(start):  # NeMo-RL#3613
    async def work(pool):
        async with pool.kept():
            for _ in range(3):
                hit(pool, signal.SIGKILL, 0)
                hit(pool, signal.SIGKILL, 1)
                await asyncio.sleep(0.1)
                await decode(pool, 2)

    with pytest.raises(UserError, match=r"no server is left: .* ended with code -9. Its log ends:") as error:
        start(work, max_restarts=1)
    assert "What was decoded is safe in the pools" in str(error.value)
