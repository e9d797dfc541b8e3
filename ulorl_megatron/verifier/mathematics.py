"""The rule: is an extracted answer equal to the reference? Runs in worker processes only.

Math-Verify decides on values. What it gets wrong is decided before it: texts (it takes "yes" for the product
y e s, and "eys" for the same), units (it drops them), sets against intervals, equations against numbers.
"""

import logging
import re
from fractions import Fraction

from math_verify import parse, verify

from ulorl_megatron.verifier.answer import reference_answer
from ulorl_megatron.verifier.normal import text_key, undressed
from ulorl_megatron.verifier.units import Quantity, quantity
from ulorl_megatron.verifier.worker import Unjudgeable

# One of each kind of expression: the first of a kind costs Math-Verify up to a second, the next a ms.
_KINDS = ["0.5", r"\frac{1}{2}", r"50\%", "1,234", "x + 1", r"2\sqrt{3}", "(1, 2)", r"\{1, 2\}", "x = 3"]

# A word of an ordinary text: three letters that are no LaTeX command, or any letter that is not Latin.
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[^\W\d_a-zA-Z\u0370-\u03ff]")
_SHORT_TEXTS = ("yes", "no")
# What makes another number of one: a base (101_2), a modulus, a second sign.
_MARKS = re.compile(r"\d_\{?\d|mod(?![a-z])|--")
_CHOICE = re.compile(r"\(?([A-Z])[).:]\s*\S.*")
_BOUND = r"([^<>=]+?)"
_BETWEEN = re.compile(rf"\s*{_BOUND}\s*(<|\\leq?|\\lt)\s*[a-z]\s*(<|\\leq?|\\lt)\s*{_BOUND}\s*")
_BEYOND = re.compile(rf"\s*[a-z]\s*(<|>|\\[lg]eq?|\\[lg]t)\s*{_BOUND}\s*")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_OPENINGS = {r"\{": "set", "(": "tuple or interval", "[": "tuple or interval"}
# What may stand before "=" when a number is asked for: a name (x, AB, f(2), \\angle ABC) or a computation.
_NAME_OR_NUMBERS = re.compile(
    r"(?:\\[a-zA-Z]+\s*)?\|?[A-Za-z]*\|?(?:_\{?\w+\}?)?(?:\([^()=]*\))?|(?:[^A-Za-z\\]|\\(?:cdot|times|div|frac|sqrt)\b)*"
)


def judge(given: str, answer: str) -> float:
    """1.0 if the extracted answer equals the reference, else 0.0. Raises Unjudgeable if that has no value.

    Of two units of one kind the values are converted; an answer or a reference without a unit is taken to mean
    the other's. Math-Verify's own time limits are off: they need signals, and the pool kills a worker that is late.
    """
    given, reference = undressed(given), undressed(reference_answer(answer))
    if not reference:
        raise Unjudgeable(f"the reference answer {answer!r} is empty")
    if given == reference:
        return 1.0
    if set(_MARKS.findall(given)) != set(_MARKS.findall(reference)):
        return 0.0
    if len(reference) == 1 and (choice := _CHOICE.fullmatch(given)):
        given = choice.group(1)  # "(C) 12", where C is asked for
    if reference[0] in "([":
        given = _as_interval(given)
    if given.count("=") == 1 and "=" not in reference:
        left, _, given = given.partition("=")
        if not _NAME_OR_NUMBERS.fullmatch(left.strip()):
            return 0.0  # 2x = 14 is no way to say 14
    ours, theirs = quantity(given.strip()), quantity(reference)
    if ours.glued != theirs.glued and (ours.unit is None or theirs.unit is None):
        ours, theirs = Quantity(given), Quantity(reference)  # 5m beside 5: m may be a variable
    if any(_is_text(side.value) for side in (ours, theirs)):
        return float(text_key(given) == text_key(reference))
    if ours.words and theirs.words and ours.words != theirs.words:
        return 0.0
    scale = Fraction(1)
    if ours.unit and theirs.unit:
        if ours.unit.dimension != theirs.unit.dimension:
            return 0.0
        scale = ours.unit.factor / theirs.unit.factor
    elif (ours.unit and theirs.words) or (ours.words and theirs.unit):
        return 0.0
    return float(_same_form(ours.value, theirs.value) and _equal(ours.value, theirs.value, scale, answer))


def warm_up() -> None:
    """Makes the first answers as fast as the later ones."""
    # It warns about missing time limits once a process; errors still show.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for kind in _KINDS:
        _equal(kind, kind, Fraction(1), kind)


def _is_text(value: str) -> bool:
    return bool(_WORD.search(value)) or value.lower() in _SHORT_TEXTS


def _as_interval(text: str) -> str:
    """1 < x <= 2 as (1, 2]; anything else as it is."""
    if between := _BETWEEN.fullmatch(text):
        low, after_low, before_high, high = between.groups()
        return f"{_bracket('([', after_low)}{low}, {high}{_bracket(')]', before_high)}"
    if beyond := _BEYOND.fullmatch(text):
        sign, bound = beyond.groups()
        if sign == "<" or sign.startswith(r"\l"):
            return rf"(-\infty, {bound}{_bracket(')]', sign)}"
        return rf"{_bracket('([', sign)}{bound}, \infty)"
    return text


def _bracket(brackets: str, sign: str) -> str:
    """The open one of two brackets for a strict sign, else the closed one."""
    return brackets["e" in sign]


def _same_form(given: str, reference: str) -> bool:
    """False for a set beside an interval or a tuple."""
    forms = {form for side in (given, reference) for opening, form in _OPENINGS.items() if side.startswith(opening)}
    return len(forms) < 2


def _equal(given: str, reference: str, scale: Fraction, answer: str) -> bool:
    expected = _parse(reference)
    if not expected:
        raise Unjudgeable(f"Math-Verify finds no value in the reference answer {answer!r}")
    if scale != 1:
        # A decimal is scaled exactly: 20.44 x 100 is no whole number in floats.
        factor, rest = (Fraction(given), "") if _DECIMAL.fullmatch(given) else (Fraction(1), rf"({given}) \cdot ")
        scaled = factor * scale
        given = rf"{rest}\frac{{{scaled.numerator}}}{{{scaled.denominator}}}"
    return verify(expected, _parse(given), timeout_seconds=None)


def _parse(text: str) -> list:
    return parse(rf"\boxed{{{text}}}", parsing_timeout=None)
