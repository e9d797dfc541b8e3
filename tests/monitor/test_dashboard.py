"""What TensorBoard shows beside single scalars, and the page that explains the names."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.conftest import tiny_config
from ulorl_megatron.monitor import Monitor
from ulorl_megatron.monitor.dashboard import CHARTS, layout
from ulorl_megatron.monitor.exhibits import Exhibits, sample_text
from ulorl_megatron.monitor.metrics import METRICS
from ulorl_megatron.monitor.page import page


def test_each_chart_shows_metrics_that_exist_and_no_others():
    for question, charts in layout().items():
        for title, (_, patterns) in charts.items():
            named = CHARTS[question][title]
            assert [[m for m in METRICS if re.match(p, m)] for p in patterns] == [[name] for name in named], title
    (accuracy, _) = layout()["Is it learning?"]["held-out accuracy"][1]
    assert re.match(accuracy, "eval/accuracy/aime24")


def test_the_run_has_layout_histograms_and_texts(tmp_path):
    config = tiny_config(tmp_path / "run", tmp_path / "model")
    config.data.train = "train.jsonl"
    text = sample_text(
        prompt="2 + 3?", response="<b>5</b>\n# no heading", answer="5", reward=1.0, verdict="rule", versions=2
    )
    with Monitor(config) as monitor:
        monitor.resume(0)
        monitor.step(1, {"train/entropy": 0.5} | {f"time/{t}": 1.0 for t in ("rollout", "verify", "train", "sync")})
        monitor.exhibits(1, Exhibits([3, 70], {1: 40, 0: 33}, [text]))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0})
    events.Reload()
    found = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert {c.title: [chart.title for chart in c.chart] for c in found.category} == {
        question: list(charts) for question, charts in CHARTS.items()
    }
    assert [e.value for e in events.Scalars("train/sigma")] == [pytest.approx(config.dmmpt.sigma)]
    ages = events.Histograms("samples/token_age")[0].histogram_value
    assert (ages.num, ages.min, ages.max, ages.sum) == (73, 0, 1, 40)
    assert list(ages.bucket) == [33, 40]
    assert events.Histograms("samples/length")[0].histogram_value.max == 70
    shown = events.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "**reward 1** (rule)" in shown and "    <b>5</b>\n    # no heading" in shown


def test_the_page_says_what_the_code_says():
    written = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert written.read_text() == page(), "python -m ulorl_megatron.monitor.page > docs/metrics.md"
