"""How far a conversion is: a bar on a terminal, a line now and then elsewhere. To stderr, with speed and
ETA."""

import sys
import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class ConversionProgress:
    """Use as a context manager. advance() may be called from any thread."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._total = self._done = self._resumed = 0
        self._began = self._reported = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> "ConversionProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """total_bytes: of the output. done_bytes: what an earlier call has written already."""
        self._total, self._done, self._resumed = total_bytes, done_bytes, done_bytes
        self._began = self._reported = time.monotonic()
        if done_bytes:
            print(f"{self._title}: resuming, {_share(done_bytes, total_bytes)} is there", file=sys.stderr)
        if self._bar:
            self._bar.update(self._task, total=total_bytes, completed=done_bytes)

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._bar:
                self._bar.update(self._task, advance=count)
                return
            now = time.monotonic()
            if now - self._reported < _SECONDS_BETWEEN_LINES:
                return
            self._reported = now
            speed = (self._done - self._resumed) / (now - self._began)
        left = (self._total - self._done) / speed
        print(
            f"{self._title}: {_share(self._done, self._total)}, {speed / 1e6:.0f} MB/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _share(done: int, total: int) -> str:
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * done / max(total, 1):.0f} %)"
