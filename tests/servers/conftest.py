"""The task of the quickstart, for the tests that run the whole loop."""

import pytest

from tests.servers.support import EXAMPLE, run_python


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """The quickstart's data and a model that solves some of it."""
    folder = tmp_path_factory.mktemp("quickstart") / "task"
    run_python(EXAMPLE / "make_task.py", folder)
    run_python(
        *(EXAMPLE / "warm_start.py", EXAMPLE / "config.yaml", "--steps", 120),
        *("--model", folder / "model", "--data", folder / "warmstart.jsonl", "--out", folder / "warm"),
    )
    return folder
