"""Exact and near duplicates, and overlap with evaluation sets."""

import json
import random

import pytest

from ulorl_megatron.data.duplicates import EvaluationFile, ExactDuplicates, NearDuplicates, Overlap, words
from ulorl_megatron.data.step import Dropped
from ulorl_megatron.errors import UserError

LONG = (
    "A rectangular garden is 12 metres long and 7 metres wide. A path of width 1 metre goes around the outside of the "
    "garden. What is the area of the path in square metres?"
)


def row(prompt, answer="1", origin=""):
    return {"prompt": prompt, "answer": answer, "origin": origin or prompt[:5]}


def outcomes(step, rows):
    return [outcome for _, outcome in step.run(iter(rows), None)]


def test_exact_ones_differ_in_setting_only():
    rows = [
        row(r"Find $\dfrac{1}{2} + x$.", origin="first"),
        row(r"find $ \frac{1}{2}+x $ ."),
        row(r"Find \(\left. \frac{1}{3} + x\).", "2"),
        row(r"Find $\frac{1}{2} + x$.", "$3$"),
    ]
    found = outcomes(ExactDuplicates(), rows)
    assert [isinstance(o, Dropped) for o in found] == [False, True, False, True]
    assert found[1] == Dropped("duplicate", "of first, which has '1'")
    assert found[3].reason == "duplicate with another reference"


def test_signs_count():
    assert words("x + 1") != words("x - 1") and words("a_1") != words("a_2")


@pytest.mark.parametrize(
    ("other", "near"),
    [
        (LONG.replace("A rectangular garden is", "A rectangular lawn is"), True),
        (LONG + " Give a number.", True),
        (LONG.replace("12", "13"), False),  # another problem
        ("A path goes around a garden of 12 by 7 metres; it is 1 metre wide. How large is it?", False),
    ],
)
def test_near_ones_share_words_and_all_numbers(other, near):
    kept, found = outcomes(NearDuplicates(), [row(LONG, origin="first"), row(other)])
    assert not isinstance(kept, Dropped) and isinstance(found, Dropped) is near
    assert not near or (found.reason == "near duplicate" and "of first" in found.detail)


def test_all_near_ones_among_many_are_found():
    """Estimated and checked: 100 changed copies in 600 texts, and nothing else."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(400)]
    rows = [row(" ".join(draw.choices(vocabulary, k=60)), origin=str(i)) for i in range(500)]
    for original in rows[:100]:
        changed = original["prompt"].split()
        changed[draw.randrange(60)] = "another"
        rows.append(row(" ".join(changed)))
    found = outcomes(NearDuplicates(threshold=0.8), rows)
    assert [isinstance(o, Dropped) for o in found] == [False] * 500 + [True] * 100


def test_overlap_with_evaluation_sets(tmp_path):
    (tmp_path / "eval.jsonl").write_text(json.dumps({"problem": LONG, "answer": 42}) + "\n")
    step = Overlap([EvaluationFile(str(tmp_path / "eval.jsonl"), "beyond_aime")])
    step.check()
    assert list(step.files()) == [tmp_path / "eval.jsonl"]
    same, other = outcomes(step, [row("Please solve this. " + LONG), row("How many primes are below 20?")])
    assert same.reason == "in an evaluation set" and "eval.jsonl:1" in same.detail
    assert not isinstance(other, Dropped)
    with pytest.raises(UserError, match="overlap.sets: none given"):
        Overlap().check()
