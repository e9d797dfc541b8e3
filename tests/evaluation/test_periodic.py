"""The evaluation every so many steps: metrics of one set and of several, unjudged responses apart."""

import asyncio
import json

import pytest

from tests.tiny_models import EOS, tiny_tokenizer
from ulorl_megatron.config.schema import EvaluationConfig
from ulorl_megatron.data import PromptSet
from ulorl_megatron.errors import UserError
from ulorl_megatron.evaluation.periodic import evaluate
from ulorl_megatron.monitor.metrics import is_declared
from ulorl_megatron.rollout.client import Finish, Generation
from ulorl_megatron.verifier import By, UnknownVerdict, Verdict

CUT, UNKNOWN, RIGHT, WRONG = range(4)


class Rollout:
    """Gives each prompt the responses of `kinds`, one list a prompt."""

    def __init__(self, *kinds):
        self._kinds = list(kinds)

    async def sample_to_end(self, prompts, n, sampling):
        assert (n, sampling.top_k) == (2, 20)
        taken, self._kinds = self._kinds[: len(prompts)], self._kinds[len(prompts) :]
        return [[_response(kind) for kind in group] for group in taken]


def _response(kind):
    tokens = [kind, EOS] if kind != CUT else [kind] * 6
    return Generation(tokens, [0.0] * len(tokens), [0] * len(tokens), Finish.length if kind == CUT else Finish.eos)


async def judge(prompt, response, answer):
    if response[0] == UNKNOWN:
        raise UnknownVerdict("?")
    return Verdict(float(response[0] == RIGHT), By.rule)


@pytest.fixture
def problems(tmp_path):
    def make(count):
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(count)))
        return PromptSet(str(file), tiny_tokenizer(), 99, seed=0)

    return make


def metrics(rollout, sets):
    return asyncio.run(evaluate(rollout, sets, EvaluationConfig(samples_per_prompt=2), judge))


def test_one_set_has_the_plain_names(problems):
    found = metrics(Rollout([RIGHT, WRONG], [CUT, CUT], [UNKNOWN, RIGHT]), {"only": problems(3)})
    assert found == {
        "eval/accuracy": pytest.approx((0.5 + 0 + 1) / 3),  # the unjudged one counts nowhere
        "eval/pass_at_k": pytest.approx(2 / 3),
        "eval/mean_length": pytest.approx((4 * 2 + 2 * 6) / 6),
        "eval/truncated": pytest.approx(2 / 6),
        "eval/unjudged": pytest.approx(1 / 6),
    }
    assert all(map(is_declared, found))


def test_several_sets_have_their_own_and_the_mean(problems):
    found = metrics(Rollout([RIGHT, RIGHT], [RIGHT, WRONG], [WRONG, WRONG]), {"a": problems(1), "b": problems(2)})
    assert (found["eval/accuracy/a"], found["eval/accuracy/b"], found["eval/accuracy"]) == (1.0, 0.25, 0.625)
    assert len(found) == 15 and all(map(is_declared, found))
    assert not is_declared("eval/nothing/a") and not is_declared("nothing/accuracy")


def test_a_set_that_nobody_can_judge_is_an_error(problems):
    with pytest.raises(UserError, match="not one response to bad"):
        metrics(Rollout([RIGHT, RIGHT], [UNKNOWN, UNKNOWN]), {"good": problems(1), "bad": problems(1)})
