"""One real rule verifier for all tests here: its worker takes seconds to start."""

import asyncio

import pytest

from ulorl_megatron.attempts import sampler
from ulorl_megatron.verifier import RuleVerifier


class _Shared(RuleVerifier):
    async def close(self) -> None:
        """Not when a sampler ends, but with the session."""


@pytest.fixture(scope="session")
def _shared_rule():
    verifier = _Shared(workers=1, timeout_s=10.0, retries=1)
    yield verifier
    asyncio.run(RuleVerifier.close(verifier))


@pytest.fixture
def shared_rule(_shared_rule, monkeypatch):
    """Samplers judge by the shared verifier."""
    monkeypatch.setattr(sampler, "build_verifier", lambda config: _shared_rule)
