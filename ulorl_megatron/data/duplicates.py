"""Steps that compare questions with each other and with those of evaluation sets."""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np
import xxhash
from datasketch import MinHash, MinHashLSH
from omegaconf import MISSING

from ulorl_megatron.data.files import row_files
from ulorl_megatron.data.layouts import LAYOUTS, read_layout
from ulorl_megatron.data.question import bare
from ulorl_megatron.data.step import Dropped, Outcome, Row, Step, Workspace, text_of
from ulorl_megatron.errors import UserError

_SETTING = re.compile(r"\\(?:displaystyle|textstyle|left|right|limits|quad|qquad|[ ;,!])|[$~]")
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s]")
_PERMUTATIONS = 128
_RUN = 3  # words in a row
# MinHash only estimates, so candidates are looked for this far below the threshold; the exact value decides.
_MARGIN = 0.15


def words(text: str) -> List[str]:
    """Words, numbers and signs of a question, without what only sets it: blanks, case, dollars, \\left and the like."""
    text = unicodedata.normalize("NFKC", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _WORDS.findall(_SETTING.sub(" ", text).lower())


@dataclass(frozen=True)
class _Sketch:
    """origin, answer: of the row. numbers: that its question holds. runs: hashes of its runs of words, sorted."""

    origin: str
    answer: str
    numbers: Counter
    runs: np.ndarray

    @classmethod
    def of(cls, row: Row) -> "_Sketch":
        found = words(text_of(row))
        runs = {" ".join(found[i : i + _RUN]) for i in range(max(1, len(found) - _RUN + 1))}
        hashes = np.array(sorted({xxhash.xxh32_intdigest(run.encode()) for run in runs}), dtype=np.uint32)
        numbers = Counter(word for word in found if word[0].isdigit())
        return cls(row.get("origin", ""), bare(row["answer"]), numbers, hashes)

    @cached_property
    def minhash(self) -> MinHash:
        sketch = MinHash(_PERMUTATIONS, hashfunc=int)  # hashed already
        sketch.update_batch(self.runs)
        return sketch


class Similar:
    """Questions seen so far, and which of them another is much like.

    Two questions are alike if of their runs of three words at least the share `threshold` is common (Jaccard), and if
    they hold the same numbers: problems that differ in a number are different problems.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._index = MinHashLSH(threshold=max(threshold - _MARGIN, 0.05), num_perm=_PERMUTATIONS)
        self._seen: List[_Sketch] = []

    def find(self, row: Row, *, add: bool = False) -> Optional[Tuple[_Sketch, float]]:
        """The first one seen that is alike, and how much. add: if there is none, the row is one seen from now on."""
        sketch = _Sketch.of(row)
        for number in sorted(self._index.query(sketch.minhash)):
            other = self._seen[number]
            if other.numbers == sketch.numbers:
                share = _jaccard(sketch.runs, other.runs)
                if share >= self._threshold:
                    return other, share
        if add:
            self._index.insert(len(self._seen), sketch.minhash, check_duplication=False)
            del sketch.__dict__["minhash"]  # the index has what it needs of it
            self._seen.append(sketch)
        return None


@dataclass
class ExactDuplicates(Step):
    """Keeps the first row of each question; blanks, case and LaTeX's settings of style make no difference.

    A later one with another reference is counted apart: one of the two is wrong.
    """

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        seen: Dict[bytes, Tuple[str, str]] = {}
        for row in rows:
            key = xxhash.xxh3_128_digest("\x1f".join(words(text_of(row))).encode())
            if key in seen:
                yield row, _duplicate("duplicate", row, *seen[key])
            else:
                seen[key] = row.get("origin", ""), bare(row["answer"])
                yield row, row


@dataclass
class NearDuplicates(Step):
    """Keeps the first of rows whose questions are alike; see Similar. threshold: from which share of common runs."""

    threshold: float = 0.8

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        seen = Similar(self.threshold)
        for row in rows:
            found = seen.find(row, add=True)
            if found:
                other, share = found
                yield row, _duplicate("near duplicate", row, other.origin, other.answer, f", {share:.0%} alike")
            else:
                yield row, row


@dataclass
class EvaluationFile:
    """path: file or folder of an evaluation set. layout: see layouts."""

    path: str = MISSING
    layout: str = "rows"


@dataclass
class Overlap(Step):
    """Drops questions that are alike to one of the evaluation sets `sets`. threshold: as of NearDuplicates."""

    sets: List[EvaluationFile] = field(default_factory=list)
    threshold: float = 0.7

    def check(self) -> None:
        for item in self.sets:
            if item.layout not in LAYOUTS:
                raise UserError(f"overlap.sets: layout {item.layout!r}; take one of {', '.join(LAYOUTS)}")
        if not self.sets:
            raise UserError("overlap.sets: none given; name the evaluation files, as {path: ..., layout: ...}")

    def files(self) -> Iterable[Path]:
        return [file for item in self.sets for file in row_files(Path(item.path))]

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        held_out = Similar(self.threshold)
        for item in self.sets:
            for _, problem in read_layout(Path(item.path), item.layout):
                if not isinstance(problem, Dropped):
                    held_out.find(problem, add=True)
        for row in rows:
            found = held_out.find(row)
            yield row, Dropped("in an evaluation set", f"{found[0].origin}, {found[1]:.0%} alike") if found else row


def _duplicate(kind: str, row: Row, origin: str, answer: str, alike: str = "") -> Dropped:
    if bare(row["answer"]) != answer:
        kind += " with another reference"
    return Dropped(kind, f"of {origin}, which has {answer!r}{alike}")


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Of two sorted arrays without repetition."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)
