"""The clock that jumps, response lengths, and the server that is a formula."""

import asyncio
from random import Random
from statistics import median

import pytest

from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Finish, Sampling
from ulorl_megatron.simulate.lengths import LogNormal, Observed, draw_length
from ulorl_megatron.simulate.server import ServerModel, SimulatedServer
from ulorl_megatron.simulate.virtual_time import run

SAMPLING = Sampling(1.0)


def test_hours_pass_at_once_and_in_order():
    order = []

    async def nap(seconds):
        await asyncio.sleep(seconds)
        order.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(nap(7200.0), nap(3600.0), nap(0.5))

    run(main())
    assert order == [(s, pytest.approx(s)) for s in (0.5, 3600.0, 7200.0)]


def test_a_simulation_that_cannot_end_says_so():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="would never end"):
        run(main())


@pytest.mark.parametrize("lengths", [LogNormal(1000, 0.5), Observed(list(range(100, 2000, 7)))])
def test_a_response_that_goes_on_has_the_law_of_the_longer_ones(lengths):
    random = Random(0)
    whole = [draw_length(lengths, 0, random) for _ in range(4000)]
    longer = [length for length in whole if length > 1200]
    resumed = [draw_length(lengths, 1200, random) for _ in range(4000)]
    assert min(resumed) > 1200
    assert median(resumed) == pytest.approx(median(longer), rel=0.03)
    assert median(whole) == pytest.approx(lengths.quantile(0.5), rel=0.03)


def test_observed_lengths_are_read_from_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("12\n\n7\n30\n")
    assert Observed.read(file).quantile(0.99) == 30 and Observed.read(file).share_within(12) == pytest.approx(2 / 3)
    file.write_text("12\nlong\n")
    with pytest.raises(UserError, match="line 2: 'long' is not a number"):
        Observed.read(file)
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no lengths"):
        Observed.read(file)


def serve(model, lengths, requests, prompt=10):
    """(seconds, Generation) of each request (input tokens, most new ones), all asked at time 0; and the server."""

    async def main():
        server = SimulatedServer("http://x", model, lengths, prompt, 1, Random(0))

        async def ask(inputs, most):
            answer = await server.generate([0] * inputs, SAMPLING, most, timeout_s=0)
            return asyncio.get_running_loop().time(), answer

        return await asyncio.gather(*(ask(*request) for request in requests)), server

    return run(main())


def test_a_request_takes_its_prefill_and_its_steps():
    model = ServerModel(0.01, 0.002, 0.0, prefill_tokens_per_s=1000.0, kv_tokens=10**6)
    ((seconds, answer),), server = serve(model, Observed([50]), [(10, 80)])
    assert seconds == pytest.approx(10 / 1000 + 50 * 0.012)
    assert len(answer.tokens) == len(answer.log_probs) == len(answer.versions) == 50 and answer.finish is Finish.eos
    ((seconds, answer),), server = serve(model, Observed([50]), [(10, 20)])
    assert seconds == pytest.approx(10 / 1000 + 20 * 0.012) and answer.finish is Finish.length
    assert server.load.busy_s == pytest.approx(seconds) and server.load.decoded == pytest.approx(20)


def test_requests_share_the_steps_and_longer_contexts_slow_them():
    model = ServerModel(0.01, 0.002, 1e-5, prefill_tokens_per_s=1e9, kv_tokens=10**6)
    answers, server = serve(model, Observed([100]), [(10, 100)] * 4)
    exact = sum(0.01 + 4 * 0.002 + 1e-5 * 4 * (10 + n) for n in range(100))
    assert [seconds for seconds, _ in answers] == pytest.approx([exact] * 4, rel=0.02)
    assert server.load.decoded == pytest.approx(400)


def test_what_does_not_fit_waits_and_is_computed_anew():
    model = ServerModel(0.01, 0.0, 0.0, prefill_tokens_per_s=1e9, kv_tokens=150)
    answers, server = serve(model, Observed([100]), [(10, 100)] * 3)
    assert all(len(answer.tokens) == 100 for _, answer in answers)
    assert server.load.retractions >= 2
    assert server.load.prefilled > 3 * 10
    # Three until 40 tokens each, two until 65, one to its end at 1.0 s; two again for 12 steps, then one by one.
    assert sorted(seconds for seconds, _ in answers) == pytest.approx([1.0, 1.35, 1.82], rel=0.03)


def test_a_request_given_up_frees_its_place():
    model = ServerModel(0.01, 0.01, 0.0, prefill_tokens_per_s=1e9, kv_tokens=10**6)

    async def main():
        server = SimulatedServer("http://x", model, Observed([100]), 10, 1, Random(0))
        stays = asyncio.create_task(server.generate([0] * 10, SAMPLING, 100, timeout_s=0))
        goes = asyncio.create_task(server.generate([0] * 10, SAMPLING, 100, timeout_s=0))
        await asyncio.sleep(0.3)
        goes.cancel()
        await stays
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(0.3 + 90 * 0.02, rel=0.01)


def test_new_weights_in_the_middle_pause_it_and_are_stamped():
    model = ServerModel(0.01, 0.0, 0.0, prefill_tokens_per_s=1000.0, kv_tokens=10**6, update_s=3.0)

    async def main():
        server = SimulatedServer("http://x", model, Observed([100]), 10, 1, Random(0))
        request = asyncio.create_task(server.generate([0] * 10, SAMPLING, 100, timeout_s=0))
        await asyncio.sleep(0.01 + 0.405)
        await server.update_weights_from_disk("", 1)
        return await request, asyncio.get_running_loop().time()

    answer, seconds = run(main())
    assert answer.versions == [0] * 40 + [1] * 60
    assert seconds == pytest.approx(0.01 + 1.0 + 3.0 + 50 / 1000, rel=0.01)  # 50: input and tokens, computed anew
