"""The rule: Math-Verify's equality of extracted answer and reference. Runs in worker processes only."""

import logging

from math_verify import parse, verify

from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.worker import Unjudgeable

# One of each kind of expression: the first of a kind costs Math-Verify up to a second, the next a ms.
_KINDS = ["0.5", r"\frac{1}{2}", r"50\%", "1,234", "x + 1", r"2\sqrt{3}", "(1, 2)", r"\{1, 2\}", "x = 3"]


def judge(given: str, answer: str) -> float:
    """1.0 if the extracted answer equals the reference, else 0.0. Raises Unjudgeable if that has no value.

    Math-Verify's own time limits are off: they need signals, and the pool kills a worker that is late.
    """
    reference = _parse(extract_answer(answer) or answer.strip().strip("$"))
    if not reference:
        raise Unjudgeable(f"Math-Verify finds no value in the reference answer {answer!r}")
    return float(verify(reference, _parse(given), timeout_seconds=None))


def warm_up() -> None:
    """Makes the first answers as fast as the later ones."""
    # It warns about missing time limits once a process; errors still show.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for kind in _KINDS:
        judge(kind, kind)


def _parse(text: str) -> list:
    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)
