"""Which part of a response is its answer."""

import time

import pytest

from ulorl_megatron.verifier.answer import extract_answer, reference_answer


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
        ("Answer:\n\n42", "42"),
        ("So the answer is 4.5. Done.", "4.5"),
        ("The answer is 1.\nAnswer: 2", "2"),  # of the two the later
        ("Answer: 1\nNo, the answer is **2**!", "2"),
        ("$1$ and then $x = 2$.", "x = 2"),
        (r"so \[ x = 3 \] and $y", "x = 3"),
        (r"it costs \$5", None),
        ("$1$ so the answer is 2", "2"),  # said before shown
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"\boxed{1}</think>The answer is 2.", "2"),  # the chat template opened the thinking
        (r"<think>\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),  # never ended
        (r"<think>a</think><think>\boxed{1}</think> 2", None),
        (r"\boxed{1} \boxed{}", None),  # the last one counts
        (r"\boxed{" + "1" * 2000 + "}", None),  # an argument or a flood, no short answer
        ("", None),
        ("42", None),
        (r"\boxed{}", None),
        ("Answer:", None),
        ("my answer: none", None),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("42", "42"), (r"so \boxed{42}", "42"), ("Answer: 42", "42"), ("$3$ or $5$", "3$ or $5"), ("$2$", "2")],
)
def test_reference_answer(reference, answer):
    assert reference_answer(reference) == answer


def test_floods_take_linear_time():
    """100k openings of whatever opens something: quadratic scanning would take minutes, and the suite's timeout."""
    begin = time.process_time()
    assert extract_answer("\\boxed{" * 100_000 + "1}") == "1"
    for flood in ("\\boxed{", "$", "$$ ", "\\(", "answer is ", "answer:\n", "<think>", "</think>", "* "):
        assert extract_answer(flood * 100_000) in (None, "answer:")
    assert time.process_time() - begin < 60
