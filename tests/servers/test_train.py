"""`ulorl train` as people run it: real Megatron-Core on two ranks, a real SGLang server."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.servers.support import records, train
from ulorl_megatron.rollout.sample import Status
from ulorl_megatron.rollout.store import PoolStore


def test_a_run_from_start_to_summary(task, tmp_path):
    run = tmp_path / "run"
    code, output, errors = train(
        *(task, run, "evaluation.every=5", "evaluation.max_prompts=8", "evaluation.samples_per_prompt=2")
    )
    assert code == 0, errors
    steps = [r for r in records(run) if "time/step" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]

    # Trained, by more than one weight version, with trainer and server agreeing, at a ratio of exactly 1.
    assert sum(r["train/samples"] for r in steps) > 0
    assert sum(r["train/multi_version_samples"] for r in steps) > 0
    updated = [r for r in steps if "train/loss" in r]
    assert all(r["train/ratio_deviation"] == 0 for r in updated)
    measured = [r["train/mismatch_mean"] for r in updated if "train/mismatch_mean" in r]
    assert measured and max(measured) < 1e-4
    assert any(r["train/staleness"] > 10 * r.get("train/mismatch_mean", 1) for r in updated)

    # Conservation, from the pools themselves.
    store = PoolStore(run / "pools.sqlite")
    counts = store.check_conservation()
    assert counts[Status.trained] == sum(r["train/samples"] for r in steps)
    store.close()

    # What people watch.
    assert [r["step"] for r in records(run) if "eval/accuracy" in r] == [0, 5]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("rollout/tokens")] == [1, 2, 3, 4, 5]
    lines = output.splitlines()
    assert sum(line.startswith("step ") and "tok/s" in line for line in lines) == 5
    assert f"tensorboard --logdir {run / 'tensorboard'}" in lines[-1]
    assert len(list((run / "weights").glob("step-*"))) == 2  # checkpoint.keep_weights

    # The same command again has nothing to do, starts no server and changes nothing.
    before = (run / "metrics.jsonl").read_text()
    log = (run / "logs" / "server-0.log").read_text()
    code, output, errors = train(
        *(task, run, "evaluation.every=5", "evaluation.max_prompts=8", "evaluation.samples_per_prompt=2")
    )
    assert code == 0, errors
    assert "is done: 5 of 5 steps" in output and f"tensorboard --logdir {run / 'tensorboard'}" in output
    assert (run / "metrics.jsonl").read_text() == before and (run / "logs" / "server-0.log").read_text() == log


def test_engines_that_disagree_stop_the_run(task, tmp_path):
    run = tmp_path / "run"
    code, _, errors = train(task, run, "algorithm.max_engine_mismatch=1e-12")
    assert code == 2
    assert "trainer and servers disagree" in errors and "Traceback" not in errors
    assert not (run / "checkpoints" / "latest").exists()


def test_a_server_that_dies_at_start_shows_its_log(task, tmp_path):
    code, _, errors = train(task, tmp_path / "run", "servers.extra_args=[--no-such-flag]")
    assert code == 2
    assert "--no-such-flag" in errors and "server-0.log" in errors and "Traceback (most" not in errors
