"""A judge that is down: samples wait for it, and when it stays down the run stops with nothing lost (NeMo-Gym#1351)."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.rollout.test_journal import Servers, collect
from tests.rollout.test_pools import Prompts, pools_over
from tests.verifier.scripted_judge import DIFFERENT, EQUIVALENT, UNKNOWN, ScriptedJudge
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Finish
from ulorl_megatron.rollout.sample import Status
from ulorl_megatron.rollout.store import PoolStore
from ulorl_megatron.verifier import GenerativeVerifier
from ulorl_megatron.verifier.client import JudgeClient
from ulorl_megatron.verifier.tally import Tally


@asynccontextmanager
async def rewards_from(judge, tally, **settings):
    """Yields what rates a sample: its answer is its number, by the judge."""
    async with judge.serve(**settings) as config:
        verifier = GenerativeVerifier(config, JudgeClient(config, backoff_s=0.05))
        try:
            yield lambda sample: tally.reward(
                verifier.verify(question="?", response=rf"\boxed{{{sample.id}}}", answer="7")
            )
        finally:
            await verifier.close()


def by_number(question, reference, given):
    return UNKNOWN if given == "5" else EQUIVALENT if int(given) % 2 else DIFFERENT


def test_the_run_stops_and_the_next_one_judges_what_was_decoded(tmp_path):
    """No sample is wrong or failed for it. Back again, the judge cannot tell one: that one alone is failed."""
    path = tmp_path / "pools.sqlite"

    async def stops(judge):
        store = PoolStore(path)
        samples = pools_over(store).admit(1, Prompts())
        async with rewards_from(judge, Tally(), hold_s=0.5) as verify:
            with pytest.raises(UserError, match="has not answered for 0.5 s"):
                await collect(store, samples, Servers(finish=Finish.eos), verify)
        assert all(s.status is Status.unfinished and s.reward is None for s in samples)
        store.close()

    async def goes_on(judge):
        store, tally = PoolStore(path), Tally()
        store.rewind(0)
        pools = pools_over(store)
        pools.admit(1, Prompts())
        samples = pools.unfinished
        assert pools.recall(1) == 8
        servers = Servers()
        async with rewards_from(judge, tally) as verify:
            stats = await collect(store, samples, servers, verify)
        assert servers.calls == [] and stats.verifier_failures == 1
        assert [s.reward for s in samples] == [0.0, 1.0, 0.0, 1.0, 0.0, None, 0.0, 1.0]
        assert samples[5].status is Status.failed
        counted = {name.removeprefix("verifier/"): value for name, value in tally.metrics().items() if value}
        assert counted == {"by_model": 7, "unknown": 1, "right_by_model": 3}
        pools.release(1)
        assert pools.commit(1)[Status.failed] == 1
        store.close()

    judge = ScriptedJudge(by_number)
    judge.down = True
    asyncio.run(stops(judge))
    judge.down = False
    asyncio.run(goes_on(judge))
