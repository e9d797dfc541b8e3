"""Ranks started together, waiting for the first, ending together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ulorl_megatron.launch import STOPPED_EXIT

PROGRAM = Path(__file__).parent / "program.py"


def start(mode, logs):
    return subprocess.Popen(
        [sys.executable, PROGRAM, mode, logs], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_waiting_ranks_outlive_the_collective_timeout(tmp_path):  # verl#2995
    code, output = finish(start("slow", tmp_path))
    assert code == 0, output
    assert output.count("left") == 1


def test_failure_of_the_first_rank_ends_all_and_shows_its_traceback(tmp_path):
    code, output = finish(start("first-fails", tmp_path))
    assert code == 1
    assert "ZeroDivisionError" in output and output.count("left") == 1


def test_failure_of_another_rank_is_shown_from_its_log(tmp_path):
    code, output = finish(start("second-fails", tmp_path))
    assert code == 1
    assert "rank 1 ended with code 1" in output and "the second rank's own fault" in output


def test_interrupted_ranks_close_what_they_have_open_and_nobody_is_blamed(tmp_path):
    process = start("hang", tmp_path)
    assert "hanging" in process.stdout.readline()
    time.sleep(1)  # the second rank may be a little behind
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 128 + signal.SIGINT
    assert output.count("left") == 1 and "rank 1 ended" not in output


def test_a_polite_stop_is_agreed_on_and_is_no_failure(tmp_path):
    process = start("until-stopped", tmp_path)
    assert "working" in process.stdout.readline()
    time.sleep(1)  # the second rank may be a little behind
    process.send_signal(signal.SIGUSR1)
    code, output = finish(process)
    assert code == STOPPED_EXIT
    assert output.count("left") == 1 and "rank 1 ended" not in output


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_starter(tmp_path, sign):
    process = start("hang", tmp_path)
    assert "hanging" in process.stdout.readline()
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    os.kill(process.pid, sign)
    process.wait(30)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    process.stdout.close()


def test_a_rank_under_torchrun_needs_no_starter(tmp_path):
    """The same program with the variables of a launcher that hosts no store: rank 0 hosts it."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, "ok", tmp_path], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    deadline = time.monotonic() + 60
    assert [p.wait(deadline - time.monotonic()) for p in ranks] == [0, 0]
