"""The client against a real SGLang server."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import EOS, VOCAB_SIZE, tiny_model
from ulorl_megatron.rollout.client import Client, Finish, RequestRejected, Sampling, WeightUpdateFailed
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

PROMPT = list(b"What is 2 + 3?")
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def served(sglang_server) -> ServedModel:
    return ServedModel.from_path(sglang_server.model_path)


def with_pool(sglang_server, tmp_path, work):
    """Runs `work(pool)` with a fresh pool over the session's server, its weights reset."""

    async def run():
        config = sglang_server.config(tmp_path)
        pool = ServerPool(config, ServedModel.from_path(sglang_server.model_path))
        await pool.wait_ready()
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_greedy_tokens_and_log_probs_are_those_of_transformers(sglang_server, tmp_path):
    got = with_pool(sglang_server, tmp_path, lambda pool: pool.generate(PROMPT, GREEDY, 24))

    model = AutoModelForCausalLM.from_pretrained(sglang_server.model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + got.tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert got.tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got.log_probs), expected, atol=2e-5, rtol=0)


def test_log_probs_are_at_the_sampling_temperature(sglang_server, tmp_path):
    got = with_pool(sglang_server, tmp_path, lambda pool: pool.generate(PROMPT, Sampling(0.85), 24))

    model = AutoModelForCausalLM.from_pretrained(sglang_server.model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + got.tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.85).log_softmax(-1).gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got.log_probs), expected, atol=2e-5, rtol=0)


def test_segments_by_ids_equal_the_unbroken_run(sglang_server, tmp_path):
    async def both(pool):
        whole = await pool.generate(PROMPT, GREEDY, 60)
        tokens, log_probs, cached = [], [], []
        for budget in (16, 16, 1, 16, 11):
            part = await pool.generate(PROMPT + tokens, GREEDY, budget)
            tokens += part.tokens
            log_probs += part.log_probs
            cached.append(part.cached_tokens)
        return whole, tokens, log_probs, cached

    whole, tokens, log_probs, cached = with_pool(sglang_server, tmp_path, both)
    assert tokens == whole.tokens
    assert log_probs == pytest.approx(whole.log_probs, abs=2e-5)
    assert all(c > len(PROMPT) for c in cached[1:])  # the prefix came out of the cache


def test_eos_ends_a_response_and_stays_in_it(sglang_server, tmp_path):
    async def until_eos(pool):
        hot = Sampling(temperature=3.0)
        return await asyncio.gather(*(pool.generate(PROMPT, hot, 256) for _ in range(12)))

    ended = [g for g in with_pool(sglang_server, tmp_path, until_eos) if g.finish is Finish.eos]
    assert ended, "12 x 256 nearly uniform tokens of 272 hold an EOS"
    for generation in ended:
        assert generation.tokens[-1] == EOS and EOS not in generation.tokens[:-1]


def test_tokens_carry_the_version_that_made_them(sglang_server, tmp_path):
    other = tiny_model(tmp_path / "other", "moe", seed=7)

    async def around_an_update(pool):
        long = asyncio.create_task(pool.generate(PROMPT, Sampling(0.85), 400))
        await asyncio.sleep(0.4)
        await pool.update_weights(other, 5)
        crossing = await long
        return crossing, await pool.generate(PROMPT, GREEDY, 8)

    crossing, after = with_pool(sglang_server, tmp_path, around_an_update)
    assert after.versions == [5] * 8
    assert crossing.versions == sorted(crossing.versions)
    if crossing.finish is Finish.length:
        assert set(crossing.versions) == {0, 5}


def test_new_weights_answer_and_no_old_cache_is_reused(sglang_server, tmp_path):
    other = tiny_model(tmp_path / "other", "moe", seed=7)

    async def before_and_after(pool):
        before = await pool.generate(PROMPT, GREEDY, 16)
        await pool.update_weights(other, 1)
        return before, await pool.generate(PROMPT, GREEDY, 16)

    before, after = with_pool(sglang_server, tmp_path, before_and_after)
    assert after.cached_tokens == 0
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + after.tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert after.tokens == logits.argmax(-1).tolist() != before.tokens


def test_a_failed_update_names_the_server_and_takes_it_out(sglang_server, tmp_path):
    async def update(pool):
        with pytest.raises(WeightUpdateFailed, match=sglang_server.url):
            await pool.update_weights(tmp_path / "nowhere", 3)
        return [member.version for member in pool.members]

    assert with_pool(sglang_server, tmp_path, update) == [None]


def test_ids_outside_the_vocabulary_never_reach_the_server(sglang_server, tmp_path):
    async def send(pool):
        for bad in ([VOCAB_SIZE], [-1], []):
            with pytest.raises(ValueError, match="input_ids"):
                await pool.generate(bad, GREEDY, 4)
        return await pool.members[0].client.healthy()

    assert with_pool(sglang_server, tmp_path, send)


def test_a_budget_beyond_the_context_is_refused_not_cut(sglang_server, tmp_path):
    async def ask(pool):
        with pytest.raises(RequestRejected):
            await pool.generate(PROMPT, GREEDY, 1025 - len(PROMPT) + 1)

    with_pool(sglang_server, tmp_path, ask)


def test_the_longest_prompt_and_response_fit(sglang_server, tmp_path):
    async def ask(pool):
        return await pool.generate([65] * 960, Sampling(1.0), 64)

    got = with_pool(sglang_server, tmp_path, ask)
    assert got.finish is Finish.eos or len(got.tokens) == 64


def test_a_lost_request_is_given_up_after_its_deadline(sglang_server, served):
    from ulorl_megatron.rollout.client import RequestError

    async def ask():
        client = Client(sglang_server.url, served)
        try:
            with pytest.raises(RequestError, match="not answered within"):
                await client.generate(PROMPT, Sampling(0.85), 900, timeout_s=0.2)
        finally:
            await client.close()

    asyncio.run(ask())
