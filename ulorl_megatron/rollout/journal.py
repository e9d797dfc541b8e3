"""Segments and verdicts become durable as they arrive, written by a thread beside the event loop."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import AsyncIterator, Callable, Dict, List

from ulorl_megatron.rollout.sample import Sample
from ulorl_megatron.rollout.store import PoolStore

# A kill loses what arrived in this time before it, and in the write under way: that is decoded again.
PERIOD_S = 0.2


class Journal:
    """Writes to `store` while segments are decoded. written_s: seconds spent in that during the last step."""

    def __init__(self, store: PoolStore):
        self._store = store
        self.written_s = 0.0

    @asynccontextmanager
    async def open(self, step: int) -> AsyncIterator[Callable[[Sample], None]]:
        """Yields keep(sample), to be called when a sample has its segment of step `step`, and when it has its reward.

        At the end, after an error too, everything kept is on disk. An error of the disk is raised by the next keep.
        """
        self.written_s = 0.0
        pending: Dict[int, Sample] = {}
        news, closing = asyncio.Event(), asyncio.Event()

        async def write_by_and_by() -> None:
            while not closing.is_set() or pending:
                await news.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), PERIOD_S)
                news.clear()
                batch = list(pending.values())
                pending.clear()
                await asyncio.get_running_loop().run_in_executor(thread, self._write, step, batch)

        with ThreadPoolExecutor(1, thread_name_prefix="journal") as thread:
            writer = asyncio.create_task(write_by_and_by())

            def keep(sample: Sample) -> None:
                if writer.done():
                    writer.result()
                pending[sample.id] = sample
                news.set()

            try:
                yield keep
            finally:
                closing.set()
                news.set()
                await writer

    def _write(self, step: int, batch: List[Sample]) -> None:
        begin = time.perf_counter()
        self._store.arrive(step, batch)
        self.written_s += time.perf_counter() - begin
