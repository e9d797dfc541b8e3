"""Time to train the same samples with 1, 2, 4 and 8 segments, with `enough`, and with `overlap`, on a real server.

python benchmarks/segments.py --dir DIR [--samples 256] [--in-flight 32] [--cap 1280] [--train-share 0.2]

Every response has a length drawn beforehand from a log-normal law cut at --cap, the same for all ways, so only the
scheduling differs. The cap is some ten times the mean, as Table 1 of the paper lets one conclude. The scheduler, the
server pool and one SGLang server (a tiny random model) are the real ones; the policy update is a pause of
--train-share of the time its tokens take to decode with all requests running. Weights are loaded into the server
after every step. Prints seconds, how many times faster than one segment, and what the simulator
(ulorl_megatron/simulate) says of the same work, from a few measurements of the server beforehand.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forced import PROMPT, ForcedPool, forced_config, make_model, served_model  # noqa: E402
from ulorl_megatron.config.schema import RolloutConfig, Stop  # noqa: E402
from ulorl_megatron.rollout.client import Sampling  # noqa: E402
from ulorl_megatron.rollout.sample import Sample  # noqa: E402
from ulorl_megatron.rollout.scheduler import SegmentRollout  # noqa: E402
from ulorl_megatron.simulate import virtual_time  # noqa: E402
from ulorl_megatron.simulate.lengths import Observed  # noqa: E402
from ulorl_megatron.simulate.server import ServerModel, SimulatedServer  # noqa: E402


@dataclass
class Way:
    name: str
    rollout: RolloutConfig


def ways(args: argparse.Namespace, base: RolloutConfig) -> List[Way]:
    enough = dict(stop=Stop.enough, enough_samples=args.in_flight // 4)
    return [
        *(Way(f"{n} segments" if n > 1 else "1 segment", replace(base, segment_count=n)) for n in (1, 2, 4, 8)),
        Way("enough", replace(base, **enough)),
        Way("4, overlap", replace(base, segment_count=4, overlap=True)),
        Way("enough, overlap", replace(base, **enough, overlap=True)),
    ]


async def train(pool: ForcedPool, way: Way, lengths: List[int], args: argparse.Namespace, train_s: float) -> float:
    """Seconds, by the event loop's clock, until all responses have trained. train_s: of the update, a token."""
    clock = asyncio.get_running_loop().time
    rollout = SegmentRollout(pool, way.rollout)
    pool.lengths = dict(enumerate(lengths))
    fresh = [Sample(i, i, i, [i % 256, i // 256] + [7] * (PROMPT - 2), "", 1) for i in range(len(lengths))]
    unfinished: List[Sample] = []
    begin = clock()
    step, running, trained = 0, None, 0

    def admit() -> List[Sample]:
        room = args.in_flight - len(unfinished)
        unfinished.extend(fresh[:room])
        del fresh[:room]
        return list(unfinished)

    async def right(sample: Sample) -> float:
        return 1.0

    def collect(step: int, samples: List[Sample]) -> Optional[asyncio.Task]:
        return asyncio.create_task(rollout.collect(step, samples, right, lambda sample: None)) if samples else None

    while trained < len(lengths):
        step += 1
        await (running or collect(step, admit()))
        done = [sample for sample in unfinished if sample.complete]
        unfinished[:] = [sample for sample in unfinished if not sample.complete]
        trained += len(done)
        running = collect(step + 1, admit()) if way.rollout.overlap else None
        await asyncio.sleep(train_s * sum(sample.length for sample in done))
        await pool.update_weights(args.dir / "model", pool.version + 1)
    return clock() - begin


async def load(pool: ForcedPool, count: int, inputs: int, tokens: int) -> float:
    """Seconds that `count` requests with so many input ids need for so many tokens each."""
    await pool.update_weights(Path(pool.members[0].client.model.path), pool.version + 1)  # nothing is cached
    pool.lengths = dict.fromkeys(range(count), inputs - PROMPT + tokens)
    begin = time.perf_counter()
    prompts = [[i] + [7] * (inputs - 1) for i in range(count)]
    await asyncio.gather(*(pool.generate(ids, Sampling(1.0), tokens, i) for i, ids in enumerate(prompts)))
    return time.perf_counter() - begin


async def measure(pool: ForcedPool, args: argparse.Namespace) -> ServerModel:
    """The server as a formula: least squares over loads of several sizes, contexts and input lengths."""
    most, long, tokens = args.in_flight, args.cap // 3, min(256, args.cap // 2)
    loads = [(1, PROMPT, tokens), (most // 8, PROMPT, tokens), (most // 2, PROMPT, tokens), (most, PROMPT, tokens)]
    loads += [(1, long, tokens), (most // 8, long, tokens), (most // 2, long, tokens), (most // 2, long, 1)]
    await load(pool, most, PROMPT, 32)  # warms up
    rows, seconds = [], []
    for count, inputs, outputs in loads:
        seconds.append(await load(pool, count, inputs, outputs))
        contexts = count * sum(range(inputs, inputs + outputs))
        rows.append([outputs, outputs * count, contexts, count * inputs])
    weights = 1 / np.array(seconds)  # relative errors count alike
    step_s, sequence_s, context_s, input_s = np.linalg.lstsq(
        np.array(rows) * weights[:, None], np.array(seconds) * weights, rcond=None
    )[0]
    begin = time.perf_counter()
    for _ in range(5):
        await pool.update_weights(args.dir / "model", pool.version + 1)
    update_s = (time.perf_counter() - begin) / 5
    print(
        f"the server: {1e3 * step_s:.2f} ms a step, {1e3 * sequence_s:.3f} ms a request in it, "
        f"{1e9 * context_s:.0f} ns a token of context, {1e6 * input_s:.0f} us an input token, "
        f"{update_s:.2f} s for new weights"
    )
    return ServerModel(
        step_s, max(sequence_s, 0.0), max(context_s, 0.0), 1 / max(input_s, 1e-9), 2**40, update_s=update_s
    )


def simulated(way: Way, model: ServerModel, lengths: List[int], args: argparse.Namespace, train_s: float) -> float:
    """What `train` takes on a simulated server."""

    async def main() -> float:
        config = forced_config(args.dir, args.cap)
        config.servers.urls = ["http://simulated"]
        pool = ForcedPool(config, served_model(args.dir))
        endless = Observed([2**30])  # the pool cuts the responses
        pool.members[0].client = SimulatedServer("http://simulated", model, endless, PROMPT, 1, random.Random(0))
        await pool.wait_ready()
        return await train(pool, way, lengths, args, train_s)

    return virtual_time.run(main())


async def measured(args: argparse.Namespace, found: list) -> None:
    """Appends to `found` the server's model, the time of the update a token, and each way's seconds."""
    config = forced_config(args.dir, args.cap)
    pool = ForcedPool(config, served_model(args.dir))
    pool.start()
    try:
        await pool.wait_ready()
        model = await measure(pool, args)
        train_s = args.train_share * (model.step_s / args.in_flight + model.sequence_s)
        found += [model, train_s]
        for way in ways(args, config.rollout):
            found.append(await train(pool, way, args.lengths, args, train_s))
            print(f"{way.name:<16}{found[-1]:7.1f} s", flush=True)
    finally:
        await pool.close()


def main(args: argparse.Namespace) -> None:
    draw = random.Random(0)
    args.lengths = [min(args.cap, max(1, round(draw.lognormvariate(3.7, 1.5)))) for _ in range(args.samples)]
    print(
        f"{args.samples} responses, {sum(args.lengths)} tokens, longest {max(args.lengths)}; {args.in_flight} in flight"
    )
    found: list = []
    asyncio.run(measured(args, found))
    model, train_s, *seconds = found
    print(f"\n{'':<16}   real           simulated   off by")
    for way, real in zip(ways(args, forced_config(args.dir, args.cap).rollout), seconds, strict=True):
        told = simulated(way, model, args.lengths, args, train_s)
        speed = seconds[0] / real
        print(f"{way.name:<16}{real:7.1f} s {speed:5.2f} x {told:7.1f} s {told / real - 1:+8.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--cap", type=int, default=1280)
    parser.add_argument("--train-share", type=float, default=0.2)
    arguments = parser.parse_args()
    make_model(arguments.dir)
    main(arguments)
