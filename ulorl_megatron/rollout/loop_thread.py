"""An event loop in a thread of its own, so that requests go on while the main thread trains."""

import asyncio
import threading
from typing import Any, Callable, Coroutine, Tuple

_POLL_S = 0.2


class LoopThread:
    """Use it as a context manager; at the end what still runs is cancelled."""

    def __enter__(self) -> "LoopThread":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.run(self._cancel_all())
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine) -> Any:
        """What `work` returns or raises; an interrupt of this thread cancels it."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()

    def start(self, work: Coroutine) -> asyncio.Task:
        """Begins `work` and returns at once. The task is for `result` and `stop` only."""

        async def begin() -> asyncio.Task:
            return asyncio.create_task(work)

        return self.run(begin())

    def result(self, task: asyncio.Task, unless: Callable[[], bool]) -> Tuple[bool, Any]:
        """Waits for the end of `task`: (True, what it returned), or raises. (False, None) once `unless` holds."""

        async def ended() -> Tuple[bool, Any]:
            while not task.done():
                if unless():
                    return False, None
                await asyncio.wait({task}, timeout=_POLL_S)
            return True, task.result()

        return self.run(ended())

    def stop(self, task: asyncio.Task) -> None:
        """Cancels `task` and waits until it has cleaned up, whatever it raises then."""

        async def cancelled() -> None:
            task.cancel()
            await asyncio.wait({task})

        self.run(cancelled())

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
