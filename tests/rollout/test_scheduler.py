import asyncio
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import List, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulorl_megatron.config.schema import RolloutConfig, Stop
from ulorl_megatron.rollout.client import Finish, Generation, RequestRejected, Sampling
from ulorl_megatron.rollout.sample import Sample, Segment, Status
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.server_pool import RequestFailed
from ulorl_megatron.verifier import VerifierFailed

PROMPT = [1, 2, 3]
EOS = 9


class ScriptedPool:
    """Answers by a script: ("length" | "eos" | "abort" | "fail", share of the budget that is decoded).

    The k-th token of a response is k; calls are (response tokens so far, budget). After the script: length.
    """

    def __init__(self, script=()):
        self.script = list(script)
        self.calls = []
        self.expected = None

    def expect(self, tokens: int) -> None:
        self.expected = tokens

    def kept(self):
        return nullcontext()

    async def generate(
        self, input_ids: List[int], sampling: Sampling, max_new_tokens: int, group: int, cut: Optional[asyncio.Event]
    ) -> Generation:
        assert input_ids[: len(PROMPT)] == PROMPT
        so_far = input_ids[len(PROMPT) :]
        assert so_far == list(range(len(so_far))), "a segment continues by ids exactly"
        assert max_new_tokens >= 1
        self.calls.append((len(so_far), max_new_tokens))
        await asyncio.sleep(0)
        kind, share = self.script.pop(0) if self.script else ("length", 1.0)
        if kind == "fail":
            raise RequestFailed("scripted")
        count = max_new_tokens if kind == "length" else math.ceil(max_new_tokens * share)
        if kind == "abort":
            count = min(count, max_new_tokens - 1)
        tokens = list(range(len(so_far), len(so_far) + count))
        finish = {"length": Finish.length, "eos": Finish.eos, "abort": Finish.aborted}[kind]
        return Generation(tokens, [-0.5] * count, [len(self.calls)] * count, finish, "scripted")


def sample(id=0) -> Sample:
    return Sample(id=id, group_id=0, prompt_index=0, prompt_tokens=PROMPT, answer="5", created_step=1)


def config(length=64, segments=4, retries=2) -> RolloutConfig:
    return RolloutConfig(global_max_length=length, segment_count=segments, request_retries=retries)


async def right(sample: Sample) -> float:
    return 1.0


def collect(pool, samples, verify=right, step=1, rollout=None, keep=lambda sample: None):
    return asyncio.run(SegmentRollout(pool, rollout or config()).collect(step, samples, verify, keep))


kinds = st.tuples(
    st.sampled_from(["length", "length", "length", "eos", "abort", "fail"]), st.floats(0, 1, exclude_min=True)
)


@given(
    script=st.lists(kinds, max_size=60),
    segment=st.integers(1, 7),
    segments=st.integers(1, 6),
    retries=st.integers(0, 3),
)
def test_the_total_never_passes_the_cap_whatever_happens(script, segment, segments, retries):  # slime#2261
    rollout = config(segment * segments, segments, retries)
    pool, one = ScriptedPool(script), sample()
    for step in range(1, 200):
        collect(pool, [one], step=step, rollout=rollout)
        assert one.length <= rollout.global_max_length
        assert one.length == len(one.tokens) == len(one.log_probs) == len(one.versions)
        assert all(len(s.tokens) <= segment for s in one.segments)
        assert len({s.step for s in one.segments}) == len(one.segments), "one segment a step"
        if one.complete:
            break
    assert one.complete
    assert one.tokens == list(range(one.length))
    assert one.truncated == (not one.finished)
    if one.truncated:
        assert one.length == rollout.global_max_length
        assert one.reward == 0.0


def test_four_segments_of_an_unending_response(tmp_path):
    pool, one = ScriptedPool(), sample()
    for step in (1, 2, 3, 4):
        assert one.status is Status.unfinished
        stats = collect(pool, [one], step=step)
    assert pool.calls == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert one.truncated and one.reward == 0.0 and one.status is Status.waiting
    assert (stats.truncated, stats.finished, stats.unfinished, stats.tokens) == (1, 0, 0, 16)


