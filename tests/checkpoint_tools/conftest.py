import shutil
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """pristine(kind) -> a tiny model nobody may change: moe, dense, tied."""
    made: dict[str, Path] = {}

    def path(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_model(tmp_path_factory.mktemp("pristine") / kind, kind)
        return made[kind]

    return path


@pytest.fixture
def hf(pristine, tmp_path):
    """hf(kind) -> a copy of a tiny model, for this test alone."""

    def path(kind: str = "moe") -> Path:
        return Path(shutil.copytree(pristine(kind), tmp_path / f"hf-{kind}"))

    return path
