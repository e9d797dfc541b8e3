"""The whole simulation: against arithmetic where there is one, the paper's Table 1, and the command."""

import re
from dataclasses import replace

import pytest

from tests.conftest import tiny_config
from ulorl_megatron.cli import main
from ulorl_megatron.config.schema import Config, Stop
from ulorl_megatron.simulate.lengths import LogNormal, Observed
from ulorl_megatron.simulate.options import MEDIAN, NUMBERS, PROMPT_TOKENS, SIGMA
from ulorl_megatron.simulate.report import grain
from ulorl_megatron.simulate.server import ServerModel
from ulorl_megatron.simulate.simulation import Outcome, Workload, choose, simulate

QUICK = ServerModel(0.01, 0.0, 0.0, prefill_tokens_per_s=1e12, kv_tokens=10**9)


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path / "run", tmp_path / "model")
    config.rollout.prompts_per_step = 4
    return config


def test_equal_lengths_take_what_arithmetic_says(config):
    """40 tokens in segments of 16: three steps, of 16, 16 and 8 tokens; the steps between are full ones."""
    work = Workload(Observed([40]), prompt_tokens=8, train_tokens_per_s=1000.0, fixed_s=2.0)
    outcome = simulate(config, servers=1, model=QUICK, work=work, steps=6, grain=1)
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    assert outcome.samples == samples / 3  # all end together, every third step
    assert outcome.rollout_s == pytest.approx((16 + 16 + 8) / 3 * 0.01)
    assert outcome.train_s <= samples * 48 / 1000 / 3
    assert outcome.step_s == pytest.approx(outcome.rollout_s + outcome.train_s + 2.0)
    assert outcome.age == pytest.approx((2 * 16 + 16) / 40 / 3)  # of 40 tokens 16 are two versions old, 16 are one


def test_with_overlap_decoding_hides_behind_the_update(config):
    config.rollout.overlap = True
    work = Workload(Observed([40]), prompt_tokens=8, train_tokens_per_s=1e9, fixed_s=2.0)
    outcome = simulate(config, servers=1, model=QUICK, work=work, steps=6, grain=1)
    assert outcome.rollout_s == pytest.approx(0, abs=1e-6) and outcome.step_s == pytest.approx(2.0)
    assert outcome.idle == pytest.approx(1 - (16 + 16 + 8) / 3 * 0.01 / 2.0, abs=0.02)


def test_enough_ends_a_step_when_it_has_them(config):
    """10 of 11 responses have 10 tokens, the others 100."""
    config.rollout.global_max_length, config.rollout.segment_count = 128, 1
    work = Workload(Observed([10] * 10 + [100]), prompt_tokens=8, train_tokens_per_s=1e9, fixed_s=2.0)
    all_of_them = simulate(config, servers=1, model=QUICK, work=work, steps=8, grain=1)
    config.rollout.stop, config.rollout.enough_samples = Stop.enough, 2
    enough = simulate(config, servers=1, model=QUICK, work=work, steps=8, grain=1)
    assert 0.05 < enough.rollout_s < 0.11 and enough.samples >= 2
    assert all_of_them.rollout_s > 0.5


def test_the_same_seed_has_the_same_outcome(config):
    work = Workload(LogNormal(30, 0.8), 8, 1000.0, 0.1)
    first, second = (simulate(config, 2, QUICK, work, 4, 1) for _ in range(2))
    other = simulate(replace(config, run=replace(config.run, seed=1)), 2, QUICK, work, 4, 1)
    assert first == second != other


def test_the_choice_is_the_fastest_sample_that_is_not_too_old():
    slow, fast = (Outcome(n, 0, 0, 0, 1, s, 0, a, 0, 0) for n, s, a in ((1, 2.0, 0.0), (8, 1.0, 1.5)))
    assert choose([slow, fast]) is fast and choose([slow, fast], max_age=1.0) is slow


@pytest.mark.slow
def test_one_set_of_numbers_gives_the_papers_table_1():
    """1240, 774 and 601 s a step for 1, 2 and 4 segments of 128k tokens, each within 5 %."""
    config = Config()
    config.run.dir = config.model.path = "none"
    number = {name: entry.default for name, entry in NUMBERS.items()}
    work = Workload(
        LogNormal(MEDIAN, SIGMA), PROMPT_TOKENS, number.pop("train_tokens_per_s"), number.pop("fixed_s")
    )
    model = ServerModel(**{**number, "kv_tokens": int(number["kv_tokens"])})
    for segments, seconds in {1: 1240, 2: 774, 4: 601}.items():
        config.rollout.segment_count = segments
        outcome = simulate(config, 8, model, work, 6, grain(config))
        assert outcome.step_s == pytest.approx(seconds, rel=0.05), segments


def command(tmp_path, *arguments):
    file = tmp_path / "config.yaml"
    file.write_text(
        "run: {dir: run}\nmodel: {path: none}\ndata: {train: none}\n"
        "rollout: {global_max_length: 4096, segment_count: 4, prompts_per_step: 4}\n"
    )
    return main(["plan", str(file), "--rollout", *arguments])


def test_the_command_compares_segment_counts_and_chooses(tmp_path, capsys):
    assert command(tmp_path, "--segments", "1,4", "--servers", "1", "--steps", "2", "--median", "800") == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +1 +\d+ ", output, re.M) and re.search(r"^ +4 +\d+ ", output, re.M)
    assert "rollout.segment_count" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--segments", "3"], "3 does not divide 4096"),
        (["--segments", "two"], "'two' is not a list"),
        (["--lengths", "absent.txt"], "absent.txt: no such file"),
    ],
)
def test_what_cannot_be_simulated_is_told(tmp_path, capsys, arguments, message):
    assert command(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
