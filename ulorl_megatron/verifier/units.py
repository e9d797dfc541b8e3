"""Units of measurement: the unit at the end of an answer, and how many of another one it is."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Dict, Optional, Tuple

_BASES = {
    # dimension: {unit: how many of the first one}
    "length": {"m": 1, "meter": 1, "metre": 1, "inch": "0.0254", "inches": "0.0254", "ft": "0.3048", "foot": "0.3048",
               "feet": "0.3048", "yd": "0.9144", "yard": "0.9144", "mi": "1609.344", "mile": "1609.344"},
    "mass": {"g": 1, "gram": 1, "gramme": 1, "t": 10**6, "ton": 10**6, "tonne": 10**6, "lb": "453.59237",
             "pound": "453.59237", "oz": "28.349523125", "ounce": "28.349523125"},
    "time": {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600,
             "day": 86400, "week": 604800},
    "month": {"month": 1, "year": 12},  # of no fixed number of days
    "money": {"dollar": 1, "usd": 1, "cent": "0.01"},
    "euro": {"euro": 1, "eur": 1},
    "temperature C": {r"\circC": 1, "celsius": 1},
    "temperature F": {r"\circF": 1, "fahrenheit": 1},
    "temperature K": {"K": 1, "kelvin": 1},
    "angle": {r"\circ": 1, "degree": 1, "deg": 1},
    "current": {"A": 1, "ampere": 1, "amp": 1},
    "amount": {"mol": 1, "mole": 1},
}  # fmt: skip
_PREFIXES = {"n": "1e-9", "μ": "1e-6", "µ": "1e-6", "m": "1e-3", "c": "1e-2", "d": "1e-1", "k": 1000, "M": 10**6,
             "G": 10**9}  # fmt: skip
_LONG_PREFIXES = {"nano": "1e-9", "micro": "1e-6", "milli": "1e-3", "centi": "1e-2", "deci": "1e-1", "kilo": 1000,
                  "mega": 10**6}  # fmt: skip
_PREFIXED = ("m", "g", "s", "A", "L", "l", "J", "W", "N", "Hz", "V", "Pa", "mol", "C")
_LONG_PREFIXED = ("meter", "metre", "gram", "gramme", "second", "liter", "litre", "joule", "watt", "newton", "hertz",
                  "volt", "pascal")  # fmt: skip
_FORCE = {"mass": 1, "length": 1, "time": -2}
_ENERGY = {"mass": 1, "length": 2, "time": -2}
_POWER = {"mass": 1, "length": 2, "time": -3}
_DERIVED = {
    ("L", "l", "liter", "litre"): ("0.001", {"length": 3}),
    ("cc",): ("1e-6", {"length": 3}),
    ("ha", "hectare"): (10**4, {"length": 2}),
    ("mph",): ("0.44704", {"length": 1, "time": -1}),
    ("kph", "kmph"): (Fraction(1000, 3600), {"length": 1, "time": -1}),
    ("Hz", "hertz"): (1, {"time": -1}),
    ("N", "newton"): (1000, _FORCE),
    ("J", "joule"): (1000, _ENERGY),
    ("W", "watt"): (1000, _POWER),
    ("Pa", "pascal"): (1000, {"mass": 1, "length": -1, "time": -2}),
    ("V", "volt"): (1000, _POWER | {"current": -1}),
    ("C", "coulomb"): (1, {"current": 1, "time": 1}),
}
_ATOM = re.compile(r"(\\circ ?[CF]?|[A-Za-zμµ]+)(?:\^?\{?(-?\d)\}?)?")
_START = re.compile(r"(?<![A-Za-z\\μµ^])(?:[A-Za-zμµ]|\^ ?\{? ?\\circ)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")


@dataclass(frozen=True)
class Unit:
    """factor: how many of its dimension's base unit it is. dimension: base dimension -> exponent."""

    factor: Fraction
    dimension: Tuple[Tuple[str, int], ...]


@dataclass(frozen=True)
class Quantity:
    """value: what stands before the unit. unit: None if there is none, or none that is known; words: then the words
    behind the value ("apples"), if any. glued: the unit is one letter right behind the value, as a variable may be."""

    value: str
    unit: Optional[Unit] = None
    words: str = ""
    glued: bool = False


def quantity(text: str) -> Quantity:
    """Splits an answer into value and unit."""
    for match in _START.finditer(text):
        value, rest = text[: match.start()].strip(), text[match.start() :]
        if not re.search(r"\d|\\[a-z]+", value):
            continue
        unit = _unit(rest)
        if unit is not None:
            glued = len(rest) == 1 and not text[match.start() - 1].isspace()
            return Quantity(value, unit, glued=glued)
        if _WORDS.fullmatch(rest) and not re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", value)):
            return Quantity(value, words=" ".join(word.removesuffix("s") for word in rest.lower().split()))
    return Quantity(text)


def _unit(text: str) -> Optional[Unit]:
    """`text` as a product of known units ("km/h", "m s^{-2}", "square feet"), or None."""
    text = re.sub(r"\^ ?\{? ?\\circ ?\}?", r"\\circ", text).replace("per ", "/").strip(" .{}")
    text = re.sub(r"\\cdot|\*", " ", text)
    factor, dimension, sign, power = Fraction(1), Counter(), 1, 1
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        if text[position] == "/":
            sign, position = -1, position + 1
            continue
        match = _ATOM.match(text, position)
        if match is None:
            return None
        name, exponent = match.group(1).replace(" ", ""), match.group(2)
        position = match.end()
        if name in ("square", "sq", "cubic", "cu"):
            power = 2 if name.startswith("s") else 3
            continue
        if name not in _UNITS:
            name = name if len(name) < 3 else name.lower()  # M is not m
            name = name if name in _UNITS else name.removesuffix("s")
        if name not in _UNITS:
            return None
        n = sign * (int(exponent) if exponent else power)
        one, of = _UNITS[name]
        factor *= one**n
        dimension.update({base: n * times for base, times in of.items()})
        power = 1
    return Unit(factor, tuple(sorted((base, n) for base, n in dimension.items() if n))) if dimension else None


def _table() -> Dict[str, Tuple[Fraction, Dict[str, int]]]:
    units = {
        name: (Fraction(size), {dimension: 1}) for dimension, of in _BASES.items() for name, size in of.items()
    }
    for names, (size, dimension) in _DERIVED.items():
        units |= {name: (Fraction(size), dimension) for name in names}
    for prefixes, names in ((_PREFIXES, _PREFIXED), (_LONG_PREFIXES, _LONG_PREFIXED)):
        for prefix, size in prefixes.items():
            for name in names:
                one, dimension = units[name]
                units.setdefault(prefix + name, (one * Fraction(size), dimension))
    return units


_UNITS = _table()
