"""How long responses get: observed lengths, or a log-normal law."""

import math
from bisect import bisect_right
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import List, Protocol

from ulorl_megatron.errors import UserError


class Lengths(Protocol):
    def quantile(self, p: float) -> float:
        """The length, in tokens, that a share p in (0, 1) of the responses does not pass."""

    def share_within(self, length: float) -> float:
        """The share of the responses of at most `length` tokens."""


class LogNormal:
    """median: tokens. sigma: standard deviation of the logarithm."""

    def __init__(self, median: float, sigma: float):
        self._law = NormalDist(math.log(median), sigma)

    def quantile(self, p: float) -> float:
        return math.exp(self._law.inv_cdf(p))

    def share_within(self, length: float) -> float:
        return self._law.cdf(math.log(length)) if length > 0 else 0.0


class Observed:
    """The lengths of a sample of responses; a response cut at the limit counts as that long or longer."""

    def __init__(self, lengths: List[int]):
        self._lengths = sorted(lengths)

    @classmethod
    def read(cls, file: Path) -> "Observed":
        """One number of tokens a line. Raises UserError naming the line that is none."""
        if not file.is_file():
            raise UserError(f"{file}: no such file; give one number of tokens a line")
        lengths = []
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if line.strip():
                try:
                    lengths.append(int(line))
                except ValueError:
                    raise UserError(f"{file}, line {number}: {line[:40]!r} is not a number of tokens") from None
        if not lengths or min(lengths) < 1:
            raise UserError(f"{file}: holds no lengths of 1 token and more, one a line")
        return cls(lengths)

    def quantile(self, p: float) -> float:
        return self._lengths[min(int(p * len(self._lengths)), len(self._lengths) - 1)]

    def share_within(self, length: float) -> float:
        return bisect_right(self._lengths, length) / len(self._lengths)


def draw_length(lengths: Lengths, so_far: float, random: Random) -> float:
    """Length of a response that has `so_far` tokens and goes on: the law, given that it is longer."""
    passed = lengths.share_within(so_far)
    p = passed + (1 - passed) * random.random()
    return max(lengths.quantile(min(max(p, 1e-12), 1 - 1e-12)), so_far + 1)
