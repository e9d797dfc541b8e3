"""Precision and recall on pairs.jsonl: answers that mean the same as their reference, or do not, of every kind."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.verifier.scripted_judge import DIFFERENT, EQUIVALENT, UNKNOWN, ScriptedJudge
from ulorl_megatron.cli import main
from ulorl_megatron.verifier import GenerativeVerifier, HybridVerifier, RuleVerifier
from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.bench import FAILED, RIGHT, WRONG, Pair, disagreements, judge_pairs, read_pairs, score
from ulorl_megatron.verifier.bench import UNKNOWN as NO_VERDICT

FILE = Path(__file__).with_name("pairs.jsonl")


def judge_by_labels(pairs):
    """Replies as the labels say, to one that keeps to the marks; in no other case."""
    table = {(p.question, p.reference, extract_answer(p.response)): p.label for p in pairs}
    return lambda *texts: (EQUIVALENT if table[texts] else DIFFERENT) if texts in table else UNKNOWN


@pytest.fixture(scope="module")
def measured():
    """(pairs, verdicts of each verifier)."""
    pairs = read_pairs(FILE)

    async def run():
        async with ScriptedJudge(judge_by_labels(pairs)).serve() as config:
            rule = RuleVerifier(workers=1, timeout_s=60.0, retries=1)
            hybrid = HybridVerifier(rule, GenerativeVerifier(config))
            try:
                return {"rule": await judge_pairs(pairs, rule), "hybrid": await judge_pairs(pairs, hybrid)}
            finally:
                await hybrid.close()

    return pairs, asyncio.run(run())


def test_the_pairs_cover_what_they_should():
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert len(rows) >= 200 and len({row["kind"] for row in rows}) >= 15
    assert 0.4 <= sum(row["label"] for row in rows) / len(rows) <= 0.6
    right = {(extract_answer(row["response"]), row["reference"]) for row in rows if row["label"]}
    assert {("0.27m", "27cm"), ("one half", "1/2")} <= right  # the paper's own


def test_rule(measured):
    pairs, verdicts = measured
    s = score(pairs, verdicts["rule"])
    assert s.precision >= 0.97 and s.recall >= 0.9 and s.unknown == s.failed == 0, s


def test_hybrid_with_a_judge_that_knows(measured):
    pairs, verdicts = measured
    s = score(pairs, verdicts["hybrid"])
    assert s.precision >= 0.99 and s.recall >= 0.99 and s.unknown == s.failed == 0, s


def test_counting():
    pairs = [Pair("?", "", "", label) for label in (True, True, True, False, False)]
    ours, theirs = [RIGHT, WRONG, NO_VERDICT, RIGHT, FAILED], [RIGHT, RIGHT, WRONG, WRONG, WRONG]
    s = score(pairs, ours)
    assert (s.precision, s.recall, s.unknown, s.failed) == (1 / 2, 1 / 3, 1, 1)
    assert score(pairs[3:], [WRONG, WRONG]).precision is None
    counts = disagreements(pairs, {"ours": ours, "theirs": theirs})
    assert counts["ours"]["theirs"] == 1 and counts["theirs"]["ours"] == 1
    assert counts["label"]["ours"] == 2 and counts["ours"]["label"] == 1 and counts["theirs"]["label"] == 0


def test_command(tmp_path, capsys):
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    rows = [("27 cm", "27", 1), ("26", "27", 0), ("one more than 26", "27", True)]
    file.write_text(
        "".join(json.dumps({"question": "?", "answer": a, "reference": r, "label": y}) + "\n" for a, r, y in rows)
    )
    config = tmp_path / "config.yaml"
    config.write_text("run: {dir: runs/x}\nmodel: {path: m}\ndata: {train: t.jsonl}\n")
    command = ["data", "verify-bench", str(file), "--config", str(config), "verifier.workers=1", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "3 pairs, 2 of them right" in printed and "0.5000" in printed
    assert [json.loads(line)["rule"] for line in out.read_text().splitlines()] == [RIGHT, WRONG, WRONG]
    file.write_text('{"question": "?", "answer": "1", "reference": "1", "label": "yes"}\n')
    assert main(command) == 2
    assert "pairs.jsonl:1: label is 'yes'" in capsys.readouterr().err
