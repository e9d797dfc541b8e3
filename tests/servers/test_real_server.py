"""The client against a real SGLang server."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import EOS, tiny_model
from ulorl_megatron.rollout.client import Finish, RequestRejected, Sampling
from ulorl_megatron.rollout.sample import Sample, Status
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

PROMPT = list(b"What is 2 + 3?")
GREEDY = Sampling(temperature=0.0)


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


def test_new_weights_answer_and_no_old_cache_is_reused(sglang_server, tmp_path):  # RLinf#96
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


def test_a_budget_beyond_the_context_is_refused_not_cut(sglang_server, tmp_path):  # verl#7207
    async def ask(pool):
        with pytest.raises(RequestRejected):
            await pool.generate(PROMPT, GREEDY, 960 + 64 + 6 - len(PROMPT))  # see config.positions

    with_pool(sglang_server, tmp_path, ask)


def test_samples_grow_segment_by_segment_through_changing_weights(sglang_server, tmp_path):
    """Algorithm 1's rollout for four steps: 4 segments of 16, new weights before each."""
    config = sglang_server.config(tmp_path).rollout
    samples = [Sample(i, 0, 0, [*PROMPT, i], "5", created_step=1) for i in range(6)]
    models = [tiny_model(tmp_path / str(v), "moe", seed=v) for v in range(4)]

    async def right(sample):
        return 1.0

    async def steps(pool):
        rollout = SegmentRollout(pool, config)
        stats = []
        for step in (1, 2, 3, 4):
            await pool.update_weights(models[step - 1], step - 1)
            unfinished = [s for s in samples if s.status is Status.unfinished]
            stats.append(await rollout.collect(step, unfinished, right, keep=lambda sample: None))
        return stats

    stats = with_pool(sglang_server, tmp_path, steps)
    assert sum(s.tokens for s in stats) == sum(s.length for s in samples)
    assert sum(s.finished + s.truncated for s in stats) == len(samples)
    for s in samples:
        assert s.complete and s.reward == float(s.finished)
        assert s.length == 64 or (s.finished and s.tokens[-1] == EOS)
        assert s.versions == [i // 16 for i in range(s.length)], "segment k was made by version k"


@pytest.mark.parametrize("left", [64, 1])
def test_the_longest_prompt_and_response_fit(sglang_server, tmp_path, left):
    """In one piece, and with one token left after a segment that was cut short."""

    async def ask(pool):
        return await pool.generate([65] * (960 + 64 - left), Sampling(1.0), left)

    got = with_pool(sglang_server, tmp_path, ask)
    assert got.finish is Finish.eos or len(got.tokens) == left
