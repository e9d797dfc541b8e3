"""Tokens a second that the controller gets from a real server, against a bare load of the same requests.

python benchmarks/controller.py --dir DIR [--requests 128] [--repeat 5]

Bare: an HTTP client that sends all requests at once and reads the answers. The controller: the scheduler, the server
pool that looks after the server's health, the checks of every answer, the pools and their journal on disk. Same
server (a tiny random model), same prompts, same forced lengths from a log-normal law, in turns. Prints tokens/s of
each and the ratio of the medians, and the memory of this process.
"""

import argparse
import asyncio
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import List

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forced import PROMPT, ForcedPool, forced_config, make_model, served_model  # noqa: E402
from ulorl_megatron.data.prompts import Prompt  # noqa: E402
from ulorl_megatron.rollout.journal import Journal  # noqa: E402
from ulorl_megatron.rollout.pools import Pools  # noqa: E402
from ulorl_megatron.rollout.sample import Sample  # noqa: E402
from ulorl_megatron.rollout.scheduler import SegmentRollout  # noqa: E402
from ulorl_megatron.rollout.store import PoolStore  # noqa: E402


async def bare(url: str, prompts: List[List[int]], lengths: List[int]) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(prompt: List[int], length: int) -> None:
            sampling = {"temperature": 0.85, "max_new_tokens": length}
            payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            async with session.post(f"{url}/generate", json=payload) as response:
                assert len((await response.json())["output_ids"]) == length

        await asyncio.gather(*map(ask, prompts, lengths))


class Prompts:
    """The prompts of the step in progress, as a data set."""

    def __init__(self) -> None:
        self.now: List[List[int]] = []

    def take(self, position: int, n: int) -> List[Prompt]:
        return [Prompt(i, tokens, "", "") for i, tokens in enumerate(self.now)]


async def controlled(pool: ForcedPool, rollout: SegmentRollout, pools: Pools, prompts: Prompts, step: int) -> None:
    pools.admit(step, prompts)

    async def right(sample: Sample) -> float:
        return 1.0

    async with Journal(pools.store).open(step) as keep:
        await rollout.collect(step, pools.unfinished, right, keep)
    assert not pools.unfinished
    pools.release(step)
    pools.commit(step)


async def main(args: argparse.Namespace) -> None:
    config = forced_config(args.dir, args.cap)
    Path(config.run.dir).mkdir()
    config.rollout.prompts_per_step, config.rollout.group_size = args.requests, 1
    store = PoolStore(Path(config.run.dir) / "pools.sqlite")
    pools, prompts = Pools(store, config.rollout, config.experience), Prompts()
    pool = ForcedPool(config, served_model(args.dir))
    pool.start()
    try:
        await pool.wait_ready()
        rollout = SegmentRollout(pool, config.rollout)
        url = pool.members[0].client.url
        draw = random.Random(0)
        lengths = [min(args.cap, max(1, round(draw.lognormvariate(4.4, 1.0)))) for _ in range(args.requests)]
        print(f"{args.requests} requests, {sum(lengths)} tokens, longest {max(lengths)}")
        seconds = {"bare": [], "controller": []}
        for turn in range(args.repeat + 1):  # the first is to warm up
            prompts.now = [[turn, i % 256, i // 256] + [7] * (PROMPT - 3) for i in range(args.requests)]
            pool.lengths = dict(enumerate(lengths, start=turn * args.requests))  # by group, numbered through the run
            for name in seconds if turn % 2 else reversed(seconds):
                # The two share prompts, so each begins without what the other left in the cache.
                await pool.update_weights(args.dir / "model", turn + 1)
                begin = time.perf_counter()
                if name == "bare":
                    await bare(url, prompts.now, lengths)
                else:
                    await controlled(pool, rollout, pools, prompts, turn + 1)
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        for name, times in seconds.items():
            rates = ", ".join(f"{sum(lengths) / t:.0f}" for t in times)
            print(f"{name:<12}{sum(lengths) / statistics.median(times):7.0f} tokens/s   ({rates})")
        ratio = statistics.median(seconds["bare"]) / statistics.median(seconds["controller"])
        print(f"the controller gets {ratio:.1%} of the bare load's tokens/s")
        print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    finally:
        store.close()
        await pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--cap", type=int, default=768)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    make_model(arguments.dir)
    asyncio.run(main(arguments))
