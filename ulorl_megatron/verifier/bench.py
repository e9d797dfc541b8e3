"""`ulorl data verify-bench`: how far verifiers agree with labelled pairs, and with each other."""

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from checkpoint_tools.publish import write_atomically
from ulorl_megatron.config import load
from ulorl_megatron.config.schema import VerifierConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier.generative import GenerativeVerifier
from ulorl_megatron.verifier.hybrid import HybridVerifier
from ulorl_megatron.verifier.interface import UnknownVerdict, Verifier, VerifierFailed
from ulorl_megatron.verifier.rule import RuleVerifier

DESCRIPTION = (
    "Judges every pair of FILE and prints precision and recall of each verifier and the pairs on which two of them "
    "differ. FILE is JSONL: question, reference, label (1 right, 0 wrong), and either response (the whole text) or "
    "answer (extracted already). The rule is always measured; with a configuration that names verifier.judge.url the "
    "generative and the hybrid verifier are too."
)
RIGHT, WRONG, UNKNOWN, FAILED = "right", "wrong", "unknown", "failed"
LABEL = "label"


@dataclass(frozen=True)
class Pair:
    """label: whether `response` is right."""

    question: str
    response: str
    reference: str
    label: bool


@dataclass(frozen=True)
class Score:
    """Of one verifier. precision: share of what it calls right that is. recall: share of what is right that it calls
    so; None if there is nothing to take a share of. unknown, failed: pairs without a verdict, which are no rewards
    and count against recall."""

    precision: Optional[float]
    recall: Optional[float]
    unknown: int
    failed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("file", metavar="FILE.jsonl")
    parser.add_argument("--config", metavar="CONFIG.yaml", help="its verifier section is measured; default: the rule's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each pair with all verdicts, as JSONL")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings on top of --config")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError for a file or a configuration that does not do, and for a judge that does not answer."""
    if arguments.overrides and not arguments.config:
        raise UserError(f"{arguments.overrides[0]} is a setting on top of --config, which is not given")
    config = load(arguments.config, arguments.overrides).verifier if arguments.config else VerifierConfig()
    pairs = read_pairs(Path(arguments.file))
    verdicts = asyncio.run(_judge_all(pairs, config))
    if arguments.out:
        lines = [
            json.dumps(vars(pair) | {name: of[i] for name, of in verdicts.items()}, ensure_ascii=False) + "\n"
            for i, pair in enumerate(pairs)
        ]
        write_atomically(arguments.out, "".join(lines).encode())
    _print(pairs, verdicts)
    return 0


def read_pairs(path: Path) -> List[Pair]:
    """Raises UserError naming the line of what is no pair."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    pairs = [_pair(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not pairs:
        raise UserError(f"{path} holds no pairs")
    return pairs


def _pair(line: str, where: str) -> Pair:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    given = row.get("response", row.get("answer")) if isinstance(row, dict) else None
    if given is None or not all(isinstance(text, str) for text in (given, row.get("question"), row.get("reference"))):
        raise UserError(f"{where}: needs question, reference, and response or answer, as strings")
    if row.get("label") not in (0, 1):
        raise UserError(f"{where}: label is {row.get('label')!r}, not 1 (right) or 0 (wrong)")
    response = given if "response" in row else rf"\boxed{{{given}}}"
    return Pair(row["question"], response, row["reference"], bool(row["label"]))


async def _judge_all(pairs: List[Pair], config: VerifierConfig) -> Dict[str, List[str]]:
    rule = RuleVerifier(workers=config.workers, timeout_s=config.timeout_s, retries=config.retries)
    verifiers: Dict[str, Verifier] = {"rule": rule}
    try:
        if config.judge.url is not None:
            model = GenerativeVerifier(config.judge)
            verifiers |= {"generative": model, "hybrid": HybridVerifier(rule, model)}
        return {name: await judge_pairs(pairs, verifier) for name, verifier in verifiers.items()}
    finally:
        await list(verifiers.values())[-1].close()  # the hybrid owns the other two


async def judge_pairs(pairs: List[Pair], verifier: Verifier) -> List[str]:
    """RIGHT, WRONG, UNKNOWN or FAILED for each pair."""

    async def judge(pair: Pair) -> str:
        try:
            verdict = await verifier.verify(question=pair.question, response=pair.response, answer=pair.reference)
        except UnknownVerdict:
            return UNKNOWN
        except VerifierFailed:
            return FAILED
        return RIGHT if verdict.reward == 1.0 else WRONG

    return list(await asyncio.gather(*map(judge, pairs)))


def score(pairs: List[Pair], verdicts: List[str]) -> Score:
    hits = sum(pair.label and verdict == RIGHT for pair, verdict in zip(pairs, verdicts, strict=True))
    return Score(
        precision=_share(hits, verdicts.count(RIGHT)),
        recall=_share(hits, sum(pair.label for pair in pairs)),
        unknown=verdicts.count(UNKNOWN),
        failed=verdicts.count(FAILED),
    )


def disagreements(pairs: List[Pair], verdicts: Dict[str, List[str]]) -> Dict[str, Dict[str, int]]:
    """[a][b]: pairs that a calls right and b does not. The labels are one of them."""
    everyone = {LABEL: [RIGHT if pair.label else WRONG for pair in pairs], **verdicts}
    return {
        a: {b: sum(x == RIGHT != y for x, y in zip(ours, theirs, strict=True)) for b, theirs in everyone.items()}
        for a, ours in everyone.items()
    }


def _share(part: int, whole: int) -> Optional[float]:
    return part / whole if whole else None


def _print(pairs: List[Pair], verdicts: Dict[str, List[str]]) -> None:
    console = Console()
    right = sum(pair.label for pair in pairs)
    scores = _table(f"{len(pairs)} pairs, {right} of them right", "verifier", "precision", "recall", UNKNOWN, FAILED)
    for name, of in verdicts.items():
        s = score(pairs, of)
        scores.add_row(name, _text(s.precision), _text(s.recall), f"{s.unknown}", f"{s.failed}")
    console.print(scores)
    counts = disagreements(pairs, verdicts)
    matrix = _table("called right by the row and not by the column", "", *counts)
    for name, row in counts.items():
        matrix.add_row(name, *(str(row[other]) if other != name else "" for other in counts))
    console.print(matrix)


def _table(title: str, *columns: Any) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _text(share: Optional[float]) -> str:
    return "-" if share is None else f"{share:.4f}"
