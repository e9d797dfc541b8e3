"""Which server gets which request, and what becomes of servers that die, hang, talk nonsense or hold other weights."""

import asyncio
import time

import pytest

from tests import fake_server
from tests.fake_server import aborted_after, altered, status
from tests.rollout.support import PROMPT, SAMPLING, run_pool
from tests.tiny_models import EOS
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Finish
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import RequestFailed


@pytest.fixture
def model(tmp_path, tiny_moe) -> ServedModel:
    return ServedModel(tiny_moe, vocab_size=272, stop_token_ids=frozenset([EOS]))


def counts(fakes):
    return [len(fake.requests) for fake in fakes]


async def many(pool, n, tokens=8):
    return await asyncio.gather(*(pool.generate([*PROMPT, i], SAMPLING, tokens) for i in range(n)))


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that in 10 s")


def hang(seconds):
    """A fault that answers soundly after `seconds`."""

    async def fault(request, answer):
        await asyncio.sleep(seconds)
        return fake_server.web.json_response(answer)

    return fault


# --- who gets a request


def test_a_retry_goes_to_another_server(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [status(503)]
        await pool.generate(PROMPT, SAMPLING, 8)
        return counts(fakes)

    assert run_pool(model, tmp_path, work, servers=2) == [1, 1]


def test_work_goes_where_the_fewest_tokens_are_outstanding(model, tmp_path):
    """Tokens, not requests: one long request on the first server, and the short ones go to the second."""

    async def work(pool, fakes):
        fakes[0].faults = [hang(0.3)]
        long = asyncio.create_task(pool.generate(PROMPT, SAMPLING, 200))
        await until(lambda: fakes[0].requests)
        await many(pool, 6)
        short, outstanding = counts(fakes), [m.outstanding for m in pool.members]
        await long
        return short, outstanding, [m.outstanding for m in pool.members]

    short, during, after = run_pool(model, tmp_path, work, servers=2)
    assert short == [1, 6]
    assert during == [len(PROMPT) + 200, 0] and after == [0, 0]


def test_idle_is_the_time_without_a_request(model, tmp_path):
    """One of two servers works for half of the time: three quarters are idle."""

    async def work(pool, fakes):
        fakes[0].faults = [hang(0.5)]
        pool.metrics()
        await pool.generate(PROMPT, SAMPLING, 8)
        await asyncio.sleep(0.5)
        half = pool.metrics()["servers/idle_share"]
        fakes[0].faults, fakes[1].faults = [hang(0.3)], [hang(0.3)]
        asking = asyncio.create_task(many(pool, 2))
        await asyncio.sleep(0.2)
        none = pool.metrics()["servers/idle_share"]  # in the middle of the requests
        await asking
        return half, none

    half, none = run_pool(model, tmp_path, work, servers=2)
    assert half == pytest.approx(0.75, abs=0.1)
    assert none < 0.2


def members_of(groups, size, prompt=40):
    """(prompt, group) of every member, in the order in which a step asks for them."""
    return [([group + 1] * prompt, group) for group in range(groups) for _ in range(size)]


async def ask_all(pool, fakes, requests, tokens):
    pool.expect(sum(len(ids) + tokens for ids, _ in requests))
    await asyncio.gather(*(pool.generate(ids, SAMPLING, tokens, group) for ids, group in requests))
    return [[request["input_ids"][0] - 1 for request in fake.requests] for fake in fakes]


def test_members_of_a_group_go_where_their_prefix_is(model, tmp_path):
    async def work(pool, fakes):
        return await ask_all(pool, fakes, members_of(groups=4, size=4), tokens=8)

    seen = run_pool(model, tmp_path, work, servers=2)
    assert [sorted(set(groups)) for groups in seen] in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert [len(groups) for groups in seen] == [8, 8]


@pytest.mark.parametrize("groups, size", [(3, 8), (1, 8), (5, 6)])
def test_a_prefix_never_costs_the_balance(model, tmp_path, groups, size):
    async def work(pool, fakes):
        seen = await ask_all(pool, fakes, members_of(groups, size), tokens=100)
        return seen, pool.metrics()["servers/imbalance"]

    seen, imbalance = run_pool(model, tmp_path, work, servers=2)
    assert abs(len(seen[0]) - len(seen[1])) <= 2
    assert 1 <= imbalance < 1.2
    split = [g for g in range(groups) if all(g in requests for requests in seen)]
    assert len(split) <= 1, "only the last group is split"


def test_the_rest_of_an_aborted_answer_goes_where_its_beginning_is(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [aborted_after(30)]
        first = await pool.generate([1] * 100, SAMPLING, 40, group=7)
        pool.members[0].outstanding += 50  # busier, but by less than the prefix saves
        await pool.generate([1] * 100 + first.tokens, SAMPLING, 10, group=7)
        return counts(fakes)

    assert run_pool(model, tmp_path, work, servers=2) == [2, 0]


# --- what takes a server out of work


def test_a_server_that_did_not_confirm_gets_no_work_until_it_does(model, tmp_path, tiny_moe):
    async def work(pool, fakes):
        fakes[0].reported_version = "6"
        await pool.update_weights(tiny_moe, 7)
        async with pool.kept():
            await many(pool, 4)
            before = counts(fakes)
            fakes[0].reported_version = None
            await until(lambda: pool.members[0].version == 7)
            await many(pool, 4)
        return before, counts(fakes), fakes[0].calls

    before, after, calls = run_pool(model, tmp_path, work, servers=2, max_restarts=50)
    assert before == [0, 4] and after == [2, 6]
    loads = calls.index("/generate") - 1
    assert calls[:loads].count("/update_weights_from_disk") >= 2, "weights, then work (NeMo-RL#3187)"


def test_a_step_that_begins_during_an_update_does_not_load_the_weights_again(model, tmp_path, tiny_moe):
    """SGLang ends on a second update while one is under way; with rollout.overlap both can come together."""

    async def work(pool, fakes):
        fakes[0].update_s = 0.3
        updating = asyncio.create_task(pool.update_weights(tiny_moe, 7))
        await asyncio.sleep(0.05)
        async with pool.kept():
            await many(pool, 2)
            await updating
        return fakes[0].calls.count("/update_weights_from_disk"), [m.version for m in pool.members]

    assert run_pool(model, tmp_path, work) == (1, [7])


def test_none_confirms_none_is_left_and_the_run_stops(model, tmp_path, tiny_moe):
    async def work(pool, fakes):
        for fake in fakes:
            fake.reported_version = "6"
        with pytest.raises(UserError, match="no server is left: .*did not take the weights.*holds version '6'"):
            await pool.update_weights(tiny_moe, 7)
        return [(m.gone, m.returns) for m in pool.members]

    assert run_pool(model, tmp_path, work, servers=2, max_restarts=2) == [(True, 2), (True, 2)]  # NeMo-RL#3613


@pytest.mark.parametrize("fault", [fake_server.garbage, fake_server.cut, status(500), status(404)])
def test_a_server_that_answers_garbage_gets_the_weights_again_before_work(model, tmp_path, tiny_moe, fault):
    async def work(pool, fakes):
        await pool.update_weights(tiny_moe, 3)
        fakes[0].faults = [fault] * 3
        fakes[0].calls.clear()
        async with pool.kept():
            got = await many(pool, 8)
            await until(lambda: pool.members[0].version == 3)
            await many(pool, 4)
        return got, fakes[0].calls, pool.metrics()

    got, calls, metrics = run_pool(model, tmp_path, work, servers=2)
    assert all(len(g.tokens) == 8 or g.finish is Finish.eos for g in got)
    out = calls.index("/pause_generation")
    assert calls[:out] == ["/generate"] * out and out >= 3
    assert calls[out : out + 4] == [
        "/pause_generation", "/update_weights_from_disk", "/continue_generation", "/generate"
    ]  # fmt: skip
    assert metrics["servers/restarts"] == 1 and metrics["servers/missing"] == 0
    assert metrics["servers/failed_tries"] >= 3


def test_a_hanging_server_is_noticed_long_before_the_deadline_of_its_requests(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].hung = True
        begin = time.monotonic()
        got = await many(pool, 8)
        return got, time.monotonic() - begin, counts(fakes), pool.members[0].fault

    got, seconds, asked, fault = run_pool(
        model, tmp_path, work, servers=2, kept=True, timeout_s=600.0, hang_timeout_s=0.5
    )
    assert len(got) == 8 and seconds < 10
    assert asked == [0, 8] and "has not answered for 0.5 s" in fault


def test_a_server_started_anew_by_others_is_found_by_its_version(model, tmp_path, tiny_moe):
    """It answers soundly, but from the weights it was started with (NeMo-RL#3187)."""

    async def work(pool, fakes):
        await pool.update_weights(tiny_moe, 3)
        fakes[0].version, fakes[0]._weights = "0", b"others"
        async with pool.kept():
            return await many(pool, 8)

    got = run_pool(model, tmp_path, work, servers=2)
    assert all(g.versions == [3] * len(g.tokens) for g in got)


def test_a_busy_server_stays_in_the_pool(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [status(503, "queue is full")] * 4
        await pool.generate(PROMPT, SAMPLING, 8)
        return pool.members[0].version, pool.metrics()

    version, metrics = run_pool(model, tmp_path, work, retries=5)
    assert version == 0 and metrics["servers/failed_tries"] == 4 and metrics["servers/restarts"] == 0


OUT_OF_MEMORY = "Out of memory even after retracting all other requests in the decode batch."


def test_out_of_memory_is_counted_and_not_held_against_the_server(model, tmp_path):  # sglang#19881
    async def work(pool, fakes):
        fakes[0].faults = [status(500, OUT_OF_MEMORY)] * 4 + [aborted_after(3, OUT_OF_MEMORY), aborted_after(2)]
        await pool.generate(PROMPT, SAMPLING, 8)
        await pool.generate(PROMPT, SAMPLING, 8)
        return pool.members[0].version, pool.metrics(), pool.metrics()

    version, metrics, later = run_pool(model, tmp_path, work, retries=5)
    assert version == 0 and metrics["servers/out_of_memory"] == 5
    assert later["servers/out_of_memory"] == 0, "each is counted once"


# --- when all are out


def test_requests_wait_while_the_only_server_is_brought_back(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [fake_server.garbage] * 3
        got = await many(pool, 6)
        return got, pool.members[0].returns

    got, returns = run_pool(model, tmp_path, work, kept=True)
    assert len(got) == 6 and returns == 1


def test_with_no_server_left_it_says_why_of_each(model, tmp_path):
    async def work(pool, fakes):
        for fake in fakes:
            fake.faults = [fake_server.garbage] * 100
        with pytest.raises(UserError) as error:
            await asyncio.gather(*(pool.generate(PROMPT, SAMPLING, 8) for _ in range(8)))
        return str(error.value), [member.client.url for member in pool.members]

    message, urls = run_pool(model, tmp_path, work, servers=2, kept=True, max_restarts=1, retries=50)
    assert message.startswith("no server is left: ") and "run the same command again" in message
    assert all(url in message for url in urls) and "failed again and again" in message


def test_a_given_server_that_does_not_come_back_is_given_up(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].hung = True
        with pytest.raises(UserError, match=r"no server is left: .*is not ready after 0.3 s"):
            await pool.generate(PROMPT, SAMPLING, 8)

    run_pool(model, tmp_path, work, kept=True, hang_timeout_s=0.2, start_timeout_s=0.3)


def test_one_missing_at_the_start_does_not_hold_up_the_others(model, tmp_path):
    async def work(pool, fakes):
        for member in pool.members:
            member.version = None
        fakes[0].hung = True
        await pool.wait_ready()
        await many(pool, 4)
        return counts(fakes), [member.gone for member in pool.members]

    asked, gone = run_pool(model, tmp_path, work, servers=2, start_timeout_s=0.3, hang_timeout_s=0.2)
    assert asked == [0, 4] and gone == [True, False]


def test_a_request_that_no_server_can_answer_fails_alone(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [altered(lambda answer: answer.pop("meta_info"))] * 2
        with pytest.raises(RequestFailed, match="2 tries failed"):
            await pool.generate(PROMPT, SAMPLING, 8)
        return await many(pool, 4)

    assert len(run_pool(model, tmp_path, work, retries=1, kept=True)) == 4
