"""The rule verifier: Math-Verify in a pool of worker processes."""

import asyncio
import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.interface import By, Verdict, VerifierFailed
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

    async def ready(self) -> None:
        """See Verifier; one worker is waited for, since the others are no different."""
        await self._in_thread(self._start_one)

    async def verify(self, *, question: str, response: str, answer: str) -> Verdict:
        """See Verifier; the question is not looked at."""
        given = extract_answer(response)
        if given is None:
            return Verdict(0.0, By.no_answer)
        return Verdict(await self.compare(given, answer), By.rule)

    async def compare(self, given: str, answer: str) -> float:
        """1.0 if the extracted answer `given` equals the reference, else 0.0; raises as `verify` does."""
        return await self._in_thread(self._compare, given, answer)

    async def close(self) -> None:
        """Kills the workers; an answer in progress first runs to its deadline."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()

    async def _in_thread(self, function: Callable, *arguments: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _start_one(self) -> None:
        worker = self._idle.get()
        try:
            worker.wait_ready()
        finally:
            self._idle.put(worker)

    def _compare(self, given: str, answer: str) -> float:
        worker = self._idle.get()
        try:
            tries = 0
            while True:
                try:
                    return worker.judge(given, answer, self._timeout_s)
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
