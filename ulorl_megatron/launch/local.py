"""Starts the ranks of a run on this machine, as torchrun would, and ends them together."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import List, Sequence

from torch.distributed import TCPStore

from ulorl_megatron.errors import UserError
from ulorl_megatron.launch.process import die_with_parent
from ulorl_megatron.launch.stop import STOPPED_EXIT

FOLLOWER_EXIT = 76  # a rank that ends only because rank 0 failed; rank 0 is then still about to say why
_GRACE_S = 15.0  # between the polite signal and the kill


def is_rank() -> bool:
    """Whether this process was already started as a rank (by torchrun, or by start_ranks)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(command: Sequence[str], processes: int, logs: Path) -> int:
    """Runs this Python with the arguments `command` as `processes` ranks; returns the exit code of the run.

    Rank 0 keeps this terminal, the others write to logs/rank-<i>.log. When one rank fails the others are ended: first
    politely, then by SIGKILL. SIGINT and SIGTERM are passed on, and SIGUSR1, after which the ranks end in their own
    time. The ranks die with this process, even by kill -9.
    Raises UserError with the end of its log when another rank than the first failed first.
    """
    # The store lives here, so that its port is taken from the moment it is chosen (sglang#7418).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks: List[subprocess.Popen] = []
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with ExitStack() as stack:
        for rank in range(processes):
            output = None if rank == 0 else stack.enter_context((logs / f"rank-{rank}.log").open("ab"))
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on once
                    preexec_fn=_prepare_rank,
                )
            )

        received: List[int] = []

        def pass_on(signum, frame):
            if signum != signal.SIGUSR1:
                received.append(signum)
            for process in ranks:
                process.send_signal(signum)

        for s in previous:
            signal.signal(s, pass_on)
        try:
            first = _wait_for_first_failure(ranks, received)
        finally:
            _end(ranks)
            for s, handler in previous.items():
                signal.signal(s, handler)
    if received:
        return 128 + received[0]
    if first > 0:
        tail = "".join((logs / f"rank-{first}.log").read_text(errors="replace").splitlines(keepends=True)[-20:])
        raise UserError(f"rank {first} ended with code {ranks[first].returncode}; the end of its log:\n{tail}")
    code = ranks[0].returncode
    return 128 - code if code < 0 else code


def _prepare_rank() -> None:
    die_with_parent()
    # A shell starts background commands with SIGINT ignored, and that is inherited; here it is how a run is stopped.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_first_failure(ranks: List[subprocess.Popen], received: List[int]) -> int:
    """The index of the rank that failed first; 0 when all ended well.

    received: signals to end that were passed on so far. After one, every rank gets its time to close what it has open.
    """
    deadline = None
    while True:
        codes = [process.poll() for process in ranks]
        if received:
            deadline = deadline or time.monotonic() + _GRACE_S
            if None not in codes or time.monotonic() > deadline:
                return 0
            time.sleep(0.1)
            continue
        for rank, code in enumerate(codes):
            if code and code not in (FOLLOWER_EXIT, STOPPED_EXIT):
                return rank
        if None not in codes:
            return 0
        time.sleep(0.1)


def _end(ranks: List[subprocess.Popen]) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
