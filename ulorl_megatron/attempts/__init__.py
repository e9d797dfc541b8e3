"""Whole responses of a served policy, judged and kept, without a trainer: for evaluation and for cleaning data."""

from ulorl_megatron.attempts.journal import Attempt, Journal
from ulorl_megatron.attempts.sampler import Problem, Sampler

__all__ = ["Attempt", "Journal", "Problem", "Sampler"]
