"""One server of the pool, as the dispatcher and the keeper see it."""

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Set

from ulorl_megatron.rollout.client import Client
from ulorl_megatron.rollout.server import LocalServer

_BLOCK = 512  # ids compared at a time


@dataclass
class Member:
    """process: set if this command started it. log: its file, where known. version: weight version it confirmed; None
    gets no work. open: paused, for weights by broadcast. loading: held while weights are loaded from a folder.

    gone: it failed more often than it may; nobody asks it any more. fault: why it last got no work. returns: how
    often it was started again, or taken back if it is not ours. strikes: tries in a row that were its fault.
    answered: it did since it was started. deadline: time.monotonic() by which it must be ready.
    outstanding: tokens asked of it and not yet answered, input ones included. dispatched: those of this step, answered
    or not. busy_s: seconds with a request, until `busy_since` (time.monotonic(); None: it has none). calls: what waits
    for its answers. held: the ids last sent to it of each group, which its prefix cache has.
    """

    client: Client
    process: Optional[LocalServer] = None
    log: Optional[Path] = None
    version: Optional[int] = None
    open: bool = False
    gone: bool = False
    fault: str = ""
    returns: int = 0
    strikes: int = 0
    answered: bool = False
    deadline: float = math.inf
    outstanding: int = 0
    dispatched: int = 0
    busy_s: float = 0.0
    busy_since: Optional[float] = None
    calls: Set[asyncio.Future] = field(default_factory=set)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    held: Dict[int, List[int]] = field(default_factory=dict)

    @property
    def dead(self) -> bool:
        """Whether it is a process of ours that has ended."""
        return self.process is not None and not self.process.alive()

    def begin(self, tokens: int) -> None:
        """A request of so many tokens is made of it."""
        self.outstanding += tokens
        self.dispatched += tokens
        if self.busy_since is None:
            self.busy_since = time.monotonic()

    def end(self, tokens: int) -> None:
        """That request is over."""
        self.outstanding -= tokens
        if not self.outstanding:
            self.busy_s += time.monotonic() - self.busy_since
            self.busy_since = None

    def take_busy_s(self) -> float:
        """Seconds in which it had a request, since the last call."""
        now = time.monotonic()
        if self.busy_since is not None:
            self.busy_s, self.busy_since = self.busy_s + now - self.busy_since, now
        busy, self.busy_s = self.busy_s, 0.0
        return busy

    def prefix(self, input_ids: List[int], group: Optional[int]) -> int:
        """How many of the ids, from the first on, were sent to it in an earlier request of the group."""
        held = self.held.get(group, [])
        end = min(len(held), len(input_ids))
        start = 0
        while start < end and held[start : start + _BLOCK] == input_ids[start : start + _BLOCK]:
            start += _BLOCK
        while start < end and held[start] == input_ids[start]:
            start += 1
        return min(start, end)

    def take_out(self, fault: str) -> None:
        """No more work; whoever waits for its answers is told by a cancelled call."""
        self.version = None
        self.open = False
        self.fault = fault
        self.strikes = 0
        self.held.clear()
        for call in list(self.calls):
            call.cancel()
