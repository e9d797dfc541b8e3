"""The rollout of a step: one segment of every unfinished sample, verified as soon as it is complete."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Awaitable, Callable, List, Optional, Sequence, Set

from ulorl_megatron.config.schema import RolloutConfig, Stop
from ulorl_megatron.rollout.client import Finish, Generation, Sampling
from ulorl_megatron.rollout.sample import Sample, Segment, Status
from ulorl_megatron.rollout.server_pool import RequestFailed, ServerPool
from ulorl_megatron.rollout.tasks import task_group
from ulorl_megatron.verifier import VerifierFailed

log = logging.getLogger(__name__)

_ENOUGH_POLL_S = 1.0

# Judges a complete sample: its reward. Raises VerifierFailed when the judge gave up.
Verify = Callable[[Sample], Awaitable[float]]
# Makes durable what a sample got in this step: its segment, then its reward. Returns at once.
Keep = Callable[[Sample], None]


@dataclass
class RolloutStats:
    """One call of collect. Counts are of samples, except tokens (decoded), input_tokens (sent),
    cached_tokens (of these) and reprefilled_tokens (sent again for samples that had tokens, and not cached).

    recalled: samples that had their segment already, from before a kill. failed_requests: samples whose request
    failed on every try; they keep what they have and go on next step. aborts: answers cut short by the server,
    asked again. decode_s: until the last segment arrived. verify_s: from then until the last reward arrived.
    """

    samples: int = 0
    recalled: int = 0
    finished: int = 0
    truncated: int = 0
    unfinished: int = 0
    verifier_failures: int = 0
    failed_requests: int = 0
    aborts: int = 0
    tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    decode_s: float = 0.0
    verify_s: float = 0.0


class SegmentRollout:
    """Decodes segments on a pool of servers."""

    def __init__(self, servers: ServerPool, config: RolloutConfig):
        self._servers = servers
        self._global_max_length = config.global_max_length
        self._segment_length = config.global_max_length // config.segment_count
        self._abort_retries = config.request_retries
        self._enough = config.enough_samples if config.stop is Stop.enough else None
        self._sampling = Sampling(config.temperature, config.top_p, config.top_k)

    async def collect(self, step: int, samples: Sequence[Sample], verify: Verify, keep: Keep) -> RolloutStats:
        """Grows every sample by one segment of at most min(segment_length, global_max_length - its length)
        tokens. One that has a segment of this step already is not decoded again. With rollout.stop enough
        decoding ends when rollout.enough_samples samples are complete; the others get what they have by then.

        Afterwards a sample is waiting (finished: reward of `verify`; truncated: reward 0, not verified),
        failed (the verifier gave up), or unfinished. A sample whose request failed is unfinished, with its
        earlier tokens. Raises what is fatal for the run: RequestRejected, UserError when no server is left,
        anything of `verify` but VerifierFailed, and of `keep`.
        """
        stats = RolloutStats(samples=len(samples))
        begin = time.perf_counter()
        to_decode = [s for s in samples if not (s.segments and s.segments[-1].step == step)]
        stats.recalled = len(samples) - len(to_decode)
        cut = None if self._enough is None else asyncio.Event()
        self._servers.expect(sum(len(s.prompt_tokens) + s.length + self._budget(s.length) for s in to_decode))
        async with self._servers.kept(), task_group() as tasks:
            decoding = {
                tasks.create_task(self._advance(step, sample, verify, keep, stats, begin, cut)) for sample in to_decode
            }
            if cut is not None:
                tasks.create_task(self._stop_at_enough(samples, decoding, cut))
            for sample in samples:
                if sample.finished and sample.status is Status.unfinished:
                    tasks.create_task(self._judge(step, sample, verify, keep, stats))
        stats.verify_s = time.perf_counter() - begin - stats.decode_s
        stats.finished = sum(sample.finished for sample in samples)
        stats.truncated = sum(sample.truncated for sample in samples)
        stats.unfinished = sum(sample.status is Status.unfinished for sample in samples)
        return stats

    async def _stop_at_enough(
        self, samples: Sequence[Sample], decoding: Set[asyncio.Task], cut: asyncio.Event
    ) -> None:
        """Sets `cut` when enough of the samples are complete."""
        while sum(sample.complete for sample in samples) < self._enough:
            going_on = [task for task in decoding if not task.done()]
            if not going_on:
                return
            await asyncio.wait(going_on, timeout=_ENOUGH_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        cut.set()

    def _budget(self, length: int) -> int:
        """Tokens of the next segment of a response that has `length`."""
        return min(self._segment_length, self._global_max_length - length)

    async def _advance(
        self,
        step: int,
        sample: Sample,
        verify: Verify,
        keep: Keep,
        stats: RolloutStats,
        begin: float,
        cut: Optional[asyncio.Event],
    ) -> None:
        input_ids = sample.prompt_tokens + sample.tokens
        budget = self._budget(sample.length)
        grown = await self._decode(input_ids, sample.length, self._sampling, budget, sample.group_id, stats, cut)
        stats.decode_s = time.perf_counter() - begin
        if not grown.tokens:
            if not _is_set(cut):
                log.warning("sample %d got no tokens in step %d; it goes on in the next", sample.id, step)
            return
        segment = Segment(step, grown.tokens, grown.log_probs, grown.versions)
        sample.grow(segment, finished=grown.finish is Finish.eos, global_max_length=self._global_max_length)
        if sample.truncated:
            sample.reward, sample.status = 0.0, Status.waiting
        keep(sample)
        if sample.finished:
            await self._judge(step, sample, verify, keep, stats)

    async def _judge(self, step: int, sample: Sample, verify: Verify, keep: Keep, stats: RolloutStats) -> None:
        try:
            sample.reward = await verify(sample)
            sample.status = Status.waiting
            keep(sample)
        except VerifierFailed as error:
            log.error("sample %d of row %d is failed: %s", sample.id, sample.prompt_index, error)
            stats.verifier_failures += 1
            sample.status = Status.failed
            sample.settled_step = step

    async def _decode(
        self,
        input_ids: List[int],
        so_far: int,
        sampling: Sampling,
        budget: int,
        group: int,
        stats: RolloutStats,
        cut: Optional[asyncio.Event] = None,
    ) -> Generation:
        """`budget` tokens, or fewer with EOS, or what there is when the requests failed (finish: aborted).

        so_far: how many of the input ids are the response's.

        An answer cut short by the server keeps its tokens and the rest is asked again (sglang#11673, #19881), unless
        `cut` is set.
        """
        tokens: List[int] = []
        log_probs: List[float] = []
        versions: List[int] = []
        for _ in range(self._abort_retries + 1):
            try:
                part = await self._servers.generate(input_ids + tokens, sampling, budget - len(tokens), group, cut)
            except RequestFailed as error:
                log.warning("%s", error)
                break
            stats.input_tokens += len(input_ids) + len(tokens)
            stats.cached_tokens += part.cached_tokens
            if so_far or tokens:
                stats.reprefilled_tokens += len(input_ids) + len(tokens) - part.cached_tokens
            stats.tokens += len(part.tokens)
            tokens += part.tokens
            log_probs += part.log_probs
            versions += part.versions
            if part.finish is Finish.eos:
                return Generation(tokens, log_probs, versions, Finish.eos)
            if len(tokens) == budget:
                return Generation(tokens, log_probs, versions, Finish.length)
            if _is_set(cut):
                break
            stats.aborts += 1
            log.warning("aborted after %d of %d tokens: %s", len(tokens), budget, part.abort_reason)
        if _is_set(cut):
            return Generation(tokens, log_probs, versions, Finish.aborted, "enough samples are complete")
        stats.failed_requests += 1
        return Generation(tokens, log_probs, versions, Finish.aborted, "every try failed")

    async def sample_to_end(self, prompts: Sequence[List[int]], n: int, sampling: Sampling) -> List[List[Generation]]:
        """n whole responses of each prompt (ids), for evaluation: n of EOS or global_max_length tokens each.

        Decoded segment by segment too, so that each request keeps its deadline. Raises RequestFailed if one
        response cannot be had: an average over fewer would be another measure.
        """
        stats = RolloutStats()
        self._servers.expect(n * sum(len(prompt) + self._segment_length for prompt in prompts))
        async with self._servers.kept(), task_group() as tasks:
            running = [
                [tasks.create_task(self.respond(prompt, group, sampling, stats)) for _ in range(n)]
                for group, prompt in enumerate(prompts)
            ]
        return [[task.result() for task in group] for group in running]

    async def respond(
        self, prompt: List[int], group: int, sampling: Sampling, stats: Optional[RolloutStats] = None
    ) -> Generation:
        """One whole response, as of sample_to_end; inside the server pool's `kept`. stats: what is to count it."""
        stats = stats or RolloutStats()
        tokens: List[int] = []
        log_probs: List[float] = []
        versions: List[int] = []
        finish = Finish.length
        while finish is Finish.length and len(tokens) < self._global_max_length:
            part = await self._decode(
                prompt + tokens, len(tokens), sampling, self._budget(len(tokens)), group, stats
            )
            tokens, log_probs, versions = (
                tokens + part.tokens,
                log_probs + part.log_probs,
                versions + part.versions,
            )
            finish = part.finish
        if finish is Finish.aborted:
            raise RequestFailed(f"a response for evaluation stopped after {len(tokens)} tokens")
        return Generation(tokens, log_probs, versions, finish)


def _is_set(cut: Optional[asyncio.Event]) -> bool:
    return cut is not None and cut.is_set()
