"""The rule verifier: Math-Verify in a pool of worker processes."""

import asyncio
import logging
import queue
from concurrent.futures import ThreadPoolExecutor

from ulorl_megatron.verifier.interface import VerifierFailed
from ulorl_megatron.verifier.worker import Unjudgeable, Worker, WorkerLost

log = logging.getLogger(__name__)

MATHEMATICS = "ulorl_megatron.verifier.mathematics"


class RuleVerifier:
    """See Verifier. An answer whose worker hung or crashed is tried again in a new one, `retries` times.

    workers: processes. timeout_s: seconds for one answer. module: what the workers judge with (see Worker).
    """

    def __init__(self, *, workers: int, timeout_s: float, retries: int, module: str = MATHEMATICS):
        self._timeout_s = timeout_s
        self._retries = retries
        self._module = module
        self._closed = False
        # A thread for each worker waits on its pipe, so that no signal and no event loop is involved.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(Worker(module))

    async def verify(self, *, response: str, answer: str) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._verify, response, answer)

    def close(self) -> None:
        """Kills the workers; an answer in progress first runs to its deadline."""
        self._closed = True
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()

    def _verify(self, response: str, answer: str) -> float:
        worker = self._idle.get()
        try:
            tries = 0
            while True:
                try:
                    return worker.judge(response, answer, self._timeout_s)
                except Unjudgeable as reason:
                    raise VerifierFailed(str(reason)) from reason
                except WorkerLost as reason:
                    worker = Worker(self._module)
                    tries += 1
                    log.warning("verifier, reference %r, try %d: %s", answer, tries, reason)
                    if tries > self._retries or self._closed:
                        raise VerifierFailed(f"reference {answer!r}, {tries} tries: {reason}") from reason
        finally:
            self._idle.put(worker)
