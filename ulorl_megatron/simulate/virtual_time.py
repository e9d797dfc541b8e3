"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from typing import Any, Coroutine


class _JumpingSelector(selectors.SelectSelector):
    """Nothing comes from outside, so to wait is to move the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("every task waits for another: the simulation would never end")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """time() starts at 0. Threads and sockets cannot be waited for in it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine) -> Any:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
