"""The language model as a judge: votes, cache, faults, and a judge that is down."""

import asyncio
import time

import pytest

from tests.verifier.scripted_judge import DIFFERENT, EQUIVALENT, UNKNOWN, ScriptedJudge
from ulorl_megatron.config.schema import JudgeConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier import By, GenerativeVerifier, UnknownVerdict, Verdict, VerifierFailed
from ulorl_megatron.verifier.client import JudgeClient

RIGHT, WRONG = Verdict(1.0, By.model), Verdict(0.0, By.model)


def judged(work, script=lambda *texts: EQUIVALENT, **settings):
    """What `work(verifier, judge)` returns, with a judge that replies by `script`."""

    async def run():
        judge = ScriptedJudge(script)
        async with judge.serve(**settings) as config:
            verifier = GenerativeVerifier(config, JudgeClient(config, backoff_s=0.01))
            try:
                return await work(verifier, judge)
            finally:
                await verifier.close()

    return asyncio.run(run())


def verify(verifier, given="0.27m", answer="27cm", question="How far?"):
    return verifier.verify(question=question, response=rf"<think>long</think>so \boxed{{{given}}}", answer=answer)


def test_the_model_sees_the_extracted_answer_and_its_verdict_counts():
    async def work(verifier, judge):
        verdicts = [await verify(verifier), await verify(verifier, "27m")]
        return verdicts, judge

    verdicts, judge = judged(work, lambda question, reference, given: EQUIVALENT if given == "0.27m" else DIFFERENT)
    assert verdicts == [RIGHT, WRONG]
    assert "long" not in judge.prompts[0]
    assert judge.bodies[0]["model"] == "scripted"  # found out, since none was named


def test_no_answer_is_wrong_without_asking():
    async def work(verifier, judge):
        verdict = await verifier.verify(question="?", response=r"\boxed{}", answer="1")
        return verdict, judge.prompts

    assert judged(work) == (Verdict(0.0, By.no_answer), [])


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([EQUIVALENT, DIFFERENT, EQUIVALENT], RIGHT),
        ([DIFFERENT, UNKNOWN, DIFFERENT], WRONG),
        ([EQUIVALENT, UNKNOWN, DIFFERENT], None),
        ([UNKNOWN, "no idea", EQUIVALENT], None),
    ],
)
def test_the_majority_decides_and_without_one_it_is_unknown(replies, expected):
    async def work(verifier, judge):
        for _ in range(2):
            left[:] = replies
            if expected is None:  # never a 0, and asked again the next time
                with pytest.raises(UnknownVerdict, match="unknown"):
                    await verify(verifier)
            else:
                assert await verify(verifier) in (expected, Verdict(expected.reward, By.cache))
        return len(judge.prompts)

    left = []
    asked = judged(work, lambda *texts: left.pop(0), votes=3, temperature=0.7)
    assert asked == (6 if expected is None else 3)


def test_equal_answers_are_asked_about_once_and_the_cache_is_bounded():
    async def work(verifier, judge):
        verdicts = await asyncio.gather(*(verify(verifier) for _ in range(8)))
        assert verdicts.count(RIGHT) == 1 and verdicts.count(Verdict(1.0, By.cache)) == 7
        await verify(verifier, answer="28cm"), await verify(verifier, question="How wide?")
        assert len(judge.prompts) == 3
        assert await verify(verifier) == RIGHT  # two others came since

    judged(work, cache_size=2)


def test_requests_are_bounded():
    async def work(verifier, judge):
        await asyncio.gather(*(verify(verifier, str(i)) for i in range(20)))
        return judge.most_at_once

    assert judged(work, concurrency=3) <= 3


def test_a_failing_request_is_tried_again_then_failed_not_wrong():
    async def work(verifier, judge):
        judge.faults = [500, 500]
        assert await verify(verifier) == RIGHT
        judge.faults = [500] * 3
        with pytest.raises(VerifierFailed, match="3 tries"):
            await verify(verifier, "28cm")
        judge.faults = [400]  # its prompt is too long, say: another try would not help
        with pytest.raises(VerifierFailed, match="HTTP 400"):
            await verify(verifier, "29cm")
        return len(judge.prompts)

    assert judged(work, retries=2) == 3 + 3 + 1


def test_a_judge_that_is_down_holds_every_answer_until_it_is_back(capsys):
    async def work(verifier, judge):
        judge.down = True
        waiting = [asyncio.ensure_future(verify(verifier, str(i))) for i in range(12)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        judge.down = False
        return await asyncio.gather(*waiting)

    assert judged(work, retries=0) == [RIGHT] * 12  # a try while it was down is none
    said = capsys.readouterr().out
    assert said.count("does not answer") == 1 and said.count("answers again") == 1


def test_a_judge_that_stays_down_stops_the_run():
    """An error a person can mend, which ends the run; not VerifierFailed, of which there would be one a sample."""

    async def gone():
        verifier = GenerativeVerifier(JudgeConfig(url="http://127.0.0.1:9/v1", hold_s=0.3))
        try:
            begin = time.monotonic()
            with pytest.raises(UserError, match="has not answered for 0.3 s.*same command"):
                await verify(verifier)
            assert time.monotonic() - begin < 20
            with pytest.raises(UserError, match="has not answered"):
                await verifier.ready()
        finally:
            await verifier.close()

    asyncio.run(gone())


@pytest.mark.parametrize("status", [401, 404])
def test_a_judge_that_refuses_us_stops_the_run_at_once(status):
    async def work(verifier, judge):
        judge.faults = [status]
        with pytest.raises(UserError, match=f"HTTP {status}"):
            await verify(verifier)

    judged(work)


def test_the_key_comes_from_the_environment(monkeypatch):
    async def work(verifier, judge):
        await verify(verifier)
        return judge.keys

    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert judged(work, key_variable="JUDGE_KEY", model="mine") == ["Bearer secret"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        judged(work, key_variable="JUDGE_KEY")
