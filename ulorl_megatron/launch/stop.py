"""The polite way to end a run: SIGUSR1 before a time limit, SIGTERM of a Slurm that wants the nodes for others."""

import os
import signal
import threading
from typing import List

STOPPED_EXIT = 75  # EX_TEMPFAIL: not done, nothing is wrong, the same command goes on

_asked = threading.Event()


def stop_asked() -> bool:
    """Whether this process was asked to stop since it listens."""
    return _asked.is_set()


class StopSignals:
    """While inside, SIGUSR1 asks for a stop instead of ending this process; in a Slurm job SIGTERM does too.

    For every rank, since a launcher signals all; the first one's counts. To be entered in the main thread.
    """

    def __enter__(self) -> "StopSignals":
        _asked.clear()
        self._previous = {number: signal.signal(number, lambda *_: _asked.set()) for number in _signals()}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _signals() -> List[signal.Signals]:
    preempted = [signal.SIGTERM] if "SLURM_JOB_ID" in os.environ else []
    return [signal.SIGUSR1, *preempted]
