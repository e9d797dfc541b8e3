"""Which part of a response is its answer."""

import time

import pytest

from ulorl_megatron.verifier.answer import extract_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"03+8=11;\boxed{11}", "11"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{$7$}", "7"),
        (r"\boxed{5} and then \boxed{6", "5"),  # the last complete one
        (r"a set { without end \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        ("Answer: 42", "42"),
        ("Answer: 1\nthen\nAnswer: 2", "2"),
        ("**Final Answer:** $x + 1$", "x + 1"),
        ("The final answer is: 3", "3"),
        ("\\boxed{4}\nAnswer: 5", "4"),  # a box counts before a line
        ("", None),
        ("42", None),
        (r"\boxed{}", None),
        ("Answer:", None),
        ("my answer: none", None),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_unbalanced_boxes_take_linear_time():
    """100k openings: quadratic scanning would take minutes, and the suite's timeout."""
    begin = time.process_time()
    assert extract_answer("\\boxed{" * 100_000 + "1}") == "1"
    assert extract_answer("\\boxed{" * 100_000) is None
    assert time.process_time() - begin < 60
