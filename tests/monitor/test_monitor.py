"""What a run shows and records: terminal, metrics.jsonl and TensorBoard say the same, also after a resume."""

import json
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import tiny_config
from ulorl_megatron.config.schema import Importance
from ulorl_megatron.monitor import Clock, Monitor
from ulorl_megatron.monitor.metrics import METRICS
from ulorl_megatron.rollout.sample import Status


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path / "run", tmp_path / "model")
    config.data.train = "train.jsonl"
    config.run.total_steps = 4
    return config


def step_metrics(step, **changes):
    """Every metric of a step, with values that depend on it."""
    names = [name for name in METRICS if not name.startswith("eval/")]
    calm = {"rollout/truncated_share": 0.125, "servers/missing": 0}  # nothing to warn of
    calm |= {name: 0.01 for name in names if name.endswith("/kl")}
    return {name: step + i / 64 for i, name in enumerate(names)} | calm | changes


EVALUATION = {
    "eval/accuracy": 0.25,
    "eval/pass_at_k": 0.5,
    "eval/unjudged": 0.0625,
    "eval/mean_length": 31.0,
    "eval/truncated": 0.125,
}


@contextmanager
def opened(config, done):
    with Monitor(config) as monitor:
        monitor.resume(done)
        yield monitor


def records(config):
    with open(f"{config.run.dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def points(config, name):
    """(step, value) of a TensorBoard scalar."""
    accumulator = EventAccumulator(f"{config.run.dir}/tensorboard", size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_terminal_file_and_tensorboard_say_the_same(config, capsys):
    changes = {"reward/complete": 0.375, "time/rollout": 12.25, "train/sigma": config.dmmpt.sigma}
    with opened(config, 0) as monitor:
        monitor.evaluation(0, EVALUATION)
        monitor.step(1, step_metrics(1, **changes))
    assert records(config) == [{"step": 0, **EVALUATION}, {"step": 1, **step_metrics(1, **changes)}]
    assert points(config, "reward/complete") == [(1, 0.375)]
    assert points(config, "eval/accuracy") == [(0, 0.25)]
    evaluation, step = capsys.readouterr().out.splitlines()
    assert "0.250" in evaluation
    assert "step    1/4" in step and "reward 0.375" in step and "rollout 12.2s" in step


def test_every_declared_metric_reaches_tensorboard(config):
    with opened(config, 0) as monitor:
        monitor.step(1, step_metrics(1))
        monitor.evaluation(1, EVALUATION)
    for name in METRICS:
        assert len(points(config, name)) == 1, name


def test_an_undeclared_name_is_an_error(config):
    with opened(config, 0) as monitor, pytest.raises(KeyError, match="reward/maen"):
        monitor.step(1, step_metrics(1, **{"reward/maen": 1.0}))


def test_a_step_without_an_update_has_a_line(config, capsys):
    """Nothing was released: there is no entropy, and nothing stands in for it."""
    metrics = {n: v for n, v in step_metrics(1).items() if not n.startswith(("train/", "reward/"))}
    with opened(config, 0) as monitor:
        monitor.step(1, metrics)
    assert "entropy" not in capsys.readouterr().out
    assert "train/entropy" not in records(config)[0]


def test_resume_drops_later_points_and_repeats_none(config):
    with opened(config, 0) as monitor:
        for step in (1, 2, 3):
            monitor.step(step, step_metrics(step))
        monitor.evaluation(3, EVALUATION)
    with open(f"{config.run.dir}/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward/me')  # killed while writing
    with opened(config, 2) as monitor:
        monitor.step(3, step_metrics(3, **{"reward/complete": 0.5}))
    assert [record["step"] for record in records(config)] == [1, 2, 3]
    assert records(config)[2]["reward/complete"] == 0.5
    kept = step_metrics(1)["reward/complete"], step_metrics(2)["reward/complete"]
    assert points(config, "reward/complete") == [(1, kept[0]), (2, kept[1]), (3, 0.5)]


def test_a_fresh_start_after_a_kill_before_the_first_checkpoint_repeats_nothing(config):
    for _ in range(2):
        with opened(config, 0) as monitor:
            monitor.evaluation(0, EVALUATION)
    assert records(config) == [{"step": 0, **EVALUATION}]
    assert points(config, "eval/accuracy") == [(0, 0.25)]


def test_mostly_truncated_samples_are_warned_of(config, capsys):  # trl#5697
    with opened(config, 0) as monitor:
        monitor.step(1, step_metrics(1))
        assert "warning" not in capsys.readouterr().out
        monitor.step(2, step_metrics(2, **{"rollout/truncated_share": 0.95}))
    assert "warning: 95%" in capsys.readouterr().out


def test_servers_without_work_are_warned_of(config, capsys):
    with opened(config, 0) as monitor:
        monitor.step(1, step_metrics(1, **{"servers/missing": 1}))
    assert "warning: 1 of the servers" in capsys.readouterr().out


def test_summary_covers_the_parts_of_a_resumed_run(config, capsys, monkeypatch):
    monkeypatch.setattr("ulorl_megatron.monitor.summary._EDGE", 3)
    counts = {
        "train/samples": 10,
        "train/multi_version_samples": 4,
        "train/truncated_samples": 1,
        "rollout/tokens": 500,
    }
    with opened(config, 0) as monitor:
        monitor.evaluation(0, EVALUATION)
        for step in (1, 2):
            monitor.step(step, step_metrics(step, **counts, **{"reward/issued": 0.25}))
    with opened(config, 2) as monitor:
        for step in (3, 4):
            monitor.step(step, step_metrics(step, **counts, **{"reward/issued": 0.75}))
        monitor.evaluation(4, EVALUATION | {"eval/accuracy": 0.5})
        capsys.readouterr()
        monitor.summary()
    text = capsys.readouterr().out
    assert "0.417 -> 0.583" in text  # first and last three of 0.25, 0.25, 0.75, 0.75
    assert "0.250 -> 0.500" in text and "steps 0 and 4" in text
    assert "40, of them 16 (40%)" in text and "4 truncated" in text
    assert "2000" in text
    assert f"tensorboard --logdir {config.run.dir}/tensorboard" in text


def test_summary_of_a_run_without_steps(config, capsys):
    with opened(config, 0) as monitor:
        monitor.summary()
    assert "0 steps" in capsys.readouterr().out


def test_clock_parts_are_declared_metrics():
    clock = Clock()
    for part in ("rollout", "rollout", "train", "sync", "evaluate", "checkpoint"):
        with clock(part):
            pass
    lap = clock.lap()
    assert set(lap) == {f"time/{p}" for p in ("rollout", "train", "sync", "evaluate", "checkpoint", "step")}
    assert set(lap) <= set(METRICS)
    assert lap["time/step"] >= sum(value for name, value in lap.items() if name != "time/step")
    assert set(clock.lap()) == {"time/step"}


def test_clock_counts_a_part_that_fails():
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock("train"):
        raise ZeroDivisionError
    assert "time/train" in clock.lap()


def test_every_status_of_a_sample_is_a_declared_metric():
    assert {f"pools/{status.value}" for status in Status} <= set(METRICS)


def test_every_metric_has_a_meaning():
    assert all(meaning.strip() and "\n" not in meaning for meaning in METRICS.values())


def test_a_policy_far_from_the_one_that_sampled_is_warned_of_under_pois(config, capsys):
    with opened(config, 0) as monitor:
        monitor.step(1, step_metrics(1, **{"age-2-3/kl": 0.0625}))
    assert "0.062 nats a token from the one of age-2-3" in capsys.readouterr().out
    config.algorithm.importance = Importance.sais
    config.run.dir += "-sais"
    with opened(config, 0) as monitor:
        monitor.step(1, step_metrics(1, **{"age-2-3/kl": 0.0625}))
    assert "warning" not in capsys.readouterr().out
