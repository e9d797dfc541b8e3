"""docs/metrics.md, made of metrics.py: python -m ulorl_megatron.monitor.page > docs/metrics.md"""

from itertools import groupby
from typing import Iterator

from ulorl_megatron.algorithm.staleness import AGES
from ulorl_megatron.monitor.dashboard import CHARTS
from ulorl_megatron.monitor.metrics import METRICS

_HEAD = """# What is measured

`tensorboard --logdir RUN/tensorboard` shows all of it: every number under "Scalars", the charts below under "Custom
Scalars", lengths and token ages of the samples completed in a step under "Histograms", and a few of these samples with
their verdicts under "Text". `RUN/metrics.jsonl` has the same numbers, one line a step.

"""


def page() -> str:
    return _HEAD + "\n".join([*_charts(), *_metrics()]) + "\n"


def _charts() -> Iterator[str]:
    yield "## The charts\n"
    for question, charts in CHARTS.items():
        yield f"**{question}**\n"
        yield from (f"- {title}: " + ", ".join(f"`{name}`" for name in names) for title, names in charts.items())
        yield ""


def _metrics() -> Iterator[str]:
    first = f"age-{next(iter(AGES))}/"
    shown = {name: text for name, text in METRICS.items() if not name.startswith("age-") or name.startswith(first)}
    yield "## The names\n"
    for group, names in groupby(sorted(shown), key=lambda name: name.split("/")[0]):
        title = f"age-N, N one of {', '.join(AGES)}" if f"{group}/" == first else group
        yield f"### {title}\n"
        yield "| name | meaning |\n|---|---|"
        for name in names:
            meaning = shown[name].replace(f"made {first[4:-1]} ", "made N ").replace("|", "\\|")
            yield f"| `{name.replace(first, 'age-N/')}` | {meaning} |"
        yield ""


if __name__ == "__main__":
    print(page(), end="")
