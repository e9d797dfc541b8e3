"""Files and directories that appear whole or not at all: temporary name, fsync, rename, fsync of the
parent."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from checkpoint_tools.errors import CheckpointError


@contextmanager
def written(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO]:
    """A file to write that gets its name once it is complete: a reader sees the old content, or all of the new
    one. mode, options: of open."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open(mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file by `written`."""
    with written(path) as stream:
        stream.write(content)


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_or_close(file: IO, refusal: Exception) -> None:
    """Lock an open file against other processes, for as long as it is open; if one has it, close it and raise
    `refusal`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise refusal from None


class Staging:
    """A directory that is filled beside its final place, can be taken up again, and is published by one
    rename.

    `OUT.partial` holds the files and a journal: a first line that says what is being made, then one line for
    each finished file. The same call after an interruption finds `done`; another job's left-over is an error.
    One process at a time: the journal is locked.
    """

    JOURNAL = "progress.jsonl"

    def __init__(self, out: Path, job: dict[str, Any], *, force: bool) -> None:
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self.done: dict[str, dict[str, Any]] = {}
        if out.exists():
            if not force:
                raise CheckpointError(f"{out}: exists already. Give --force to replace it.")
            if not is_checkpoint(out):
                raise CheckpointError(f"{out}: is not a checkpoint; --force replaces only checkpoints.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._journal = (self.path / self.JOURNAL).open("a+")
        refusal = CheckpointError(f"{self.path}: another process is writing there. Wait for it, or stop it.")
        lock_or_close(self._journal, refusal)
        self._take_up(json.loads(json.dumps(job)), force)

    def _take_up(self, job: dict[str, Any], force: bool) -> None:
        self._journal.seek(0)
        lines = [json.loads(line) for line in self._journal if line.endswith("\n")]
        if lines and lines[0] != job:
            if len(lines) > 1 and not force:  # otherwise nothing would be lost
                self._journal.close()
                raise CheckpointError(
                    f"{self.path}: left by an interrupted conversion of something else, or the source has"
                    " changed since. Remove it, or give --force."
                )
            lines = []
        for line in lines[1:]:
            if (self.path / line["file"]).is_file():
                self.done[line["file"]] = line
        for file in self.path.iterdir():
            if file.name not in self.done and file.name != self.JOURNAL:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._journal.truncate(0)
        for line in (job, *self.done.values()):
            self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def record(self, file: str, **facts: Any) -> None:
        """Note that a file is complete. Not to be called from two threads at once."""
        self.done[file] = {"file": file, **facts}
        self._append(self.done[file])

    def publish(self) -> None:
        """Give the directory its name."""
        (self.path / self.JOURNAL).unlink()
        fsync_directory(self.path)
        replaced = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists():
            self.out.rename(replaced)
        self.path.rename(self.out)
        fsync_directory(self.out.parent)
        self._journal.close()
        if replaced.exists():
            shutil.rmtree(replaced)

    def close(self) -> None:
        """Let go of the lock; what is done stays for the next call."""
        self._journal.close()


def is_checkpoint(directory: Path) -> bool:
    return directory.is_dir() and any((directory / name).is_file() for name in ("config.json", ".metadata"))


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
