"""kill -9 of the trainer, of servers, or of both, at random moments, again and again: the run is the unbroken one.

The trainer is the real loop with stand-ins (trainer.py), the servers are processes of the stand-in. With SGLang and
Megatron: tests/servers/test_kills_for_real.py. ULORL_KILLS sets the number; CI takes 20.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ulorl_megatron.launch import STOPPED_EXIT
from ulorl_megatron.rollout.server import choose_ports
from ulorl_megatron.rollout.store import PoolStore

HERE = Path(__file__).parent
KILLS = int(os.environ.get("ULORL_KILLS", "20" if os.environ.get("CI") else "50"))
STEPS = 15

CONFIG = """
run: {{total_steps: {steps}}}
model: {{path: {model}, dtype: float32}}
data: {{train: {data}, max_prompt_length: 64}}
rollout:
  {{global_max_length: 64, segment_count: 4, prompts_per_step: 4, group_size: 4, request_retries: 20}}
servers: {{max_restarts: 1000, hang_timeout_s: 20}}
"""


class Servers:
    """Two processes of the stand-in, on ports of their own, started again at once when they were killed."""

    def __init__(self):
        self.ports = choose_ports(0, 2)
        self.processes = [self._start(port) for port in self.ports]

    def _start(self, port):
        return subprocess.Popen([sys.executable, HERE.parent / "fake_server.py", str(port), "0.1", "default"])

    @property
    def urls(self):
        return ",".join(f"http://127.0.0.1:{port}" for port in self.ports)

    def kill(self, index):
        self.processes[index].kill()
        self.processes[index].wait()
        self.processes[index] = self._start(self.ports[index])

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


class Trainer:
    """trainer.py: one life after the other."""

    def __init__(self, file):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "trainer.py", file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"

    def begin(self, **settings):
        line = " ".join(f"{key.replace('__', '.')}={value}" for key, value in settings.items())
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self.pid = int(self._process.stdout.readline())

    def end(self):
        return int(self._process.stdout.readline())

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_moe):
    """(servers, trainer, folder) of all runs of this module."""
    folder = tmp_path_factory.mktemp("kills")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(7)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(CONFIG.format(steps=STEPS, model=tiny_moe, data=folder / "train.jsonl"))
    servers, trainer = Servers(), Trainer(folder / "config.yaml")
    yield servers, trainer, folder
    trainer.close()
    servers.close()


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outcome(run):
    """All that a run is: its weights, what trained when, where every sample is, and the steps it logged."""
    store = PoolStore(run / "pools.sqlite")
    counts, trained, live = store.check_conservation(), store.trained(), store.load()
    position = store.groups_issued
    store.close()
    for segment in (segment for sample in live for segment in sample.segments):
        # Weights lost with a trainer are called so, which is no difference: their number is that of the unbroken run.
        segment.versions[:] = [v if v >= 0 else -1 - v for v in segment.versions]
    weights = (run / "checkpoints" / f"step-{STEPS}").read_bytes()
    steps = [record["step"] for record in records(run)]
    return {
        "weights": weights, "trained": trained, "counts": counts, "live": live, "position": position, "steps": steps
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(world):
    servers, trainer, folder = world
    trainer.begin(run__dir=folder / "unbroken", servers__urls=f"[{servers.urls}]")
    assert trainer.end() == 0, (folder / "config.out").read_text()
    result = outcome(folder / "unbroken")
    assert result["steps"] == list(range(1, STEPS + 1)) and len(result["trained"]) > 40
    return result


@pytest.mark.slow
@pytest.mark.parametrize("every, share", [(1, 0.7), (3, 0.3)])
def test_killed_at_random_moments_the_run_is_the_unbroken_one(world, unbroken, every, share):
    servers, trainer, folder = world
    rng = random.Random(every)
    left, runs, hits = round(KILLS * share), 0, {"trainer": 0, "server": 0, "both": 0}
    while left:
        run = folder / f"every-{every}-run-{runs}"
        runs += 1
        code = -signal.SIGKILL
        while code != 0:
            assert code == -signal.SIGKILL, (folder / "config.out").read_text()
            trainer.begin(run__dir=run, servers__urls=f"[{servers.urls}]", checkpoint__every=every)
            code = None
            while left and code is None:
                time.sleep(rng.uniform(0.2, 2.0))
                what = rng.choice(["trainer", "trainer", "server", "both"])
                if what != "trainer":
                    servers.kill(rng.randrange(2))
                if what != "server":
                    with suppress(ProcessLookupError):  # it has come to its end
                        os.kill(trainer.pid, signal.SIGKILL)
                    code = trainer.end()
                if what == "server" or code == -signal.SIGKILL:
                    hits[what] += 1
                    left -= 1
            code = trainer.end() if code is None else code
        assert outcome(run) == unbroken
    assert sum(hits.values()) == round(KILLS * share) and hits["trainer"] > 0
    print(f"{hits} over {runs} runs")


def test_asked_to_stop_it_leaves_a_checkpoint_and_goes_on_as_if_it_had_not(world, unbroken):
    """SIGUSR1 in the middle of steps; no checkpoint is due before the end, so each that is there was left by a stop."""
    servers, trainer, folder = world
    run, rng, stops, code = folder / "stopped", random.Random(7), [], None
    while code != 0:
        trainer.begin(run__dir=run, servers__urls=f"[{servers.urls}]", checkpoint__every=1000)
        if len(stops) < 3:
            before = len(records(run)) if stops else 0
            wait_for(lambda before=before: (run / "metrics.jsonl").exists() and len(records(run)) > before)
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(trainer.pid, signal.SIGUSR1)
        code = trainer.end()
        assert code in (0, STOPPED_EXIT), (folder / "config.out").read_text()
        if code == STOPPED_EXIT:
            stops.append(int((run / "checkpoints" / "latest").read_text().removeprefix("step-")))
            assert stops[-1] == len(records(run)), "every whole step is saved"
    assert len(stops) == 3 and stops == sorted(set(stops)) and stops[-1] < STEPS
    assert outcome(run) == unbroken


def wait_for(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_trainer_on_the_same_run_directory_is_refused(world, unbroken):
    servers, trainer, folder = world
    holder = PoolStore(folder / "unbroken" / "pools.sqlite")
    trainer.begin(run__dir=folder / "unbroken", servers__urls=f"[{servers.urls}]")
    assert trainer.end() == 1
    holder.close()
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in (folder / "config.out").read_text()
    assert outcome(folder / "unbroken") == unbroken


@pytest.mark.parametrize("changes, taken_up", [({}, True), ({"rollout__temperature": 0.5}, False)])
def test_without_a_checkpoint_only_the_same_run_takes_up_what_arrived(world, changes, taken_up):
    servers, trainer, folder = world
    run = folder / f"begun-{taken_up}"
    settings = {
        "run__dir": run, "run__total_steps": 3, "checkpoint__every": 1000, "servers__urls": f"[{servers.urls}]"
    }  # fmt: skip
    trainer.begin(**settings)
    for _ in range(3000):
        time.sleep(0.01)
        if (run / "metrics.jsonl").exists() and len(records(run)) == 2:
            break
    os.kill(trainer.pid, signal.SIGKILL)
    assert trainer.end() == -signal.SIGKILL
    trainer.begin(**settings | changes)
    assert trainer.end() == 0
    first, second, _ = records(run)
    assert (first["rollout/recalled"] == first["rollout/samples"] > 0) is taken_up
    assert (second["rollout/recalled"] == second["rollout/samples"] > 0) is taken_up
    assert taken_up or first["rollout/recalled"] == second["rollout/recalled"] == 0
