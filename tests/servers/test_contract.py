"""What the client relies on, from the real server and from its stand-in alike."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.conftest import tiny_config
from tests.fake_server import FakeServer
from tests.tiny_models import EOS, VOCAB_SIZE, tiny_model
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Client, Finish, RequestError, Sampling
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool

PROMPT = list(b"What is 2 + 3?")
GREEDY = Sampling(temperature=0.0)


@asynccontextmanager
async def _stand_in():
    async with FakeServer().serve() as url:
        yield url


@asynccontextmanager
async def _given(url):
    yield url


@pytest.fixture(params=["fake", "real"])
def with_pool(request, tiny_moe, tmp_path):
    """Runs `work(pool)` with a pool of one server, given by URL, and returns its result."""
    real = request.param == "real"
    server = _given(request.getfixturevalue("sglang_server").url) if real else _stand_in()

    async def run(work):
        async with server as url:
            config = tiny_config(tmp_path, tiny_moe)
            config.servers.urls = [url]
            pool = ServerPool(config, ServedModel.from_path(tiny_moe))
            try:
                await pool.wait_ready()
                return await work(pool)
            finally:
                await pool.close()

    return lambda work: asyncio.run(run(work))


def test_segments_by_ids_equal_the_unbroken_run(with_pool):
    async def both(pool):
        whole = await pool.generate(PROMPT, GREEDY, 40)
        tokens, log_probs, cached = [], [], []
        for budget in (16, 16, 1, 7):
            part = await pool.generate(PROMPT + tokens, GREEDY, budget)
            tokens += part.tokens
            log_probs += part.log_probs
            cached.append(part.cached_tokens)
        return whole, tokens, log_probs, cached

    whole, tokens, log_probs, cached = with_pool(both)
    assert len(tokens) == 40, "the greedy run of this model and the stand-in's both are longer than 40"
    assert tokens == whole.tokens
    assert log_probs == pytest.approx(whole.log_probs, abs=2e-5)
    assert all(c >= len(PROMPT) for c in cached[1:]), "the prefix comes out of the cache"


def test_a_length_stop_has_exactly_the_tokens_asked_for(with_pool):
    got = with_pool(lambda pool: pool.generate(PROMPT, GREEDY, 5))
    assert got.finish is Finish.length
    assert len(got.tokens) == len(got.log_probs) == len(got.versions) == 5
    assert all(p <= 0 for p in got.log_probs)


def test_eos_ends_a_response_and_stays_in_it(with_pool):
    async def until_eos(pool):
        hot = Sampling(temperature=3.0)
        return await asyncio.gather(*(pool.generate([*PROMPT, i], hot, 256) for i in range(12)))

    ended = [g for g in with_pool(until_eos) if g.finish is Finish.eos]
    assert ended, "12 x 256 nearly uniform tokens of 272 hold an EOS"
    for generation in ended:
        assert generation.tokens[-1] == EOS and EOS not in generation.tokens[:-1]


def test_an_update_changes_tokens_and_versions_and_drops_the_cache(with_pool, tmp_path):  # AReaL#421, miles#2783
    other = tiny_model(tmp_path / "other", "moe", seed=7)

    async def before_and_after(pool):
        before = await pool.generate(PROMPT, GREEDY, 16)
        await pool.update_weights(other, 5)
        return before, await pool.generate(PROMPT, GREEDY, 16)

    before, after = with_pool(before_and_after)
    assert before.versions == [0] * len(before.tokens) and after.versions == [5] * len(after.tokens)
    assert before.tokens != after.tokens
    assert after.cached_tokens == 0, "keys and values of the old weights"


def test_a_failed_update_names_the_server_and_takes_it_out(with_pool, tmp_path):  # AReaL#140
    async def update(pool):
        (member,) = pool.members
        with pytest.raises(UserError, match=f"no server is left: {member.client.url} did not take the weights"):
            await pool.update_weights(tmp_path / "nowhere", 3)
        return member.version, await member.client.healthy()

    assert with_pool(update) == (None, True), "out of the pool, yet not left paused"


def test_ids_outside_the_vocabulary_never_reach_the_server(with_pool):
    async def send(pool):
        for bad in ([VOCAB_SIZE], [-1], []):
            with pytest.raises(ValueError, match="input_ids"):
                await pool.generate(bad, GREEDY, 4)
        return await pool.members[0].client.healthy()

    assert with_pool(send)


def test_nobody_there_is_a_request_error(tiny_moe):
    async def ask():
        client = Client("http://127.0.0.1:9", ServedModel.from_path(tiny_moe))
        try:
            with pytest.raises(RequestError, match="127.0.0.1:9"):
                await client.generate(PROMPT, GREEDY, 4, timeout_s=5.0)
        finally:
            await client.close()

    asyncio.run(ask())
