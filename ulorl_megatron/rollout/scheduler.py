"""The rollout of a step: one segment of every unfinished sample, verified as soon as it is complete."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Awaitable, Callable, List, Sequence

from ulorl_megatron.config.schema import RolloutConfig
from ulorl_megatron.rollout.client import Finish, Generation, Sampling
from ulorl_megatron.rollout.sample import Sample, Segment, Status
from ulorl_megatron.rollout.server_pool import RequestFailed, ServerPool
from ulorl_megatron.verifier import VerifierFailed

log = logging.getLogger(__name__)

# Judges a complete sample: its reward. Raises VerifierFailed when the judge gave up.
Verify = Callable[[Sample], Awaitable[float]]


@dataclass
class RolloutStats:
    """One call of collect. Counts are of samples, except tokens (decoded), cached_tokens and input_tokens
    (sent).

    failed_requests: samples whose request failed on every try; they keep what they have and go on next step.
    aborts: answers cut short by the server, asked again. decode_s: until the last segment arrived. verify_s:
    from then until the last reward arrived.
    """

    samples: int = 0
    finished: int = 0
    truncated: int = 0
    unfinished: int = 0
    verifier_failures: int = 0
    failed_requests: int = 0
    aborts: int = 0
    tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    decode_s: float = 0.0
    verify_s: float = 0.0


class SegmentRollout:
    """Decodes segments on a pool of servers."""

    def __init__(self, servers: ServerPool, config: RolloutConfig):
        self._servers = servers
        self._global_max_length = config.global_max_length
        self._segment_length = config.global_max_length // config.segment_count
        self._abort_retries = config.request_retries
        self._sampling = Sampling(config.temperature, config.top_p, config.top_k)

    async def collect(self, step: int, samples: Sequence[Sample], verify: Verify) -> RolloutStats:
        """Grows every sample by one segment of at most min(segment_length, global_max_length - its length)
        tokens.

        Afterwards a sample is waiting (finished: reward of `verify`; truncated: reward 0, not verified),
        failed (the verifier gave up), or unfinished. A sample whose request failed is unfinished, with its
        earlier tokens. Raises what is fatal for the run: RequestRejected, UserError when no server is left,
        anything of `verify` but VerifierFailed.
        """
        stats = RolloutStats(samples=len(samples))
        begin = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in samples:
                    tasks.create_task(self._advance(step, sample, verify, stats, begin))
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        stats.verify_s = time.perf_counter() - begin - stats.decode_s
        stats.unfinished = sum(sample.status is Status.unfinished for sample in samples)
        return stats

    async def _advance(self, step: int, sample: Sample, verify: Verify, stats: RolloutStats, begin: float) -> None:
        budget = min(self._segment_length, self._global_max_length - sample.length)
        input_ids = sample.prompt_tokens + sample.tokens
        grown = await self._decode(input_ids, self._sampling, budget, stats)
        stats.decode_s = time.perf_counter() - begin
        if not grown.tokens:
            log.warning("sample %d got no tokens in step %d; it goes on in the next", sample.id, step)
            return
        segment = Segment(step, grown.tokens, grown.log_probs, grown.versions)
        finished = grown.finish is Finish.eos
        sample.grow(segment, finished=finished, global_max_length=self._global_max_length)
        if sample.truncated:
            stats.truncated += 1
            sample.reward = 0.0
            sample.status = Status.waiting
        elif sample.finished:
            stats.finished += 1
            try:
                sample.reward = await verify(sample)
                sample.status = Status.waiting
            except VerifierFailed as error:
                log.error("sample %d of row %d is failed: %s", sample.id, sample.prompt_index, error)
                stats.verifier_failures += 1
                sample.status = Status.failed
                sample.settled_step = step

    async def _decode(self, input_ids: List[int], sampling: Sampling, budget: int, stats: RolloutStats) -> Generation:
        """`budget` tokens, or fewer with EOS, or what there is when the requests failed (finish: aborted).

        An answer cut short by the server keeps its tokens and the rest is asked again (sglang#11673, #19881).
        """
        tokens: List[int] = []
        log_probs: List[float] = []
        versions: List[int] = []
        for _ in range(self._abort_retries + 1):
            try:
                part = await self._servers.generate(input_ids + tokens, sampling, budget - len(tokens))
            except RequestFailed as error:
                log.warning("%s", error)
                break
            stats.input_tokens += len(input_ids) + len(tokens)
            stats.cached_tokens += part.cached_tokens
            stats.tokens += len(part.tokens)
            tokens += part.tokens
            log_probs += part.log_probs
            versions += part.versions
            if part.finish is Finish.eos:
                return Generation(tokens, log_probs, versions, Finish.eos)
            if len(tokens) == budget:
                return Generation(tokens, log_probs, versions, Finish.length)
            stats.aborts += 1
            log.warning("aborted after %d of %d tokens: %s", len(tokens), budget, part.abort_reason)
        stats.failed_requests += 1
        return Generation(tokens, log_probs, versions, Finish.aborted, "every try failed")

    async def sample_to_end(self, prompts: Sequence[List[int]], n: int, sampling: Sampling) -> List[List[Generation]]:
        """n whole responses of each prompt (ids), for evaluation: n of EOS or global_max_length tokens each.

        Decoded segment by segment too, so that each request keeps its deadline. Raises RequestFailed if one
        response cannot be had: an average over fewer would be another measure.
        """
        stats = RolloutStats()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [tasks.create_task(self._to_end(prompt, sampling, stats)) for _ in range(n)] for prompt in prompts
                ]
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        return [[task.result() for task in group] for group in running]

    async def _to_end(self, prompt: List[int], sampling: Sampling, stats: RolloutStats) -> Generation:
        tokens: List[int] = []
        log_probs: List[float] = []
        versions: List[int] = []
        finish = Finish.length
        while finish is Finish.length and len(tokens) < self._global_max_length:
            budget = min(self._segment_length, self._global_max_length - len(tokens))
            part = await self._decode(prompt + tokens, sampling, budget, stats)
            tokens, log_probs, versions = (
                tokens + part.tokens,
                log_probs + part.log_probs,
                versions + part.versions,
            )
            finish = part.finish
        if finish is Finish.aborted:
            raise RequestFailed(f"a response for evaluation stopped after {len(tokens)} tokens")
        return Generation(tokens, log_probs, versions, finish)


def _first(errors: ExceptionGroup) -> Exception:
    """The error that ended a task group, nested groups opened."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