def test_a_truncated_sample_is_not_verified():
    async def verify(sample):
        raise AssertionError("verified")

    one = sample()
    collect(ScriptedPool(), [one], verify, rollout=config(16, 1))
    assert one.truncated and one.reward == 0.0


def test_eos_at_the_last_token_is_finished_not_truncated():
    one = sample()
    collect(ScriptedPool([("eos", 1.0)]), [one], rollout=config(16, 1))
    assert one.length == 16 and one.finished and not one.truncated and one.reward == 1.0


def test_an_abort_keeps_its_tokens_and_the_rest_is_asked():  # sglang#11673
    pool, one = ScriptedPool([("abort", 0.5), ("abort", 0.01)]), sample()
    stats = collect(pool, [one])
    assert pool.calls == [(0, 16), (8, 8), (9, 7)]
    assert one.length == 16 and len(one.segments) == 1
    assert one.versions == [1] * 8 + [2] + [3] * 7
    assert (stats.aborts, stats.failed_requests, stats.unfinished) == (2, 0, 1)


def test_a_failed_request_keeps_the_prefix_for_the_next_step():
    pool, one = ScriptedPool([("length", 1.0), ("fail", 1.0)]), sample()
    collect(pool, [one], step=1)
    stats = collect(pool, [one], step=2)
    assert one.length == 16 and one.status is Status.unfinished
    assert (stats.failed_requests, stats.unfinished, stats.tokens) == (1, 1, 0)
    collect(pool, [one], step=3)
    assert one.length == 32 and [s.step for s in one.segments] == [1, 3]


def test_what_came_before_a_failure_in_the_same_step_is_kept():
    one = sample()
    collect(ScriptedPool([("abort", 0.25), ("fail", 1.0)]), [one])
    assert one.length == 4 and one.status is Status.unfinished


def test_a_verifier_failure_is_failed_not_wrong():
    async def broken(sample):
        raise VerifierFailed("judge died")

    one, other = sample(0), sample(1)
    stats = collect(ScriptedPool([("eos", 0.5)]), [one, other], broken, step=4)
    assert one.status is Status.failed and one.reward is None and one.settled_step == 4
    assert other.status is Status.unfinished
    assert stats.verifier_failures == 1


def test_what_servers_compute_again_is_counted():
    one = sample()
    assert collect(ScriptedPool(), [one], step=1).reprefilled_tokens == 0
    assert collect(ScriptedPool(), [one], step=2).reprefilled_tokens == len(PROMPT) + 16
    cut_short = collect(ScriptedPool([("abort", 0.5)]), [sample()], step=1)
    assert cut_short.reprefilled_tokens == len(PROMPT) + 8  # asked again with what there was


def test_verification_does_not_wait_for_the_last_decode():
    """The second sample decodes only once the first one's verification has begun."""
    begun = asyncio.Event()

    class Held(ScriptedPool):
        async def generate(self, input_ids, sampling, max_new_tokens, group, cut):
            if self.calls:
                self.calls.append(None)
                await begun.wait()
                return Generation([], [], [], Finish.aborted, "held")
            return await super().generate(input_ids, sampling, max_new_tokens, group, cut)

    async def verify(sample):
        begun.set()
        return 0.0

    one, other = sample(0), sample(1)
    collect(Held([("eos", 0.5)]), [one, other], verify)
    assert one.reward == 0.0 and one.status is Status.waiting
    assert other.status is Status.unfinished


def test_a_sample_that_has_its_segment_is_not_decoded_again():
    """Taken up after a kill: one goes on next step, one is judged, one was judged; the fourth is decoded."""
    going_on, to_judge, judged, missing = (sample(i) for i in range(4))
    going_on.grow(Segment(1, [7] * 16, [-1.0] * 16, [0] * 16), finished=False, global_max_length=64)
    for one in (to_judge, judged):
        one.grow(Segment(1, [7, EOS], [-1.0] * 2, [0] * 2), finished=True, global_max_length=64)
    judged.reward, judged.status = 0.0, Status.waiting
    pool, kept = ScriptedPool(), []
    stats = collect(pool, [going_on, to_judge, judged, missing], keep=lambda s: kept.append((s.id, s.reward)))
    assert pool.calls == [(0, 16)] and missing.length == 16
    assert (to_judge.reward, judged.reward) == (1.0, 0.0)
    assert sorted(kept) == [(1, 1.0), (3, None)]
    assert (stats.recalled, stats.finished, stats.unfinished, stats.tokens) == (3, 2, 2, 16)


