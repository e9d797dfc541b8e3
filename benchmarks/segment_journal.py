"""What it costs to store segments as they arrive: one step with and without it, servers that answer after a fixed time.

python benchmarks/segment_journal.py [--samples 256] [--tokens 16384] [--seconds 20] [--folder DIR]

Every answer comes at a random moment within --seconds, so the event loop has the work of a real step: nothing but
typing and storing answers. Prints the seconds of both steps and their ratio, how long the event loop was away at
most, and the peak memory of this process.
"""

import argparse
import asyncio
import contextlib
import random
import resource
import tempfile
import time
from pathlib import Path

from ulorl_megatron.config.schema import RolloutConfig
from ulorl_megatron.rollout.client import Finish, Generation
from ulorl_megatron.rollout.journal import Journal
from ulorl_megatron.rollout.sample import Sample
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.store import PoolStore


class TimedServers:
    """Answers each request with a whole segment at a moment drawn from [0, seconds)."""

    def __init__(self, seconds: float):
        self._random = random.Random(0)
        self._seconds = seconds

    def expect(self, tokens: int) -> None:
        pass

    def kept(self):
        return contextlib.nullcontext()

    async def generate(self, input_ids, sampling, max_new_tokens, group, cut):
        await asyncio.sleep(self._random.uniform(0, self._seconds))
        values = range(max_new_tokens)
        return Generation(list(values), [-i / max_new_tokens for i in values], [0] * max_new_tokens, Finish.length)


async def longest_absence(of: asyncio.Task) -> float:
    longest = 0.0
    while not of.done():
        begin = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - begin)
    return longest


async def step(args: argparse.Namespace, journal) -> tuple:
    """(seconds, longest absence of the event loop) of one step. journal: None for without."""
    rollout = RolloutConfig(global_max_length=8 * args.tokens, segment_count=8)
    samples = [Sample(i, i, i, list(range(1000)), "", created_step=1) for i in range(args.samples)]

    async def collect():
        async with journal.open(1) if journal else contextlib.nullcontext(lambda sample: None) as keep:
            await SegmentRollout(TimedServers(args.seconds), rollout).collect(1, samples, None, keep)

    begin = time.perf_counter()
    task = asyncio.create_task(collect())
    away = await longest_absence(task)
    await task
    return time.perf_counter() - begin, away


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", default=None, help="where pools.sqlite is written; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = PoolStore(Path(folder) / "pools.sqlite")
        journal = Journal(store)
        without, away_without = asyncio.run(step(args, None))
        with_it, away_with = asyncio.run(step(args, journal))
        size = (Path(folder) / "pools.sqlite").stat().st_size / 2**20
        store.close()
    print(f"{args.samples} segments of {args.tokens} tokens, {size:.0f} MiB")
    print(f"step without      {without:.2f} s, event loop away at most {1000 * away_without:.0f} ms")
    print(f"step with         {with_it:.2f} s, event loop away at most {1000 * away_with:.0f} ms")
    print(f"ratio             {with_it / without:.3f}")
    print(f"written beside it {journal.written_s:.2f} s, {1000 * journal.written_s / args.samples:.1f} ms a segment")
    print(f"peak memory       {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
