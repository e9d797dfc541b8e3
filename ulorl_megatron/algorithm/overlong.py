"""Soft punishment of long responses (DAPO, arXiv 2503.14476, Eq. 13)."""


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """What is added to the reward of a response: 0 up to max_length - cache tokens, then linearly down to -1.

    length: response tokens, at most max_length. cache: over how many last tokens it falls, 1 to max_length.
    """
    return min(0.0, (max_length - cache - length) / cache)
