"""kill -9 of `ulorl train`, of its SGLang server, and of both, in the middle of steps: the run is the unbroken one.

tests/rollout/test_kills.py does it fifty times in the time of one of these.
"""

import os
import random
import signal
import sqlite3
import subprocess
import time
from contextlib import closing

import psutil
import pytest

from tests.servers.support import command, records, train
from ulorl_megatron.rollout.sample import Status
from ulorl_megatron.rollout.store import PoolStore

STEPS = 5

# A run with one outcome: sampling so cold that it is greedy, and since the members of a group then agree, they train
# with an advantage of 0 and the weights stay. No checkpoint is dropped, so that all tokens stay in the pools. The
# server decodes 16 of the 128 samples at a time, so that segments arrive all through a step.
SETTINGS = (
    "rollout.temperature=0.0001",
    "experience.dynamic_sampling=false",
    "algorithm.max_engine_mismatch=null",
    "checkpoint.keep_last=100",
    "servers.max_restarts=10",
    "servers.extra_args=[--max-running-requests=16]",
    f"run.total_steps={STEPS}",
)


class Life:
    """One start of the command."""

    def __init__(self, task, run):
        self._process = subprocess.Popen(command(task, run, *SETTINGS), stdout=subprocess.PIPE, text=True)
        self._pools = run / "pools.sqlite"

    def until_step(self, step):
        """Returns in the step after `step`, when segments of it have arrived and most have not."""
        for line in self._process.stdout:
            if line.startswith(f"step {step:>4}/"):
                break
        else:
            raise AssertionError(f"the run ended before step {step}: {self._process.wait()}")
        deadline = time.monotonic() + 120
        while not self._arrived():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.Random(step).uniform(0.0, 0.2))

    def _arrived(self):
        """Segments on disk of the step in progress, read past the lock of the trainer."""
        with closing(sqlite3.connect(f"file:{self._pools}?mode=ro&immutable=1", uri=True)) as db:
            try:
                query = "SELECT count(*) FROM segments WHERE step > (SELECT max(step) FROM steps)"
                return db.execute(query).fetchone()[0]
            except sqlite3.DatabaseError:  # read in the middle of a write
                return 0

    def kill_server(self):
        family = psutil.Process(self._process.pid).children(recursive=True)
        (server,) = (p for p in family if "sglang.launch_server" in p.cmdline())
        os.killpg(server.pid, signal.SIGKILL)

    def kill(self):
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        assert psutil.wait_procs(family, timeout=15)[1] == []


def segments(run):
    """(sample, step) -> tokens, log-probs, reward of all that is on disk; and how many are of a step not committed."""
    store = PoolStore(run / "pools.sqlite")
    rows = store._db.execute("SELECT sample_id, step, tokens, log_probs, reward FROM segments").fetchall()
    last = store.last_step
    store.close()
    return {row[:2]: row[2:] for row in rows}, sum(row[1] > last for row in rows)


@pytest.mark.slow
def test_the_set_of_trained_samples_is_that_of_an_unbroken_run(task, tmp_path):
    code, _, errors = train(task, tmp_path / "unbroken", *SETTINGS)
    assert code == 0, errors

    run = tmp_path / "run"
    life = Life(task, run)
    life.until_step(1)
    life.kill()
    saved, in_flight = segments(run)
    life = Life(task, run)
    life.until_step(2)
    life.kill_server()
    life.until_step(3)  # it goes on with a new one
    life.kill_server()
    life.kill()
    found, arrived = segments(run)
    saved |= found
    in_flight += arrived
    code, _, errors = train(task, run, *SETTINGS)
    assert code == 0, errors

    outcomes = []
    for folder in (tmp_path / "unbroken", run):
        store = PoolStore(folder / "pools.sqlite")
        counts = store.check_conservation()
        outcomes.append((store.trained(), store.groups_issued))
        store.close()
        steps = records(folder)
        assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
        assert sum(r["train/samples"] for r in steps) == counts[Status.trained]
    assert outcomes[0] == outcomes[1] and len(outcomes[0][0]) > 100

    # Whatever was on disk at a kill is in the end what it was, and was not decoded again.
    final, _ = segments(run)
    kept = {key: row for key, row in saved.items() if key in final}
    assert len(kept) > 100
    for key, (tokens, log_probs, reward) in kept.items():
        assert final[key][:2] == (tokens, log_probs)
        assert reward is None or final[key][2] == reward, "unless it was killed between decoding and judging"
    assert in_flight > 0 and sum(r["rollout/recalled"] for r in records(run)) > 0