def test_segments_are_kept_as_they_come_and_verdicts_after_them():
    kept = []
    one = sample()
    collect(ScriptedPool([("eos", 0.5)]), [one], keep=lambda s: kept.append((s.length, s.reward)))
    assert kept == [(8, None), (8, 1.0)]


def test_the_pool_is_told_what_to_expect():
    pool, fresh, old = ScriptedPool(), sample(0), sample(1)
    collect(pool, [old], step=1)
    collect(pool, [fresh, old], step=2)
    assert pool.expected == 2 * len(PROMPT) + 16 + 2 * 16


def test_what_is_fatal_stops_the_step():
    class Refusing(ScriptedPool):
        async def generate(self, input_ids, sampling, max_new_tokens, group, cut):
            raise RequestRejected("context too small")

    with pytest.raises(RequestRejected, match="context too small"):
        collect(Refusing(), [sample(0), sample(1)])


def test_evaluation_decodes_whole_responses_in_segments():
    pool = ScriptedPool([("length", 1.0), ("eos", 0.5)])
    ((one,),) = asyncio.run(SegmentRollout(pool, config()).sample_to_end([PROMPT], 1, Sampling(0.85, 0.95, 20)))
    assert one.finish is Finish.eos and one.tokens == list(range(24))
    assert pool.calls == [(0, 16), (16, 16)]


def test_evaluation_gives_n_of_each_and_never_passes_the_cap():
    pool = ScriptedPool()
    result = asyncio.run(SegmentRollout(pool, config()).sample_to_end([PROMPT] * 3, 2, Sampling(0.85)))
    assert [len(group) for group in result] == [2, 2, 2]
    assert all(len(g.tokens) == 64 and g.finish is Finish.length for group in result for g in group)


def test_evaluation_over_fewer_responses_is_an_error():
    with pytest.raises(RequestFailed):
        asyncio.run(SegmentRollout(ScriptedPool([("fail", 1)]), config()).sample_to_end([PROMPT], 1, Sampling(1)))


class PacedPool(ScriptedPool):
    """A token of every response each millisecond; response `id` ends after ends[id] tokens."""

    def __init__(self, ends):
        super().__init__()
        self.ends = ends

    async def generate(self, input_ids, sampling, max_new_tokens, group, cut):
        so_far, tokens = len(input_ids) - len(PROMPT), []
        wanted = min(max_new_tokens, self.ends[group] - so_far)
        while len(tokens) < wanted and not cut.is_set():
            await asyncio.sleep(0.001)
            tokens.append(so_far + len(tokens))
        ended = so_far + len(tokens) == self.ends[group]
        finish = Finish.eos if ended else Finish.length if len(tokens) == max_new_tokens else Finish.aborted
        return Generation(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish, "cut")


def test_enough_complete_samples_end_the_step_and_every_token_is_kept():
    ends = {0: 4, 1: 2000, 2: 8, 3: 3000, 4: 12}
    samples = [replace(sample(id), group_id=id) for id in ends]
    rollout = replace(config(length=4096, segments=2), stop=Stop.enough, enough_samples=3)
    pool = PacedPool(ends)
    stats = collect(pool, samples, rollout=rollout)
    assert [s.status for s in samples] == [
        Status.waiting, Status.unfinished, Status.waiting, Status.unfinished, Status.waiting
    ]  # fmt: skip
    for long in (samples[1], samples[3]):
        assert 12 <= long.length < ends[long.id] and long.tokens == list(range(long.length))
    assert (stats.finished, stats.unfinished, stats.aborts, stats.failed_requests) == (3, 2, 0, 0)
    rest = [samples[1], samples[3]]
    before = [s.length for s in rest]
    collect(pool, rest, step=2, rollout=replace(rollout, enough_samples=1))
    assert rest[0].complete and rest[0].length == 2000 and before[1] < rest[1].length < 3000
    assert rest[1].tokens == list(range(rest[1].length))
