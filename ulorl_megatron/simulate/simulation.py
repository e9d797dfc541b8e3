"""Steps of a run in simulated time: what segments, servers and release rules do to time and staleness."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ulorl_megatron.config.schema import Config
from ulorl_megatron.rollout.pools import Pools
from ulorl_megatron.rollout.sample import Sample
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool
from ulorl_megatron.rollout.store import PoolStore
from ulorl_megatron.simulate.lengths import Lengths
from ulorl_megatron.simulate.server import ServerModel, SimulatedServer
from ulorl_megatron.simulate.virtual_time import run


@dataclass(frozen=True)
class Workload:
    """lengths: of whole responses. prompt_tokens: of every prompt. accuracy: mean share of right responses of a group;
    each group's own is drawn uniformly around it. train_tokens_per_s: of the policy update. fixed_s: of a step beside
    rollout and update (weight conversion, checkpoint)."""

    lengths: Lengths
    prompt_tokens: int
    train_tokens_per_s: float
    fixed_s: float
    accuracy: float = 0.5


@dataclass(frozen=True)
class Outcome:
    """Means over the steps after the pools have filled. Times in seconds, tokens in real ones, shares in [0, 1].

    step_s: a step. rollout_s: its decoding, as far as the step waits for it. train_s: its update. samples: completed in
    a step. sample_s: step_s over samples. idle: share of step_s in which a server has nothing to do. age: mean age of
    completed tokens, in weight versions. prefilled_share: input tokens computed again, of resumed samples and after a
    weight update, over tokens decoded. retractions: a step.
    """

    segments: int
    step_s: float
    rollout_s: float
    train_s: float
    samples: float
    sample_s: float
    idle: float
    age: float
    prefilled_share: float
    retractions: float


class _Prompt(NamedTuple):
    index: int
    tokens: List[int]
    answer: str


class _Prompts:
    """As many alike prompts as are asked for."""

    def __init__(self, tokens: int):
        self._tokens = [0] * tokens

    def take(self, position: int, n: int) -> Sequence[_Prompt]:
        return [_Prompt(position + i, self._tokens, "") for i in range(n)]


def simulate(config: Config, servers: int, model: ServerModel, work: Workload, steps: int, grain: int) -> Outcome:
    """`steps` steps of `config`'s rollout, on so many servers, after segment_count - 1 that fill the pools.

    grain: real tokens that one simulated token stands for; it must divide the segment length. Same seed, same outcome.
    """
    scaled = _scaled(config, servers, grain)
    prompt = max(1, round(work.prompt_tokens / grain))
    with TemporaryDirectory() as folder:
        store = PoolStore(Path(folder) / "pools.sqlite")
        try:
            return run(_steps(scaled, model, work, steps, grain, prompt, store))
        finally:
            store.close()


def _scaled(config: Config, servers: int, grain: int) -> Config:
    segment = config.rollout.global_max_length // config.rollout.segment_count
    if segment % grain:
        raise ValueError(f"a grain of {grain} does not divide a segment of {segment} tokens")
    rollout = replace(
        config.rollout, global_max_length=config.rollout.global_max_length // grain, request_timeout_s=1e9
    )
    urls = [f"http://simulated-{i}" for i in range(servers)]
    return replace(config, rollout=rollout, servers=replace(config.servers, urls=urls))


async def _steps(
    config: Config, model: ServerModel, work: Workload, steps: int, grain: int, prompt: int, store: PoolStore
) -> Outcome:
    clock = asyncio.get_running_loop().time
    random = Random(config.run.seed)
    simulated = [
        SimulatedServer(url, model, work.lengths, prompt, grain, Random(random.random()))
        for url in config.servers.urls
    ]
    pool = ServerPool(config, ServedModel(Path("simulated"), 2, frozenset({1})))
    for member, server in zip(pool.members, simulated, strict=True):
        member.client = server
    await pool.wait_ready()
    pools, rollout = Pools(store, config.rollout, config.experience), SegmentRollout(pool, config.rollout)
    prompts, chances = _Prompts(prompt), {}

    async def verify(sample: Sample) -> float:
        spread = min(work.accuracy, 1 - work.accuracy)
        chance = chances.setdefault(sample.group_id, random.uniform(work.accuracy - spread, work.accuracy + spread))
        return float(random.random() < chance)

    def begin_rollout(step: int) -> Tuple[List[Sample], asyncio.Task]:
        pools.admit(step, prompts)
        samples = pools.unfinished
        return samples, asyncio.create_task(rollout.collect(step, samples, verify, lambda sample: None))

    records: List[Dict[str, float]] = []
    ahead = None
    for step in range(1, config.rollout.segment_count + steps):
        begin, before = clock(), [replace(server.load) for server in simulated]
        in_flight, rolling = ahead or begin_rollout(step)
        await rolling
        rollout_s = clock() - begin
        complete = [s for s in in_flight if s.complete]
        ages = [step - 1 - version for sample in complete for version in sample.versions]
        trained = pools.release(step)
        train_s = sum(len(s.prompt_tokens) + s.length for s, _ in trained) * grain / work.train_tokens_per_s
        pools.commit(step)
        ahead = begin_rollout(step + 1) if config.rollout.overlap else None
        await asyncio.sleep(train_s + work.fixed_s)
        await pool.update_weights(Path("simulated"), step)
        busy = sum(server.load.busy_s - old.busy_s for server, old in zip(simulated, before, strict=True))
        decoded = sum(server.load.decoded - old.decoded for server, old in zip(simulated, before, strict=True))
        fresh = sum(len(s.prompt_tokens) for s in in_flight if s.created_step == step) * grain
        prefilled = sum(s.load.prefilled - old.prefilled for s, old in zip(simulated, before, strict=True))
        retracted = sum(s.load.retractions - old.retractions for s, old in zip(simulated, before, strict=True))
        step_s = clock() - begin
        records.append(
            {
                "step_s": step_s,
                "rollout_s": rollout_s,
                "train_s": train_s,
                "samples": len(complete),
                "idle": 1 - busy / (len(simulated) * step_s),
                "age": mean(ages) if ages else 0.0,
                "prefilled_share": max(0, prefilled - fresh) / decoded,
                "retractions": retracted,
            }
        )
    if ahead:
        ahead[1].cancel()
    await pool.close()
    settled = records[config.rollout.segment_count - 1 :]
    means = {name: mean(record[name] for record in settled) for name in settled[0]}
    return Outcome(config.rollout.segment_count, **means, sample_s=means["step_s"] / means["samples"])


def choose(outcomes: Sequence[Outcome], max_age: float = float("inf")) -> Outcome:
    """The one that makes a completed sample in the least time, among those whose tokens are not older on average."""
    allowed = [outcome for outcome in outcomes if outcome.age <= max_age] or [min(outcomes, key=lambda o: o.age)]
    return min(allowed, key=lambda outcome: outcome.sample_s)
