"""One real rule verifier for all tests here: its worker takes seconds to start."""

import pytest

from tests.evaluation.support import shared_rule_verifier
from ulorl_megatron.attempts import sampler


@pytest.fixture(scope="session")
def rule_verifier():
    with shared_rule_verifier() as verifier:
        yield verifier


@pytest.fixture
def shared_rule(rule_verifier, monkeypatch):
    """Samplers judge by the shared verifier."""
    monkeypatch.setattr(sampler, "build_verifier", lambda config: rule_verifier)
