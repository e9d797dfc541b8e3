"""Servers of other processes, found by the roll call in the run directory."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import tiny_config
from tests.rollout.support import PROMPT, SAMPLING
from tests.tiny_models import EOS
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.roll_call import Attendance, Present
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

PROGRAM = Path(__file__).parent / "serving.py"


def pool_of(run_dir, model, count, **settings):
    config = tiny_config(run_dir, model)
    config.servers.announced = count
    for name, value in settings.items():
        setattr(config.servers, name, value)
    return ServerPool(config, ServedModel(model, 272, frozenset([EOS])), backoff_s=0.1)


@contextmanager
def serving(run_dir, model, numbers, restarts):
    """One process a number; gives them and the file of their output."""
    with (run_dir / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, PROGRAM, run_dir, model, str(n), str(restarts)], stdout=output, stderr=output
            )
            for n in numbers
        ]
    try:
        yield processes, run_dir / "output"
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def decode(pool):
    return await asyncio.gather(*(pool.generate([*PROMPT, i], SAMPLING, 16) for i in range(8)))


async def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def kill_server_of(process):
    (fake,) = psutil.Process(process.pid).children()
    os.kill(fake.pid, signal.SIGKILL)


def test_they_are_found_brought_back_given_up_and_ended(tiny_moe, tmp_path):
    (tmp_path / "servers").mkdir()
    stale = Present("an earlier call", 1, "http://localhost:9", "old.log")
    (tmp_path / "servers" / "1.json").write_text(json.dumps(vars(stale)))

    async def work(pool):
        await pool.wait_ready()
        await pool.update_weights(tiny_moe, 4)
        async with pool.kept():
            before = await decode(pool)
            kill_server_of(first)
            await until(lambda: "ended with code -9; started again (1)" in output.read_text())
            during = await decode(pool)
            await until(lambda: len(pool.serving()) == 2)
        urls = [member.client.url for member in pool.members]
        await pool.close()
        return before, during, urls

    with serving(tmp_path, tiny_moe, [0, 1], restarts=1) as ((first, second), output):
        pool = pool_of(tmp_path, tiny_moe, 2, hang_timeout_s=1.0)
        pool.start()
        before, during, urls = asyncio.run(work(pool))
        assert stale.url not in urls and len(set(urls)) == 2
        assert {v for g in [*before, *during] for v in g.versions} == {4}, "only the current weights make tokens"
        fakes = psutil.Process(first.pid).children() + psutil.Process(second.pid).children()
        kill_server_of(first)
        second.send_signal(signal.SIGUSR2)
        assert [process.wait(20) for process in (first, second)] == [1, 0]
        assert "ended with code -9, after 1 restarts (servers.max_restarts)" in output.read_text()
        assert len(fakes) == 2 and psutil.wait_procs(fakes, timeout=5)[1] == []


def test_the_missing_one_is_named_with_its_log(tiny_moe, tmp_path):
    pool = pool_of(tmp_path, tiny_moe, 2, start_timeout_s=0.2)
    pool.start()
    with Attendance(tmp_path, 0, "http://rollout-0:20000", tmp_path / "logs" / "server-0.log") as there:
        there.answer()
        with pytest.raises(UserError) as error:
            asyncio.run(pool.wait_ready())
    text = str(error.value)
    assert "1 of 2 servers did not announce themselves within 0.2 s (servers.start_timeout_s)" in text
    assert f"server 1 (log {tmp_path}/logs/server-1.log)" in text and "0 at http://rollout-0:20000" in text


def test_a_number_is_one_server(tmp_path):
    first, second = (Attendance(tmp_path, 3, f"http://{name}:1", tmp_path / "log") for name in "ab")
    with first, pytest.raises(UserError, match="another process keeps server 3"):
        second.__enter__()
    with second:
        pass
