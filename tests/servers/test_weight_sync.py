"""The ways to give weights to real servers, and to decode meanwhile, in whole runs."""

import os
import signal
import subprocess
import time

import psutil

from tests.servers.support import command, records, train
from ulorl_megatron.rollout.store import PoolStore


def assert_sound(run, steps):
    """Every step was done once, nothing was lost, and trainer and servers agree on what the current weights made."""
    found = [record for record in records(run) if "time/step" in record]
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    updated = [record for record in found if "train/loss" in record]
    assert updated and all(record["train/ratio_deviation"] == 0 for record in updated)
    mismatches = [record["train/mismatch_mean"] for record in updated if "train/mismatch_mean" in record]
    assert mismatches and max(mismatches) < 1e-4
    store = PoolStore(run / "pools.sqlite")
    store.check_conservation()
    store.close()
    return found


def test_weights_by_broadcast_from_two_ranks_are_in_two_servers_bit_for_bit(task, tmp_path):
    """Each rank has half of the experts. Checksums are compared after every broadcast; a difference ends the run."""
    run = tmp_path / "run"
    settings = ["run.total_steps=3", "servers.count=2", "servers.weight_sync=distributed"]
    code, output, errors = train(task, run, *settings, "servers.verify_weights_every=1")
    assert code == 0, errors
    assert_sound(run, 3)


def test_the_next_step_decodes_while_the_policy_trains(task, tmp_path):
    """Overlap, with steps that end at enough samples, killed and taken up again."""
    run = tmp_path / "run"
    settings = ["rollout.segment_count=1", "rollout.stop=enough", "rollout.enough_samples=40", "rollout.overlap=true"]
    settings += ["run.total_steps=6"]
    process = subprocess.Popen(command(task, run, *settings), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step    2/6"):
            break
    time.sleep(0.5)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert psutil.wait_procs(family, timeout=15)[1] == []

    code, output, errors = train(task, run, *settings)
    assert code == 0, errors
    steps = assert_sound(run, 6)
    # What step n decodes began under the weights of step n - 2: some of its tokens are one version old.
    assert sum(record.get("age-1/token_share", 0.0) for record in steps[1:]) > 0
    assert all(record["rollout/finished"] + record["rollout/truncated"] >= 40 for record in steps)
    assert any(record["rollout/unfinished"] > 0 for record in steps)
