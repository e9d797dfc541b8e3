"""Strict configuration: every fault named in one go, with the nearest real key."""

import pytest

from ulorl_megatron.config import load, to_yaml
from ulorl_megatron.config.schema import DmmptMode
from ulorl_megatron.errors import UserError

MINIMAL = "run: {dir: runs/x}\nmodel: {path: m}\ndata: {train: t.jsonl}\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return str(file)

    return write


def message(file, overrides=()):
    with pytest.raises(UserError) as error:
        load(file, overrides)
    return str(error.value)


def test_resolved_config_reads_back_equal(write):
    config = load(write(MINIMAL), ["rollout.temperature=1", "servers.urls=[http://a, http://b]"])
    assert config.rollout.temperature == 1.0 and config.servers.urls == ["http://a", "http://b"]
    assert load(write(to_yaml(config))) == config


def test_all_faults_are_named_at_once(write):
    text = MINIMAL + "rolout: {}\nrollout: {temprature: 1, group_size: many}\npolicy: {parallel: 3}\n"
    lines = message(write(text)).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "rolout", "rollout.temprature", "rollout.group_size", "policy.parallel",
    ]  # fmt: skip
    assert "did you mean rollout?" in lines[0] and "did you mean rollout.temperature?" in lines[1]


def test_key_of_another_section_is_found(write):
    assert "did you mean dmmpt.sigma?" in message(write(MINIMAL + "algorithm: {sigma: 0.2}\n"))


def test_missing_values_are_named(write):
    text = message(write("run: {dir: runs/x}\n"))
    assert "data.train: no value" in text and "model.path: no value" in text


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.top_p=0.95", "rollout.top_p"),  # verl#6240
        ("rollout.top_k=20", "rollout.top_k"),
        ("rollout.temperature=0", "rollout.temperature"),
        ("rollout.temperature=-1", "rollout.temperature"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("rollout.segment_count=7", "rollout.segment_count"),
        ("algorithm.importance=tois", "algorithm.importance"),
        ("dmmpt.tau=0", "dmmpt.tau"),
        ("policy.parallel.virtual_pipeline=2", "policy.parallel.virtual_pipeline"),
        ("evaluation.every=5", "data.eval"),
        ("run.total_steps=0", "run.total_steps"),
        ("policy.optimizer.schedule=cosine", "policy.optimizer.decay_steps"),
        ("policy.optimizer.min_lr=1e-7", "policy.optimizer.schedule"),
        ("policy.overlap.param_gather=true", "policy.overlap.param_gather"),
        ("algorithm.importance=poise", "algorithm.importance"),
        ("nosuch.key=1", "nosuch"),
        ("model.max_positions=0", "model.max_positions"),
        ("servers.extra_args=[--context-length, 5]", "servers.extra_args"),
        ("servers.extra_args=[--dtype=half]", "servers.extra_args"),
        ("servers.announced=-1", "servers.announced"),
        ("verifier.kind=generative", "verifier.judge.url"),
        ("verifier.kind=hybrid", "verifier.judge.url"),
        ("verifier.judge.url=http://judge/v1", "verifier.judge.url"),  # of a judge that is not asked
        ("verifier.judge.votes=0", "verifier.judge.votes"),
        ("verifier.judge.votes=3", "verifier.judge.temperature"),
        ("experience.overlong=soft", "experience.overlong_cache"),
        ("experience.overlong_cache=9", "experience.overlong_cache"),
    ],
)
def test_values_that_cannot_work_are_refused(write, override, key):
    assert f"  {key}: " in message(write(MINIMAL), [override])


def test_servers_are_named_or_announce_themselves(write):
    text = message(write(MINIMAL), ["servers.announced=2", "servers.urls=[http://a]"])
    assert "  servers.announced: servers.urls has servers already" in text
    assert load(write(MINIMAL), ["servers.announced=2", "servers.urls=[]"]).servers.announced == 2


def test_off_is_a_mode_and_not_a_boolean(write):
    assert load(write(MINIMAL + "dmmpt: {mode: off}\n")).dmmpt.mode is DmmptMode.off
    assert load(write(MINIMAL), ["dmmpt.mode=off"]).dmmpt.mode is DmmptMode.off


def test_files_that_are_no_configuration(write, tmp_path):
    assert "no configuration file" in message(str(tmp_path / "absent.yaml"))
    assert "is not YAML" in message(write("a: [1,"))
    assert "not sections of keys" in message(write("- 1\n"))
    assert "not of the form" in message(write(MINIMAL), ["rollout.temperature"])
