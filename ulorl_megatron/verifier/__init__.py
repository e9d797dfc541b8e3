"""Judging responses: 1 right, 0 wrong, and an error where the judge itself failed."""

from ulorl_megatron.config.schema import VerifierConfig, VerifierKind
from ulorl_megatron.verifier.generative import GenerativeVerifier
from ulorl_megatron.verifier.hybrid import HybridVerifier
from ulorl_megatron.verifier.interface import By, UnknownVerdict, Verdict, Verifier, VerifierFailed
from ulorl_megatron.verifier.rule import RuleVerifier

__all__ = [
    "By",
    "GenerativeVerifier",
    "HybridVerifier",
    "RuleVerifier",
    "UnknownVerdict",
    "Verdict",
    "Verifier",
    "VerifierFailed",
    "build_verifier",
]


def build_verifier(config: VerifierConfig) -> Verifier:
    """The verifier `config` describes; worker processes start at once and get ready in the background.

    Raises UserError for a template or an environment that does not do.
    """
    model = None if config.kind is VerifierKind.rule else GenerativeVerifier(config.judge)
    if config.kind is VerifierKind.generative:
        return model
    rule = RuleVerifier(workers=config.workers, timeout_s=config.timeout_s, retries=config.retries)
    return rule if model is None else HybridVerifier(rule, model)
