"""What counts as right: Math-Verify's equality of the extracted answer and the reference."""

import pytest

from ulorl_megatron.verifier.mathematics import judge
from ulorl_megatron.verifier.worker import Unjudgeable


@pytest.mark.parametrize(
    ("given", "reference", "reward"),
    [
        ("25", "25", 1.0),
        ("07", "7", 1.0),
        ("26", "25", 0.0),
        ("0.5", "1/2", 1.0),
        (r"\frac{2}{4}", "1/2", 1.0),
        (r"\frac12", "0.5", 1.0),
        (r"50\%", "0.5", 1.0),
        ("50", r"50\%", 1.0),
        ("1234", "1,234", 1.0),
        ("27 cm", "27", 1.0),
        ("0.27m", "27cm", 0.0),  # equal only to one who converts units: a rule cannot tell
        (r"\sqrt{12}", r"2\sqrt{3}", 1.0),
        ("1 + x", "x + 1", 1.0),
        (r"\{2, 1\}", r"\{1, 2\}", 1.0),
        ("x = 3", "3", 1.0),
        ("2", "$2$", 1.0),
        ("2", r"\boxed{2}", 1.0),
        ("]] garbage ((", "25", 0.0),
        (r"\frac{1}{", "25", 0.0),
        ("A", "A", 1.0),
        ("B", "A", 0.0),
    ],
)
def test_equality(given, reference, reward):
    assert judge(given, reference) == reward


def test_a_reference_without_value_is_not_a_silent_zero():
    with pytest.raises(Unjudgeable, match="reference"):
        judge("25", "$$")
