"""Finding the final answer in a response."""

import re
from typing import List, Optional, Tuple

# An opening of \boxed, an escaped character (\{ is no brace), a brace.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[ \t]*(?:\*\*)?(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?(?:\*\*)?[ \t]*:(.*)$",
    re.IGNORECASE | re.MULTILINE,
)


def extract_answer(response: str) -> Optional[str]:
    """The content of the last complete \\boxed{...}, else of the last "Answer: ..." line, else None.

    Linear in the length of the response, whatever its braces.
    """
    boxed = _last_boxed(response)
    if boxed is None:
        lines = _ANSWER_LINE.findall(response)
        boxed = lines[-1].replace("**", "") if lines else ""
    return boxed.strip().strip("$").strip() or None


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
