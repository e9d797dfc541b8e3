"""Time to train the same samples with 1, 2, 4 and 8 segments, with `enough`, and with `overlap`, on a real server.

python benchmarks/segments.py --dir DIR [--samples 192] [--in-flight 64] [--cap 768] [--train-share 0.2]

Every response has a length drawn beforehand from a log-normal law cut at --cap, the same for all ways, so only the
scheduling differs: the scheduler, the server pool and one SGLang server (a tiny random model) are the real ones; the
policy update is a pause of --train-share of the time its tokens took to decode alone. Weights are loaded into the
server after every step. Prints seconds and how many times faster than one segment.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tiny_models import tiny_model  # noqa: E402
from ulorl_megatron.config.schema import Config, Dtype, RolloutConfig, Stop  # noqa: E402
from ulorl_megatron.rollout.client import Finish, Generation, Sampling  # noqa: E402
from ulorl_megatron.rollout.sample import Sample  # noqa: E402
from ulorl_megatron.rollout.scheduler import SegmentRollout  # noqa: E402
from ulorl_megatron.rollout.served_model import ServedModel  # noqa: E402
from ulorl_megatron.rollout.server_pool import ServerPool  # noqa: E402

PROMPT = 8
NEVER = 2**20  # a stop id that no model makes


class ForcedPool(ServerPool):
    """A response ends where it was drawn to, as if by EOS."""

    lengths: Dict[int, int]

    async def generate(self, input_ids, sampling, max_new_tokens, group=None, cut=None) -> Generation:
        so_far = len(input_ids) - PROMPT
        wanted = min(max_new_tokens, self.lengths[group] - so_far)
        part = await super().generate(input_ids, sampling, wanted, group, cut)
        ended = so_far + len(part.tokens) == self.lengths[group]
        return replace(part, finish=Finish.eos) if ended else part


@dataclass
class Way:
    name: str
    rollout: RolloutConfig
    overlap: bool = False


def ways(args: argparse.Namespace) -> List[Way]:
    base = RolloutConfig(global_max_length=args.cap, segment_count=1)
    four = replace(base, segment_count=4)
    enough = dict(stop=Stop.enough, enough_samples=args.in_flight // 4)
    return [
        *(Way(f"{n} segments" if n > 1 else "1 segment", replace(base, segment_count=n)) for n in (1, 2, 4, 8)),
        Way("enough", replace(base, **enough)),
        Way("4, overlap", four, overlap=True),
        Way("enough, overlap", replace(base, **enough), overlap=True),
    ]


async def train(pool: ForcedPool, way: Way, lengths: List[int], args: argparse.Namespace, rate: float) -> float:
    """Seconds until all responses have trained."""
    rollout = SegmentRollout(pool, way.rollout)
    pool.lengths = dict(enumerate(lengths))
    fresh = [Sample(i, i, i, [i % 256, i // 256] + [7] * (PROMPT - 2), "", 1) for i in range(len(lengths))]
    unfinished: List[Sample] = []
    begin = time.perf_counter()
    step, running, trained = 0, None, 0

    def admit() -> List[Sample]:
        room = args.in_flight - len(unfinished)
        unfinished.extend(fresh[:room])
        del fresh[:room]
        return list(unfinished)

    async def right(sample: Sample) -> float:
        return 1.0

    def collect(samples: List[Sample]) -> Optional[asyncio.Task]:
        return asyncio.create_task(rollout.collect(step, samples, right, lambda sample: None)) if samples else None

    while trained < len(lengths):
        step += 1
        samples = admit()
        await (running or collect(samples))
        done = [sample for sample in unfinished if sample.complete]
        unfinished[:] = [sample for sample in unfinished if not sample.complete]
        trained += len(done)
        running = None
        if way.overlap:
            step += 1
            running = collect(admit())
            step -= 1
        await asyncio.sleep(args.train_share * sum(sample.length for sample in done) / rate)
        await pool.update_weights(args.dir / "model", pool_version(pool) + 1)
    return time.perf_counter() - begin


def pool_version(pool: ServerPool) -> int:
    return pool._keeper.version


async def measure_rate(pool: ForcedPool, count: int, tokens: int) -> float:
    """Tokens a second with `count` requests of `tokens` tokens at once."""
    pool.lengths = dict.fromkeys(range(count), tokens)
    begin = time.perf_counter()
    sampling = Sampling(1.0)
    await asyncio.gather(*(pool.generate([i] + [7] * (PROMPT - 1), sampling, tokens, i) for i in range(count)))
    return count * tokens / (time.perf_counter() - begin)


async def main(args: argparse.Namespace) -> None:
    config = Config()
    config.run.dir, config.model.path = str(args.dir / "run"), str(args.dir / "model")
    config.model.dtype = Dtype.float32
    config.data.max_prompt_length = PROMPT
    config.rollout.global_max_length = args.cap
    pool = ForcedPool(config, ServedModel(args.dir / "model", 272, frozenset({NEVER})))
    pool.start()
    try:
        await pool.wait_ready()
        await measure_rate(pool, args.in_flight, 64)  # warms up
        rate = await measure_rate(pool, args.in_flight, 128)
        alone = await measure_rate(pool, 1, 128)
        print(f"the server: {alone:.0f} tokens/s for one request, {rate:.0f} for {args.in_flight}")
        draw = random.Random(0)
        lengths = [min(args.cap, max(1, round(draw.lognormvariate(4.4, 1.0)))) for _ in range(args.samples)]
        print(f"{args.samples} responses, {sum(lengths)} tokens, longest {max(lengths)}; {args.in_flight} in flight")
        first = None
        for way in ways(args):
            seconds = await train(pool, way, lengths, args, rate)
            first = first or seconds
            print(f"{way.name:<16}{seconds:7.1f} s   {first / seconds:5.2f} x", flush=True)
    finally:
        await pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory")
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--cap", type=int, default=768)
    parser.add_argument("--train-share", type=float, default=0.2)
    arguments = parser.parse_args()
    if arguments.dir.exists() and any(arguments.dir.iterdir()):
        sys.exit(f"{arguments.dir} is not empty")
    tiny_model(arguments.dir / "model", eos_token_id=None)
    asyncio.run(main(arguments))
