"""Worker processes that judge answers, and can be killed.

A judge may hang in native code, eat all memory or crash; none of that may reach the trainer, or turn into a
silent 0 (verl#5635, AReaL#1426). So each worker is a process behind a pipe, with a deadline for each answer.
"""

import importlib
import multiprocessing
import resource
import signal
import time
from multiprocessing.connection import Connection

from ulorl_megatron.errors import UserError

_START_TIMEOUT_S = 300.0  # loading Math-Verify takes 3 s, or many times that on a busy machine
_ADDRESS_SPACE = 8 << 30
_KILL_AFTER_S = 2.0
_DYING_S = 5.0
_READY = "ready"


class Unjudgeable(Exception):
    """Raised by a judge: this answer cannot be judged, however often it is tried."""


class WorkerLost(Exception):
    """The worker was late and has been killed, or it died; the answer is not judged."""


class Worker:
    """One process that judges one answer at a time. Not to be used by two threads at once.

    module: name of the module that judges, imported in the new process only. It has warm_up() -> None and
    judge(given: str, answer: str) -> float, which may raise Unjudgeable.
    """

    def __init__(self, module: str):
        # spawn: a forked copy of a process with threads and an event loop may start with locked locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, module), name="verifier", daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._starting = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def judge(self, given: str, answer: str, timeout_s: float) -> float:
        """Blocks until the reward is there. timeout_s: seconds from when the worker is ready.

        Raises WorkerLost (use the worker no more), Unjudgeable, or UserError if the worker never got ready.
        """
        self.wait_ready()
        try:
            self._pipe.send((given, answer, timeout_s))
            if not self._pipe.poll(timeout_s):
                self.kill()
                raise WorkerLost(f"no reward after {timeout_s:g} s")
            reward = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._bury()
            raise WorkerLost(f"the worker died (exit code {self._process.exitcode})") from error
        if isinstance(reward, str):
            raise Unjudgeable(reward)
        return reward

    def wait_ready(self) -> None:
        """Blocks until the worker can judge; raises UserError if it ends before that."""
        if not self._starting:
            return
        begin = time.monotonic()
        try:
            ready = self._pipe.poll(_START_TIMEOUT_S) and self._pipe.recv() == _READY
        except (EOFError, OSError):
            ready = False
        if not ready:
            self._bury()
            raise UserError(
                f"a verifier worker did not get ready: exit code {self._process.exitcode} after "
                f"{time.monotonic() - begin:.0f} s; its error is above. Is math-verify installed?"
            )
        self._starting = False

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _bury(self) -> None:
        """kill() for a process that is about to end by itself, so that its own exit code is told."""
        self._process.join(_DYING_S)
        self.kill()


def _serve(pipe: Connection, module: str) -> None:
    """The worker's main loop; ends with the pipe. An exception of the judge ends it too, as a crash."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # for the trainer, which ends its workers itself
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    judging = importlib.import_module(module)
    judging.warm_up()
    pipe.send(_READY)
    while True:
        try:
            given, answer, timeout_s = pipe.recv()
        except EOFError:
            return
        # If the trainer itself is killed nobody kills a hung worker, so the kernel does: no handler is set.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _KILL_AFTER_S)
        try:
            reward = judging.judge(given, answer)
        except Unjudgeable as reason:
            reward = str(reason)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            pipe.send(reward)
        except BrokenPipeError:
            return
