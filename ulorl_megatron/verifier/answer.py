"""Finding the final answer in a response."""

import re
from typing import List, Optional, Tuple

# An opening of \boxed, an escaped character (\{ is no brace), a brace.
_BRACES = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[ \t#*]*(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?[ \t]*(?:\*\*)?[ \t]*:\s*(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
# Up to the end of the sentence; the point of 0.5 does not end one.
_ANSWER_SENTENCE = re.compile(r"\banswer[ \t]+is\b[ \t]*:?\s*(.*?)(?:[.!?]?$|[.!?]\s)", re.IGNORECASE | re.MULTILINE)
_DELIMITERS = re.compile(r"\$\$|\$|\\.", re.DOTALL)
_FORMULA_ENDS = {"$$": "$$", "$": "$", r"\(": r"\)", r"\[": r"\]"}
_END_OF_THINKING = "</think>"
THINKING = "<think>"
# What is longer is no short answer but an argument, or a flood that keeps a judge busy.
_MAX_LENGTH = 1000


def extract_answer(response: str) -> Optional[str]:
    """The final answer that `response` gives, without dollar signs; None if it gives none.

    It is the last complete \\boxed{...}; without one, what the last "Answer: ..." line or "the answer is ..."
    sentence says; without those, the last formula ($...$, \\(...\\), \\[...\\]). An empty last box, or more than
    1000 characters, is no answer. Only what follows the last </think> is looked at; where thinking began and never
    ended there is nothing to look at. Linear in the length of the response, whatever its braces.
    """
    text = _without_thinking(response)
    found = _last_boxed(text)
    if found is None:
        found = _last_stated(text)
    if found is None:
        found = _last_formula(text)
    answer = found.replace("**", "").strip().strip("$").strip() if found else ""
    return answer if 0 < len(answer) <= _MAX_LENGTH else None


def reference_answer(answer: str) -> str:
    """The short answer in a reference: in its last \\boxed{...} or behind "Answer:", else all of it."""
    return (_last_boxed(answer) or _last_stated(answer) or answer).strip().strip("$").strip()


def _without_thinking(response: str) -> str:
    _, ended, behind = response.rpartition(_END_OF_THINKING)
    if not ended and THINKING in response:
        return ""
    return behind


def _last_boxed(text: str) -> Optional[str]:
    last: Optional[Tuple[int, int]] = None
    opened: List[Tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        if match.group() == "}":
            if opened:
                is_box, start = opened.pop()
                if is_box and (last is None or start > last[0]):
                    last = start, match.start()
        elif match.group()[-1] == "{" and match.group() != "\\{":
            opened.append((match.group() != "{", match.end()))
    return text[last[0] : last[1]] if last else None


def _last_stated(text: str) -> Optional[str]:
    """Of the last place that says "Answer:" or "the answer is"."""
    stated = [*_ANSWER_LINE.finditer(text), *_ANSWER_SENTENCE.finditer(text)]
    return max(stated, key=lambda match: match.start(1)).group(1) if stated else None


def _last_formula(text: str) -> Optional[str]:
    last: Optional[str] = None
    end, start = "", 0  # what closes the open formula, and where its content begins
    for match in _DELIMITERS.finditer(text):
        if not end:
            end, start = _FORMULA_ENDS.get(match.group(), ""), match.end()
        elif match.group() == end:
            last, end = text[start : match.start()], ""
    return last
