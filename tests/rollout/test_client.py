"""Faults of a server: the client names them, retries what may be retried, and takes no unsound token."""

import math

import pytest

from tests import fake_server
from tests.fake_server import aborted_after, altered, status
from tests.rollout.support import PROMPT, SAMPLING, run_pool
from tests.tiny_models import EOS
from ulorl_megatron.rollout.client import Finish, RequestRejected
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import RequestFailed


@pytest.fixture
def model(tmp_path) -> ServedModel:
    return ServedModel(tmp_path / "model", vocab_size=272, stop_token_ids=frozenset([EOS]))


def log_prob(value):
    def change(answer):
        answer["meta_info"]["output_token_logprobs"][0][0] = value

    return altered(change)


def drop_last_log_prob(answer):
    answer["meta_info"]["output_token_logprobs"].pop()


def log_prob_of_another_token(answer):
    answer["meta_info"]["output_token_logprobs"][0][1] += 1


def one_token_too_many(answer):
    answer["output_ids"].append(1)
    answer["meta_info"]["output_token_logprobs"].append([-1.0, 1, None])
    answer["meta_info"]["weight_versions"][0]["end"] += 1


def versions_with_a_gap(answer):
    answer["meta_info"]["weight_versions"][0]["start"] = 1


def version_without_a_number(answer):
    answer["meta_info"]["weight_versions"][0]["version"] = "default"


def stopped_by_nan(answer):
    answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}


def without_meta_info(answer):
    del answer["meta_info"]


UNSOUND = {
    "None log-prob": log_prob(None),  # strands-sglang#34
    "positive log-prob": log_prob(0.5),
    "text log-prob": log_prob("-1.0"),
    "missing log-prob": altered(drop_last_log_prob),
    "other token": altered(log_prob_of_another_token),
    "too many tokens": altered(one_token_too_many),
    "version gap": altered(versions_with_a_gap),
    "version name": altered(version_without_a_number),
    "NaN": altered(stopped_by_nan),
    "no meta_info": altered(without_meta_info),
    "garbage": fake_server.garbage,
    "cut": fake_server.cut,
    "null": status(200, "null"),
    "503": status(503),
    "500": status(500, "Out of memory even after retracting all other requests"),  # sglang#19881
    "429": status(429),
    "404": status(404, "no such route here: not a server of ours"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_answer_is_asked_again(model, tmp_path, name):
    async def work(pool, fakes):
        fakes[0].faults = [UNSOUND[name]]
        return await pool.generate(PROMPT, SAMPLING, 8), fakes[0].requests

    got, requests = run_pool(model, tmp_path, work)
    assert len(got.tokens) == len(got.log_probs) == len(got.versions) == 8
    assert len(requests) == 2 and requests[0]["rid"] != requests[1]["rid"]


def test_after_the_last_try_it_fails_with_the_reason(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [status(503, "queue is full")] * 3
        with pytest.raises(RequestFailed, match="3 tries failed.*queue is full"):
            await pool.generate(PROMPT, SAMPLING, 8)
        return pool.members[0].outstanding

    assert run_pool(model, tmp_path, work, retries=2) == 0


def test_a_lost_request_is_aborted_and_sent_again(model, tmp_path):  # verl#7155
    async def work(pool, fakes):
        fakes[0].faults = [fake_server.silence]
        return await pool.generate(PROMPT, SAMPLING, 8), fakes[0].calls

    got, calls = run_pool(model, tmp_path, work, timeout_s=0.3)
    assert len(got.tokens) == 8
    assert calls == ["/generate", "/abort_request", "/generate"]


def test_a_refused_request_is_not_repeated(model, tmp_path):
    async def work(pool, fakes):
        fakes[0].faults = [status(400, "unknown sampling parameter")]
        with pytest.raises(RequestRejected, match="unknown sampling parameter"):
            await pool.generate(PROMPT, SAMPLING, 8)
        return fakes[0].requests

    assert len(run_pool(model, tmp_path, work)) == 1


def test_a_length_stop_short_of_the_budget_is_not_taken_for_a_segment(model, tmp_path):  # slime#2261
    def shorter(answer):
        answer["output_ids"].pop()
        answer["meta_info"]["output_token_logprobs"].pop()
        answer["meta_info"]["weight_versions"][0]["end"] -= 1

    async def work(pool, fakes):
        fakes[0].faults = [altered(shorter)]
        with pytest.raises(RequestRejected, match="7 of 8 tokens.*--context-length"):
            await pool.generate(PROMPT, SAMPLING, 8)

    run_pool(model, tmp_path, work)


def test_an_aborted_answer_keeps_its_tokens_and_the_reason(model, tmp_path):  # sglang#11673
    async def work(pool, fakes):
        fakes[0].faults = [aborted_after(3, "KV cache is full"), aborted_after(0)]
        return await pool.generate(PROMPT, SAMPLING, 8), await pool.generate(PROMPT, SAMPLING, 8)

    some, none = run_pool(model, tmp_path, work)
    assert some.finish is Finish.aborted and some.abort_reason == "KV cache is full"
    assert len(some.tokens) == len(some.log_probs) == len(some.versions) == 3
    assert none.finish is Finish.aborted and none.tokens == []


def test_every_request_says_everything_and_shares_nothing(model, tmp_path):  # verl#6364, verl#7207
    async def work(pool, fakes):
        await pool.generate(PROMPT, SAMPLING, 8)
        await pool.generate(PROMPT, SAMPLING, 5)
        return fakes[0].requests

    first, second = run_pool(model, tmp_path, work)
    expected = {"temperature": 0.85, "top_p": 1.0, "top_k": -1, "stop_token_ids": [EOS]}
    assert first["sampling_params"] == {**expected, "max_new_tokens": 8}
    assert second["sampling_params"] == {**expected, "max_new_tokens": 5}
    assert first["return_logprob"] is True and second["return_logprob"] is True
    assert "text" not in first
    # They cover the whole sequence, so that those of two segments cannot be put together (verl#6029).
    assert "return_routed_experts" not in first


def test_versions_are_per_token_from_the_stamps(model, tmp_path):
    def crossed(answer):
        answer["meta_info"]["weight_versions"] = [
            {"version": "0", "start": 0, "end": 3},
            {"version": "1", "start": 3, "end": 8},
        ]

    async def work(pool, fakes):
        fakes[0].faults = [altered(crossed)]
        return await pool.members[0].client.generate(PROMPT, SAMPLING, 8, timeout_s=5.0)

    assert run_pool(model, tmp_path, work).versions == [0, 0, 0, 1, 1, 1, 1, 1]


def test_an_update_pauses_loads_and_goes_on(model, tmp_path, tiny_moe):  # sglang#12099
    async def work(pool, fakes):
        await pool.update_weights(tiny_moe, 1)
        return fakes[0].calls, fakes[0].version

    calls, version = run_pool(model, tmp_path, work)
    assert calls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert version == "1"


def test_minus_infinity_is_no_log_prob(model, tmp_path):
    """JSON has no infinity, but Python's decoder takes one."""

    async def work(pool, fakes):
        fakes[0].faults = [log_prob(-math.inf), log_prob(math.nan)]
        return await pool.generate(PROMPT, SAMPLING, 8), len(fakes[0].requests)

    assert run_pool(model, tmp_path, work)[1] == 3
