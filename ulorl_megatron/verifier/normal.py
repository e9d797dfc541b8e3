"""One spelling for what people and models write in many: LaTeX dressing, Unicode, numbers in words, texts."""

import re
import unicodedata
from fractions import Fraction
from typing import List, Optional, Tuple

_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∅": r"\emptyset ", "°": r"^\circ ", "％": "%", "√": r"\sqrt", "²": "^2", "³": "^3",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "’": "'", "€": "", "£": "",
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)
_DRESSING = [
    (re.compile(r"\\(?:left|right|displaystyle|big|Big)(?![A-Za-z])"), ""),
    (re.compile(r"\\[,;:! ]|\\quad|\\qquad|~"), " "),
    (re.compile(r"\\[()\[\]]|\$|\\\$|`|\*\*"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\{,\}"), ""),
    (re.compile(r"(?<![\\A-Za-z])(sqrt|pi|ln|log|sin|cos|tan|infinity)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\infinity"), r"\\infty"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\d/.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)\b"), r"\\times 10^{\1}"),
    (re.compile(r"\s+(?=\^)"), ""),
    (re.compile(r"\\(sin|cos|tan)\s*\(?(\d+)\)?\^\{?\\circ\}?"), r"\\\1(\\frac{\2\\pi}{180})"),
    (re.compile(r"\\overline\{([A-Z]+)\}"), r"\1"),
    (re.compile(r"\s+"), " "),
]
# After number words have become digits.
_LATE_DRESSING = [
    (re.compile(r"(?<!\\)%|(?<=[\d}]) percent\b"), r"\\%"),
    (re.compile(r" (?:and|or) (?=[-\\\d(a-z]\S*$|[A-Z]$)"), ", "),
    (re.compile(r"(?<=\d) (?=\d{3}(?: \d{3})*$)"), ""),
]

_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")

_ONES = [
    *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    *["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"],
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_CARDINALS = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = {
    **{"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100, "thousandth": 1000},
}
_SAME_WORDS = {"true": "yes", "correct": "yes", "false": "no", "incorrect": "no"}
_ARTICLES = ("the", "a", "an", "option", "choice", "answer")


def undressed(text: str) -> str:
    """`text` without what changes no meaning: dollar signs, \\left, \\text, spacing, a last point."""
    text = text.translate(_TRANSLATION)
    for pattern, replacement in _DRESSING:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_fraction, numerals(text.strip().rstrip(".,;").strip()))
    for pattern, replacement in _LATE_DRESSING:
        text = pattern.sub(replacement, text)
    return text


def numerals(text: str) -> str:
    """Number words at the beginning as digits: "one half" is \\frac{1}{2}, "twenty-one cm" is 21 cm."""
    words = text.lower().replace("-", " ").split()
    sign = bool(words) and words[0] in ("minus", "negative")
    value, used = _number(words[sign:])
    if not used:
        return text
    # What follows keeps its own spelling; a hyphen is as much between two words as a space.
    rest = re.split(r"[\s-]+", text.strip(), maxsplit=sign + used)[sign + used :]
    number = str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return " ".join(["-" * sign + number, *rest])


def text_key(text: str) -> str:
    """What two texts must share to be the same: words without case, accents, punctuation, articles, plural; the order
    of what "and" or commas join does not count."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    parts = [_words(part) for part in re.split(r",|\band\b", plain)]
    return ", ".join(sorted(filter(None, parts)))


def _words(plain: str) -> str:
    words = re.findall(r"\w+", plain.replace("'", ""))
    while len(words) > 1 and words[0] in _ARTICLES:
        words = words[1:]
    words = [word.removesuffix("s") if len(word) > 3 else word for word in words]
    return " ".join(_SAME_WORDS.get(word, word) for word in words)


def _fraction(decimal: re.Match) -> str:
    """0.1\\overline{6} as 15/90."""
    whole, fixed, repeating = decimal.groups()
    numerator = int(whole + fixed + repeating) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(repeating)}{'0' * len(fixed)}}}"


def _number(words: List[str]) -> Tuple[Fraction, int]:
    """The number that `words` begin with, and how many of them it takes; 0 of them if none."""
    if words[:1] == ["half"]:
        return Fraction(1, 2), 1 + (words[1:2] in (["a"], ["of"]))
    whole, used = _cardinal(words)
    part, more = _part(words[used:], whole if used else None)
    if part is not None:  # "three quarters", "a third"
        return part, used + more
    if used and words[used : used + 1] == ["and"]:  # "three and a half"
        numerator, took = _cardinal(words[used + 1 :])
        part, more = _part(words[used + 1 + took :], numerator if took else None)
        if part is not None:
            return whole + part, used + 1 + took + more
    if used and words[used : used + 1] == ["point"]:
        digits = [_CARDINALS.get(word, 10) for word in words[used + 1 :]]
        decimals = next((i for i, digit in enumerate(digits) if digit > 9), len(digits))
        if decimals:
            fraction = Fraction(int("".join(map(str, digits[:decimals]))), 10**decimals)
            return whole + fraction, used + 1 + decimals
    return Fraction(whole), used


def _cardinal(words: List[str]) -> Tuple[int, int]:
    total = current = used = 0
    for i, word in enumerate(words):
        if word in _CARDINALS:
            current += _CARDINALS[word]
        elif word == "hundred" and used:
            current *= 100
        elif word in _SCALES and used:
            total, current = total + current * _SCALES[word], 0
        elif word == "and" and used and words[i - 1] in _SCALES and words[i + 1 : i + 2] and words[i + 1] in _CARDINALS:
            continue
        else:
            break
        used = i + 1
    return total + current, used


def _part(words: List[str], numerator: Optional[int]) -> Tuple[Optional[Fraction], int]:
    """The fraction that begins with its denominator ("quarters", after `numerator`) or with "a"."""
    article = numerator is None and words[:1] == ["a"]
    name = words[article] if len(words) > article else ""
    denominator = _PARTS.get(name) or _PARTS.get(name.removesuffix("s"))
    if denominator is None or (numerator is None and not article):
        return None, 0
    return Fraction(1 if numerator is None else numerator, denominator), 1 + article
