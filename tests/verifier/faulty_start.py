"""A judge that does not get ready."""

import sys


def warm_up() -> None:
    sys.exit(5)
