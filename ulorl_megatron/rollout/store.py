"""The pools on disk: every sample of the run, in SQLite, one transaction a step.

Rows carry the step of each event (created, completed, settled; segments have theirs), so the state after any
earlier step can be had back: `rewind`.
"""

import json
import os
import socket
import sqlite3
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence

import numpy as np

from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.sample import Sample, Segment, Status

_FORMAT = 1
_SETTLED = (Status.trained, Status.filtered, Status.failed)

# int32 for ids and versions, float32 (what the server computes in) for log-probs.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, issued INTEGER NOT NULL);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, prompt_index INTEGER NOT NULL, prompt BLOB NOT NULL,
    answer TEXT NOT NULL, created_step INTEGER NOT NULL,
    completed_step INTEGER, finished INTEGER, reward REAL,
    settled_step INTEGER, settled TEXT
);
CREATE INDEX samples_group ON samples (group_id);
CREATE TABLE segments (
    sample_id INTEGER NOT NULL REFERENCES samples (id), step INTEGER NOT NULL,
    tokens BLOB NOT NULL, log_probs BLOB NOT NULL, versions BLOB NOT NULL,
    PRIMARY KEY (sample_id, step)
);
"""


class ConservationError(RuntimeError):
    """Samples were lost or counted twice: issued != trained + filtered + unfinished + waiting + failed."""


class PoolStore:
    """The SQLite file of a run, opened by one process at a time.

    No write-ahead log and no shared memory, so that network file systems do. A process that is killed in a
    commit leaves the step before.
    """

    def __init__(self, path: Path):
        """Opens or creates `path`. Raises UserError when another process has it or its format is another."""
        self.path = path
        self._owner_file = path.with_name(path.name + ".owner")
        self._db = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=TRUNCATE")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.execute("BEGIN EXCLUSIVE")  # the lock stays after the commit
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES ('format', ?)", (str(_FORMAT),))
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._db.close()
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            raise UserError(
                f"{path} is in use by {self._owner()}: one run directory, one trainer. Stop that one, "
                "or take another run.dir"
            ) from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UserError(f"{path} is not a pool file ({error}); restore it, or take another run.dir") from error
        (found,) = self._db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found != str(_FORMAT):
            self._db.close()
            raise UserError(f"{path} has format {found}, this version reads {_FORMAT}; take another run.dir")
        self._owner_file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def _owner(self) -> str:
        try:
            owner = json.loads(self._owner_file.read_text())
            return f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, LookupError):
            return "another process"

    def close(self) -> None:
        self._owner_file.unlink(missing_ok=True)
        self._db.close()

    @property
    def last_step(self) -> int:
        """The last committed step; 0 before the first."""
        return self._one("SELECT coalesce(max(step), 0) FROM steps")

    @property
    def groups_issued(self) -> int:
        """Prompts issued so far: the data position, and the next group_id."""
        return self._one("SELECT coalesce(max(group_id) + 1, 0) FROM samples")

    def counts(self) -> Dict[Status, int]:
        """Samples in each status, and none in two."""
        rows = self._db.execute(
            """SELECT CASE WHEN settled IS NOT NULL THEN settled WHEN completed_step IS NULL THEN 'unfinished'
                      WHEN reward IS NOT NULL THEN 'waiting' ELSE 'unrewarded' END AS status, count(*)
               FROM samples GROUP BY status"""
        )
        found = dict(rows.fetchall())
        if "unrewarded" in found:
            raise ConservationError(f"{found['unrewarded']} complete samples have neither a reward nor a failure")
        return {status: found.get(status.value, 0) for status in Status}

    def check_conservation(self) -> Dict[Status, int]:
        """The counts, if they add up to the samples issued; else ConservationError (slime#2238)."""
        issued = self._one("SELECT coalesce(sum(issued), 0) FROM steps")
        counts = self.counts()
        if issued != sum(counts.values()):
            parts = " + ".join(f"{n} {status.value}" for status, n in counts.items())
            raise ConservationError(f"issued {issued} != {sum(counts.values())} = {parts}")
        return counts

    def commit(self, step: int, issued: int, samples: Iterable[Sample]) -> Dict[Status, int]:
        """Stores what step `step` did to `samples`, all or nothing; returns the samples of the run by status.

        issued: samples created in this step. samples: every one that the step created, grew, verified or
        settled. Raises ValueError unless step follows last_step, and ConservationError if a settled sample
        would change (it would train twice) or the law does not hold afterwards.
        """
        if step != self.last_step + 1:
            raise ValueError(f"step {step} cannot be committed after step {self.last_step}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("INSERT INTO steps VALUES (?, ?)", (step, issued))
            for sample in samples:
                self._write(step, sample)
            counts = self.check_conservation()
            self._db.execute("COMMIT")
            return counts
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _write(self, step: int, sample: Sample) -> None:
        if sample.created_step == step:
            self._db.execute(
                "INSERT INTO samples (id, group_id, prompt_index, prompt, answer, created_step) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    sample.id,
                    sample.group_id,
                    sample.prompt_index,
                    _pack(sample.prompt_tokens, np.int32),
                    sample.answer,
                    sample.created_step,
                ),
            )
        self._db.executemany(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?)",
            [
                (
                    sample.id,
                    s.step,
                    _pack(s.tokens, np.int32),
                    _pack(s.log_probs, np.float32),
                    _pack(s.versions, np.int32),
                )
                for s in sample.segments
                if s.step == step
            ],
        )
        changed = self._db.execute(
            "UPDATE samples SET completed_step = ?, finished = ?, reward = ?, settled_step = ?, settled = ? "
            "WHERE id = ? AND settled IS NULL",
            (
                sample.segments[-1].step if sample.complete else None,
                sample.finished if sample.complete else None,
                sample.reward,
                sample.settled_step,
                sample.status.value if sample.status in _SETTLED else None,
                sample.id,
            ),
        ).rowcount
        if changed != 1:
            raise ConservationError(f"sample {sample.id} ({sample.status.value}) was settled before, or never issued")

    def load(self) -> List[Sample]:
        """All samples of the groups that have an unfinished or a waiting one, in order of id.

        The settled among them come without segments: only their reward still counts, for advantages.
        """
        rows = self._db.execute(
            """SELECT id, group_id, prompt_index, prompt, answer, created_step, completed_step, finished,
                      reward, settled_step, settled
               FROM samples WHERE group_id IN (SELECT group_id FROM samples WHERE settled IS NULL)
               ORDER BY id"""
        ).fetchall()
        return [self._sample(*row) for row in rows]

    def _sample(
        self,
        id: int,
        group_id: int,
        prompt_index: int,
        prompt: bytes,
        answer: str,
        created_step: int,
        completed_step: Optional[int],
        finished: Optional[int],
        reward: Optional[float],
        settled_step: Optional[int],
        settled: Optional[str],
    ) -> Sample:
        complete = completed_step is not None
        return Sample(
            id=id,
            group_id=group_id,
            prompt_index=prompt_index,
            prompt_tokens=_unpack(prompt, np.int32),
            answer=answer,
            created_step=created_step,
            segments=[] if settled else self._segments(id),
            status=Status(settled) if settled else Status.waiting if complete else Status.unfinished,
            finished=complete and bool(finished),
            truncated=complete and not finished,
            reward=reward,
            settled_step=settled_step,
        )

    def _segments(self, sample_id: int) -> List[Segment]:
        rows = self._db.execute(
            "SELECT step, tokens, log_probs, versions FROM segments WHERE sample_id = ? ORDER BY step",
            (sample_id,),
        )
        return [
            Segment(step, _unpack(tokens, np.int32), _unpack(log_probs, np.float32), _unpack(versions, np.int32))
            for step, tokens, log_probs, versions in rows
        ]

    def rewind(self, step: int) -> None:
        """Back to the state after `step`: for a policy checkpoint older than the pools. Nothing later stays.

        Raises ValueError when `step` is ahead of the pools, or when samples it needs were forgotten.
        """
        last, oldest = self.last_step, int(self._one("SELECT value FROM meta WHERE key = 'forgotten'", 0))
        if not oldest <= step <= last:
            raise ValueError(f"cannot rewind to step {step}: the pools hold steps {oldest} to {last}")
        self._db.execute("BEGIN IMMEDIATE")
        for statement in (
            "DELETE FROM segments WHERE step > ?",
            "DELETE FROM samples WHERE created_step > ?",
            "UPDATE samples SET settled = NULL, settled_step = NULL WHERE settled_step > ?",
            "UPDATE samples SET completed_step = NULL, finished = NULL, reward = NULL WHERE completed_step > ?",
            "DELETE FROM steps WHERE step > ?",
        ):
            self._db.execute(statement, (step,))
        self._db.execute("COMMIT")

    def forget(self, step: int) -> None:
        """Drops the tokens of samples settled by `step`; no rewind goes before `step` any more.

        Their rows stay. Call it with the step of the oldest policy checkpoint that is kept.
        """
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(
            "DELETE FROM segments WHERE sample_id IN (SELECT id FROM samples WHERE settled_step <= ?)",
            (step,),
        )
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten', ?)", (str(step),))
        self._db.execute("COMMIT")

    def trained(self) -> Dict[int, int]:
        """Step in which each trained sample trained, by sample id."""
        rows = self._db.execute("SELECT id, settled_step FROM samples WHERE settled = 'trained'")
        return dict(rows.fetchall())

    def mean_reward(self, issued_in: int) -> Optional[float]:
        """Mean reward of the complete samples issued in one step; None if there are none."""
        return self._one("SELECT avg(reward) FROM samples WHERE created_step = ?", parameters=(issued_in,))

    def _one(self, query: str, default=None, parameters: Sequence = ()):
        row = self._db.execute(query, parameters).fetchone()
        return default if row is None else row[0]


def _pack(values: Sequence, dtype: type) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def _unpack(blob: bytes, dtype: type) -> list:
    return np.frombuffer(blob, dtype=dtype).tolist()
