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
        ("0.27m", "27cm", 1.0),  # the paper's own
        ("20.44 m", "2044 cm", 1.0),  # exactly: in floats it is not
        (r"\frac{1}{4} m", "25 cm", 1.0),
        ("-0.5 km", "-500 m", 1.0),
        ("27m", "27cm", 0.0),
        ("27kg", "27cm", 0.0),
        ("5", "5m", 1.0),  # the unit may be the question's
        (r"9.8 m s^{-2}", r"9.8 \text{ m/s}^2", 1.0),
        ("12 square feet", "12 ft^2", 1.0),
        ("20 °C", r"20^\circ \text{C}", 1.0),
        ("20 °F", r"20^\circ \text{C}", 0.0),
        ("5 apples", "5 oranges", 0.0),
        ("1/2", "one half", 1.0),  # the paper's own
        ("minus three and a half", "-3.5", 1.0),
        ("one hundred and five", "105", 1.0),
        ("two point five", "2.5", 1.0),
        ("eys", "yes", 0.0),  # Math-Verify takes both for the product e s y
        ("Pairs", "Paris", 0.0),
        ("the Circle.", "circle", 1.0),
        ("(1, 2)", r"\{1, 2\}", 0.0),
        ("[0, 1)", "(0, 1]", 0.0),
        ("2x = 14", "14", 0.0),
        ("x = 14", "14", 1.0),
        ("3", "$3$ or $5$", 0.0),  # a reference is more than its last formula
        ("5, 3", "$3$ or $5$", 1.0),
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
