"""What a language model is asked about two answers, and how its reply is read."""

import hashlib
import json
import re
from pathlib import Path
from typing import Optional

from ulorl_megatron.errors import UserError

PACKAGED = Path(__file__).parent / "prompts" / "equivalence.txt"

_FIELDS = re.compile(r"\{(question|reference|answer|mark)\}")
_NEEDED = ("reference", "answer")
_REWARDS = {"equivalent": 1.0, "different": 0.0}


class Template:
    """A file in which {question}, {reference} and {answer} stand for the texts, and {mark} for what delimits them.

    Raises UserError if there is no such file or it leaves out {reference} or {answer}.
    """

    def __init__(self, path: Path):
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"verifier.judge.template: {path} cannot be read: {error}") from error
        fields = set(_FIELDS.findall(self._text))
        missing = [f"{{{name}}}" for name in _NEEDED if name not in fields]
        if missing:
            raise UserError(f"verifier.judge.template: {path} does not say where {' and '.join(missing)} goes")

    def fill(self, *, question: str, reference: str, answer: str) -> str:
        """The prompt. Every text stands between two lines with a mark that is in none of them: what an answer says
        cannot end its own place, and a text that names another field stays as it is."""
        texts = {"question": question, "reference": reference, "answer": answer}
        mark = _mark(texts)
        blocks = {name: f"[begin {mark}]\n{text}\n[end {mark}]" for name, text in texts.items()}
        return _FIELDS.sub(lambda field: (blocks | {"mark": mark})[field.group(1)], self._text)


def _mark(texts: dict) -> str:
    """A hash of the texts, so that the same question is asked in the same words, and none of them can hold it."""
    content = json.dumps(texts)
    while (mark := hashlib.sha256(content.encode()).hexdigest()[:16]) in content:
        content += mark
    return mark


def parse_reply(reply: str) -> Optional[float]:
    """1.0 or 0.0 as the last line of a judge's reply says, {"verdict": "equivalent" | "different"}; else None.

    Only that line counts, so a reply may quote what it judges. Thinking up to </think> is no part of the reply.
    """
    lines = reply.rpartition("</think>")[2].replace("```", "").strip().splitlines()
    try:
        verdict = json.loads(lines[-1])
        return _REWARDS.get(verdict["verdict"])
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        return None
