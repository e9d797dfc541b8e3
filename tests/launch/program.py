"""A program of several ranks for test_launch.py. python program.py MODE"""

import sys
import time
from pathlib import Path

from ulorl_megatron.errors import UserError
from ulorl_megatron.launch import (
    FOLLOWER_EXIT,
    STOPPED_EXIT,
    FirstRankFailed,
    OnFirstRank,
    Ranks,
    StopSignals,
    is_rank,
    start_ranks,
    stop_asked,
)


class Counter:
    def __init__(self, start):
        self.value = start

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        print("left", flush=True)

    def add(self, n):
        self.value += n
        return self.value


def take_turns(ranks):
    """Each rank works alone, as often as it comes."""
    spans = []
    for _ in range(5):
        with ranks.exclusive("work"):
            begin = time.monotonic()
            time.sleep(0.02)
            spans.append((begin, time.monotonic()))
    together = sorted(span for of_rank in ranks.gather(spans) for span in of_rank)
    assert len(together) == 10
    assert all(end <= begin for (_, end), (begin, _) in zip(together, together[1:]))  # noqa: B905


def run(mode, ranks):
    with OnFirstRank(ranks, Counter, 40) as counter:
        assert counter.add(2) == 42
        assert ranks.gather(ranks.rank) == [0, 1]
        if mode == "ok":
            take_turns(ranks)
        if mode == "slow":
            # The first rank works longer than the group's timeout: nobody may sit in a collective meanwhile.
            assert ranks.on_first(lambda: time.sleep(4) or "done") == "done"
            assert counter.add(1) == 43
        if mode == "first-fails":
            ranks.on_first(lambda: 1 / 0)
        if mode == "second-fails" and ranks.rank == 1:
            raise ValueError("the second rank's own fault")
        if mode == "hang":
            ranks.gather("both are here")
        if mode == "until-stopped":
            with StopSignals():
                print("working", flush=True)
                while not ranks.on_first(stop_asked):
                    time.sleep(0.05)
            return STOPPED_EXIT
        if mode in ("second-fails", "hang"):
            print("hanging", flush=True)
            time.sleep(600)
        return 0


def main(mode, logs):
    if not is_rank():
        return start_ranks(sys.argv, 2, logs)
    try:
        with Ranks(collective_timeout_s=2.0 if mode == "slow" else 60.0) as ranks:
            return run(mode, ranks)
    except FirstRankFailed:
        return FOLLOWER_EXIT


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], Path(sys.argv[2])))
    except UserError as error:
        sys.exit(f"error: {error}")
