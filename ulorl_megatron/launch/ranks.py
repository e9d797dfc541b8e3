"""This process among the ranks of a run."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Callable, Iterator, List, Optional, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_POLL_S = 0.05
_SHORT_POLL_S = 0.002


class FirstRankFailed(RuntimeError):
    """Rank 0 gave up; it has told why, and this rank only has to end."""


class Ranks:
    """The process group, and work that rank 0 does while the others wait.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Backend: nccl with CUDA,
    else gloo. Sets this process's CUDA device. Use it as a context manager.
    """

    def __init__(self, collective_timeout_s: float = 1800.0):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and not agent_store,
            wait_for_workers=False,
        )
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=collective_timeout_s),
        )
        self._objects = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
        self._turn = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and returns its (picklable) result on every rank.

        Must be called by all ranks in the same order. The others watch the store meanwhile, outside any collective:
        hours of rollout do not run into the process group's timeout (verl#2995). If `work` raises, rank 0 gets that
        exception and the others FirstRankFailed.
        """
        result = self.only_first(work)
        if self.world_size == 1:
            return result
        box = [result]
        dist.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def only_first(self, work: Callable[[], T]) -> Optional[T]:
        """Like on_first, but the result stays on rank 0; the others get None once it is done."""
        self._turn += 1
        key = f"turn-{self._turn}"
        if self.first:
            outcome = b"failed"
            try:
                result = work()
                outcome = b"done"
            finally:
                if self.world_size > 1:
                    self._store.set(key, outcome)
            return result
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        if self._store.get(key) == b"failed":
            raise FirstRankFailed(f"rank 0 failed at {key}")
        return None

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """One rank at a time, in the order in which they come; not for ranks that meet in a collective inside."""
        ticket = self._store.add(f"{what}-tickets", 1)
        before, mine = f"{what}-{ticket - 1}", f"{what}-{ticket}"
        while ticket > 1 and not self._store.check([before]):
            time.sleep(_SHORT_POLL_S)
        try:
            yield
        finally:
            self._store.set(mine, b"done")
            if ticket > 1:
                self._store.delete_key(before)

    def gather(self, item: T) -> List[T]:
        """Every rank's item, in the order of ranks, on every rank."""
        items: List[Optional[T]] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self._objects)
        return items

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception) -> None:
        """Ends the process group and the store, after an error too.

        An error's traceback keeps this object alive to the interpreter's exit, where their threads sometimes abort the
        process: its exit code would be 134 instead of what the error stands for.
        """
        dist.destroy_process_group()
        self._objects = self._store = None


class OnFirstRank:
    """An object that lives on rank 0, called alike from all ranks.

    `OnFirstRank(ranks, Pool, 3).take(x)` builds Pool(3) on rank 0, runs its take(x) there while the others wait, and
    returns the (picklable) result on every rank. All ranks must make the same calls in the same order. As a context
    manager it enters and leaves the object on rank 0.
    """

    def __init__(self, ranks: Ranks, factory: Callable, *arguments):
        self._ranks = ranks
        self._target = ranks.only_first(lambda: factory(*arguments))

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments: self._ranks.on_first(lambda: getattr(self._target, name)(*arguments))

    def __enter__(self) -> "OnFirstRank":
        if self._ranks.first:
            self._target.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self._ranks.first:
            self._target.__exit__(*exception)
