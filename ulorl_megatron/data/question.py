"""What kind of question a text asks: several at once, a choice, a proof, true or false. By rules, in linear time."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import List, Optional, Tuple

_ASKS = re.compile(
    r"\?|\b(?:find|determine|prove|show|compute|calculate|evaluate|what|how|express|solve|deduce|verify|sketch|state|explain"
    r"|simplify|factori[sz]e)\b",
    re.IGNORECASE,
)
_WANTS = (
    r"\b(?:find|determine|compute|calculate|evaluate|what|how (?:many|much|long|far|old)|express|solve|simplify)\b"
)
_WANTS_A_VALUE = re.compile(_WANTS, re.IGNORECASE)
_ASKS_A_VALUE = re.compile(rf"\?|{_WANTS}", re.IGNORECASE)
_PROOF = re.compile(
    r"(?:^|[.!?;:,$\n]|\b(?:and|then|to|also|please))\s*(?:prove|disprove|demonstrate|show|verify)\b(?!\s+your\s+work)",
    re.IGNORECASE,
)
_TRUE_OR_FALSE = re.compile(r"\btrue or false\b|\byes or no\b", re.IGNORECASE)
_YES_OR_NO = re.compile(
    r"(?:^|[.!?:;\n])[ \t]*(?:is|are|does|do|can|could|must|will|has|have)\b[^.?!]{0,300}\?", re.IGNORECASE
)
_OPTIONS_MISSING = re.compile(
    r"\bwhich (?:one |ones )?of the following\b[^:]*$|\bthe correct (?:option|choice)\b", re.IGNORECASE
)
_ABBREVIATED = re.compile(r"\.\s*[A-Za-z]+\.$")
_DRAWING = ("[asy]", "[/asy]")
_TRUTH_VALUES = {"true", "false", "yes", "no", "correct", "incorrect"}

# One pattern a family of marks of sub-questions. A number with a point or one bracket counts at a line's start only.
_PARTS = [
    (re.compile(r"(?:^|(?<=\s))\(?([a-h])\)(?=\s)"), list("abcdefgh")),
    (re.compile(r"(?:^|(?<=[\s;.?]))\((i|ii|iii|iv|v|vi)\)(?=\s)"), ["i", "ii", "iii", "iv", "v", "vi"]),
    (re.compile(r"(?:^|(?<=[\s;.?]))\(([1-9])\)(?=\s)"), list("123456789")),
    (re.compile(r"^[ \t]*([1-9])[.)](?=\s)", re.MULTILINE), list("123456789")),
    (re.compile(r"\b(?:part|question)\s+([a-d])\b", re.IGNORECASE), list("abcd")),
    (re.compile(r"\b(?:part|question)\s+([1-9])\b", re.IGNORECASE), list("123456789")),
]
_LETTERS = list("ABCDEFGH")
_STYLED = re.compile(r"\\(?:textbf|text|mathrm|mathbf|textrm)\s*\{\s*\(?([A-H])\)?[.:]?\s*\}")
_SPACES = re.compile(r"\\(?:qquad|quad|hfill|hspace\{[^{}]*\}|[ ;,!])")
# (A) but not P(A); A) with a blank on both sides; A. or A: at a line's start.
_OPTION = re.compile(
    r"(?<![\w})])\(([A-H])\)|(?:^|(?<=\s))([A-H])\)(?=\s)|^[ \t]*([A-H])[.:](?=\s)", re.MULTILINE
)
_LETTER = re.compile(r"\(?([A-H])\)?[.:]?(?:\s.*)?", re.DOTALL)
# Words of a stem that lean on the options, and options that lean on one another.
_LEANS = re.compile(
    r"\b(?:following|these|those|below|above|options?|choices?|statements?|which|closest|nearest|best|could|can|cannot|except"
    r"|not|possible|approximately|about|must)\b",
    re.IGNORECASE,
)
_OF_OTHERS = re.compile(
    r"\b(?:none|all|both|neither|either|cannot|not enough|impossible|more than one)\b", re.IGNORECASE
)


class Form(Enum):
    """A question with a short answer of its own is `short`; the others reward guessing, or cannot be judged."""

    short = "short answer"
    choice = "multiple choice"
    proof = "proof"
    truth = "true or false"


@dataclass(frozen=True)
class Choices:
    """stem: what stands before the options. options: letter and text of each."""

    stem: str
    options: List[Tuple[str, str]]

    def text(self, letter: str) -> Optional[str]:
        return dict(self.options).get(letter)


def form(question: str, answer: str) -> Form:
    """What a question with this reference is. A proof or a yes-or-no question that also asks for a value is short.

    One of options that are not there ("which of the following") counts as multiple choice.
    """
    question = _without_drawings(question)
    if choices(question) is not None or _OPTIONS_MISSING.search(question):
        return Form.choice
    if bare(answer).lower() in _TRUTH_VALUES or _TRUE_OR_FALSE.search(question):
        return Form.truth
    has_a_value = _WANTS_A_VALUE.search(question) or any(character.isdigit() for character in answer)
    if _YES_OR_NO.search(question) and not has_a_value:
        return Form.truth
    if _PROOF.search(question) and not _ASKS_A_VALUE.search(question):
        return Form.proof
    return Form.short


def sub_questions(question: str) -> int:
    """How many marked parts, of (a) (b), (i) (ii), 1. 2. and the like, ask something; 0 if only one does.

    Marked conditions, options and equations ask nothing, so they do not count.
    """
    question = _without_drawings(question)
    for pattern, labels in _PARTS:
        marks = _consecutive(((m[1].lower(), m.start(), m.end()) for m in pattern.finditer(question)), labels)
        if len(marks) < 2:
            continue
        ends = [start for _, start, _ in marks[1:]] + [len(question)]
        asking = sum(bool(_ASKS.search(question[mark[2] : end])) for mark, end in zip(marks, ends, strict=True))
        if asking >= 2:
            return asking
    return 0


def choices(question: str) -> Optional[Choices]:
    """The options (A), (B), (C) and so on of a multiple-choice question, three at least; None for another question."""
    plain = _SPACES.sub(" ", _STYLED.sub(r"(\1)", question))
    found = ((next(filter(None, m.groups())), m.start(), m.end()) for m in _OPTION.finditer(plain))
    marks = _consecutive(found, _LETTERS)
    if len(marks) < 3:
        return None
    ends = [start for _, start, _ in marks[1:]] + [len(plain)]
    options = [(letter, bare(plain[end:until])) for (letter, _, end), until in zip(marks, ends, strict=True)]
    return Choices(plain[: marks[0][1]].strip().rstrip("$").strip(), options)


def open_form(question: Choices, answer: str) -> Optional[Tuple[str, str]]:
    """(question, answer) without the options where the stem is a question by itself; None where that is not sure."""
    letter = _LETTER.fullmatch(bare(answer))
    text = question.text(letter[1]) if letter else bare(answer)
    if not text or _OF_OTHERS.search(text) or _LEANS.search(question.stem) or not _ASKS_A_VALUE.search(question.stem):
        return None
    if not letter and text not in (option for _, option in question.options):
        return None  # a reference that is none of the options is not to be trusted
    return question.stem, text


def bare(text: str) -> str:
    """Without what only sets it: dollars, \\text{...} around the whole, blanks, a final point (not that of p.m.)."""
    text = text.strip().strip("$").strip()
    whole = re.fullmatch(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", text)
    if whole:
        text = whole[1].strip()
    if not _ABBREVIATED.search(text):
        text = text.removesuffix(".")
    return text.removesuffix(",").strip().strip("$").strip()


def _without_drawings(question: str) -> str:
    """Without the code of Asymptote's drawings, whose points and labels look like options."""
    opening, closing = _DRAWING
    before, opened, rest = question.partition(opening)
    kept = [before]
    while opened:
        _, closed, behind = rest.partition(closing)
        if not closed:
            return "".join([*kept, opened, rest])
        text, opened, rest = behind.partition(opening)
        kept.append(text)
    return "".join(kept)


def _consecutive(marks, labels: List[str]) -> List[Tuple[str, int, int]]:
    """The marks (label, start, end) that count up from the first label, each the first of its kind in order."""
    kept: List[Tuple[str, int, int]] = []
    for mark in marks:
        if len(kept) < len(labels) and mark[0] == labels[len(kept)]:
            kept.append(mark)
    return kept
