"""Which questions are what, and how multiple choice is opened by rule."""

import time

import pytest

from ulorl_megatron.data.question import Form, bare, choices, form, open_form, sub_questions

AOPS = (
    r"What is the value of $2^5$? "
    r"$\textbf{(A)}\ 16 \qquad \textbf{(B)}\ 25 \qquad \textbf{(C)}\ 32 \qquad \textbf{(D)}\ 64$"
)
LINES = "How many sides has a hexagon?\nA. 5\nB. 6\nC. 7\nD. none of these"


@pytest.mark.parametrize(
    ("question", "answer", "kind"),
    [
        ("Find $x$ with $x + 3 = 5$.", "2", Form.short),
        (AOPS, "C", Form.choice),
        (LINES, "B", Form.choice),
        ("Pick the largest: (A) 1 (B) 2 (C) 3", "(C)", Form.choice),
        ("Triangle with vertices A, B and C. Points A. and B. are given. Find the area.", "3", Form.short),
        ("Prove that $\\sqrt{2}$ is irrational.", "", Form.proof),
        ("Let $n$ be odd. Show that $8 \\mid n^2 - 1$.", "proof", Form.proof),
        ("Find all $n$ and prove that there are no others.", "1, 2", Form.short),
        ("It can be shown that the limit exists. Find it.", "0", Form.short),
        ("True or false: every square is a rectangle.", "True", Form.truth),
        ("Is 91 a prime number?", "no", Form.truth),
        ("Is it true that $0.9 < 1$? Answer yes or no.", "Yes", Form.truth),
        ("What is the largest number of pieces possible?", "16", Form.short),
        ("Is there a cube below 10 but above 5? Find it.", "8", Form.short),
        ("A knight starts in a corner. Can it visit all squares once?", "Yes, by a tour", Form.truth),
        ("Which of the following numbers is prime?", "7", Form.choice),  # the options are lost
        ("Which of the following is prime: 21, 23, 25?", "23", Form.short),
        ("If $P(A) = P(B) = P(C) = 1/2$, find $P(A \\cup B)$.", "3/4", Form.short),
        (r'[asy]dot("$A$", A); dot("$B$", B) ; dot("$C$", C) ; label("x", A) [/asy] What is $AB$?', "5", Form.short),
        ("Can you count the ways to climb 5 stairs?", "8", Form.short),
        ("What is the probability that the answer is even?", "\\frac{1}{2}", Form.short),
    ],
)
def test_forms(question, answer, kind):
    assert form(question, answer) is kind


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ("(a) Find $f(2)$. (b) Find $f(3)$.", 2),
        ("A ball is thrown.\n1. How high does it get?\n2. When does it land?\n3. Find its speed.", 3),
        ("Given $a_n$: (i) determine $a_5$; (ii) show that it grows", 2),
        ("Part A: compute 2+2. Part B: compute 3+3.", 2),
        ("（1）" + "Find $a$.", 0),
        ("A function satisfies: (a) $f$ is even (b) $f(0) = 1$. Find $f(2)$.", 0),
        ("$x + y = 3$ (1) and $2x = y$ (2) hold. Find $x$.", 0),
        ("What is $f(a) + f(b)$?", 0),
        (AOPS, 0),
    ],
)
def test_sub_questions(question, parts):
    assert sub_questions(question) == parts


@pytest.mark.parametrize(
    ("question", "answer", "opened"),
    [
        (AOPS, "C", ("What is the value of $2^5$?", "32")),
        (AOPS, r"\text{(C)}", ("What is the value of $2^5$?", "32")),
        (AOPS, "32", ("What is the value of $2^5$?", "32")),
        (AOPS, "33", None),  # no option says so
        (AOPS, "E", None),
        (LINES, "B", ("How many sides has a hexagon?", "6")),
        (LINES, "D", None),  # leans on the others
        ("Which of the following is prime? (A) 4 (B) 5 (C) 6", "B", None),
        ("The number of primes below 10 is (A) 3 (B) 4 (C) 5", "B", None),  # no question by itself
    ],
)
def test_multiple_choice_is_opened_only_where_it_is_safe(question, answer, opened):
    assert open_form(choices(question), answer) == opened


def test_bare():
    assert [bare(t) for t in ("$5$.", r"\text{yes}", r" $\frac{1}{2}$ ", r"\text{a} + \text{b}", r"\text{4 p.m.}")] == [
        *("5", "yes", r"\frac{1}{2}", r"\text{a} + \text{b}", "4 p.m.")
    ]


@pytest.mark.parametrize("text", ["(", "(A) ", "is ", "1. ", "\\text{", "[asy]"])
def test_long_texts_take_no_long_time(text):
    text *= 200_000 // len(text)
    begin = time.perf_counter()
    form(text, text)
    sub_questions(text)
    assert time.perf_counter() - begin < 3
