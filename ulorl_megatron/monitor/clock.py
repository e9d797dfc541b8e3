"""Seconds spent in the parts of a step."""

import time
from contextlib import contextmanager
from typing import Dict, Iterator


class Clock:
    """`with clock("rollout"): ...` adds to the part "rollout"; lap() hands out the parts and starts anew."""

    def __init__(self):
        self._parts: Dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

    def lap(self) -> Dict[str, float]:
        """Seconds of each part since the last lap."""
        parts, self._parts = self._parts, {}
        return parts
