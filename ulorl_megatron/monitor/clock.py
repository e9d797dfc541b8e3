"""Seconds spent in the parts of a step."""

import time
from contextlib import contextmanager
from typing import Dict, Iterator


class Clock:
    """`with clock("rollout"): ...` adds to time/rollout; lap() hands out the parts and starts anew."""

    def __init__(self):
        self._parts: Dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            name = f"time/{part}"
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - begin

    def lap(self) -> Dict[str, float]:
        """Seconds of each part since the last lap, as metrics; time/step is all of it, parts or not."""
        now = time.perf_counter()
        parts, self._parts = self._parts, {}
        parts["time/step"], self._begin = now - self._begin, now
        return parts
