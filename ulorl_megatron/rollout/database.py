"""An SQLite file that one process holds at a time, also on network file systems."""

import json
import os
import socket
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from ulorl_megatron.errors import UserError


class Database:
    """The file `path`, made with `schema` (statements that end with ";") if it is new.

    No write-ahead log and no shared memory, so that network file systems do. A process that is killed in a
    transaction leaves the one before. Any thread may call it: one waits for the other's transaction.
    Raises UserError when another process has it or its format is not `format`.
    """

    def __init__(self, path: Path, schema: str, format: int):
        self.path = path
        self._lock = threading.RLock()
        self._owner_file = path.with_name(path.name + ".owner")
        self._connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        try:
            self.execute("PRAGMA locking_mode=EXCLUSIVE")
            self.execute("PRAGMA journal_mode=TRUNCATE")
            self.execute("PRAGMA synchronous=FULL")
            self.execute("BEGIN EXCLUSIVE")  # the lock stays after the commit
            if not self.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                self.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
                for statement in filter(str.strip, schema.split(";")):
                    self.execute(statement)
                self.note("format", str(format))
            self.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._connection.close()
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            raise UserError(
                f"{path} is in use by {self._owner()}: one run directory, one trainer. Stop that one, "
                "or take another run.dir"
            ) from error
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise UserError(f"{path} is not a pool file ({error}); restore it, or take another run.dir") from error
        found = self.noted("format")
        if found != str(format):
            self._connection.close()
            raise UserError(f"{path} has format {found}, this version reads {format}; take another run.dir")
        self._owner_file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def _owner(self) -> str:
        try:
            owner = json.loads(self._owner_file.read_text())
            return f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, LookupError):
            return "another process"

    def close(self) -> None:
        self._owner_file.unlink(missing_ok=True)
        self._connection.close()

    def execute(self, statement: str, parameters: Sequence = ()) -> sqlite3.Cursor:
        with self._lock:
            return self._connection.execute(statement, parameters)

    def one(self, query: str, parameters: Sequence = (), default=None):
        """The first column of the first row, or `default`."""
        row = self.execute(query, parameters).fetchone()
        return default if row is None else row[0]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside, or none."""
        with self._lock:
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self.execute("ROLLBACK")

    def note(self, key: str, value: str) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def noted(self, key: str, default=None):
        return self.one("SELECT value FROM meta WHERE key = ?", (key,), default)
