"""Judging responses: 1 right, 0 wrong, and an error where the judge itself failed."""

from ulorl_megatron.config.schema import VerifierConfig
from ulorl_megatron.verifier.interface import By, UnknownVerdict, Verdict, Verifier, VerifierFailed
from ulorl_megatron.verifier.rule import RuleVerifier

__all__ = ["By", "RuleVerifier", "UnknownVerdict", "Verdict", "Verifier", "VerifierFailed", "build_verifier"]


def build_verifier(config: VerifierConfig) -> Verifier:
    """The verifier `config` describes; its workers start at once and get ready in the background."""
    return RuleVerifier(workers=config.workers, timeout_s=config.timeout_s, retries=config.retries)
