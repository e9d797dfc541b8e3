"""The errors of this package that a person can mend."""


class CheckpointError(Exception):
    """A checkpoint that cannot be read, written or converted.

    The message is one paragraph: what is wrong, where (file, key), what to do. Programming errors are never
    wrapped in it.
    """


class ArchitectureError(CheckpointError):
    """A config.json that describes a model outside the families of `families.py`, or contradicts itself."""
