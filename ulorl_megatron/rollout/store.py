"""The pools on disk: every sample of the run, in SQLite, one transaction a step, segments as they arrive.

Rows carry the step of each event (created, completed, settled; segments have theirs), so the state after any
earlier step can be had back: `rewind`. Segments of steps after the last committed one have arrived, or were there
before a rewind: a step that is done, or done again, takes up those that continue its samples.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Set

import numpy as np

from ulorl_megatron.rollout.database import Database
from ulorl_megatron.rollout.sample import Sample, Segment, Status, lost

_FORMAT = 3
_SETTLED = (Status.trained, Status.filtered, Status.failed)

# int32 for ids and versions, float32 (what the server computes in) for log-probs. A segment may be there before its
# sample is; reward: of the response that ends with it; context: see Arrival.
_SCHEMA = """
CREATE TABLE steps (step INTEGER PRIMARY KEY, issued INTEGER NOT NULL);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, prompt_index INTEGER NOT NULL, prompt BLOB NOT NULL,
    answer TEXT NOT NULL, created_step INTEGER NOT NULL,
    completed_step INTEGER, finished INTEGER, reward REAL, penalty REAL NOT NULL DEFAULT 0,
    settled_step INTEGER, settled TEXT
);
CREATE INDEX samples_group ON samples (group_id);
CREATE TABLE segments (
    sample_id INTEGER NOT NULL, step INTEGER NOT NULL,
    tokens BLOB NOT NULL, log_probs BLOB NOT NULL, versions BLOB NOT NULL,
    finished INTEGER NOT NULL, reward REAL, context INTEGER NOT NULL,
    PRIMARY KEY (sample_id, step)
);
CREATE INDEX segments_step ON segments (step);
"""


class ConservationError(RuntimeError):
    """Samples were lost or counted twice: issued != trained + filtered + unfinished + waiting + failed."""


@dataclass(frozen=True)
class Arrival:
    """A segment of a step that is not committed.

    finished: it ends with EOS. reward: None if not judged, or if the judge gave up. context: CRC-32 of the ids it
    continues, so that it never becomes a part of another response.
    """

    segment: Segment
    finished: bool
    reward: Optional[float]
    context: int

    def continues(self, sample: Sample) -> bool:
        return self.context == _context(sample.prompt_tokens, sample.segments)


class PoolStore:
    """The samples of a run, in a file that one process holds at a time (see Database)."""

    def __init__(self, path: Path):
        """Opens or creates `path`. Raises UserError when another process has it or its format is another."""
        self.path = path
        self._db = Database(path, _SCHEMA, _FORMAT)
        self._arrived: Set[int] = set()  # samples whose segment of the step in progress is stored as it is in memory

    def close(self) -> None:
        self._db.close()

    @property
    def last_step(self) -> int:
        """The last committed step; 0 before the first."""
        return self._db.one("SELECT coalesce(max(step), 0) FROM steps")

    @property
    def groups_issued(self) -> int:
        """Prompts issued so far: the data position, and the next group_id."""
        return self._db.one("SELECT coalesce(max(group_id) + 1, 0) FROM samples")

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
        issued = self._db.one("SELECT coalesce(sum(issued), 0) FROM steps")
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
        with self._db.transaction():
            self._db.execute("INSERT INTO steps VALUES (?, ?)", (step, issued))
            owned = 0
            for sample in samples:
                self._write(step, sample)
                owned += _segment_of(step, sample) is not None
            stored = self._db.one("SELECT count(*) FROM segments WHERE step = ?", (step,))
            if stored != owned:
                raise ConservationError(f"{stored} segments of step {step} are stored, the samples have {owned}")
            counts = self.check_conservation()
        self._arrived = set()
        return counts

    def arrive(self, step: int, samples: Iterable[Sample]) -> None:
        """Stores, ahead of the commit, the segment of step `step` that each sample has, and its reward if it is there.

        Again for the same sample it stores the reward that has come since. Raises ValueError unless step follows
        last_step.
        """
        if step != self.last_step + 1:
            raise ValueError(f"a segment of step {step} cannot arrive after step {self.last_step}")
        with self._db.transaction():
            written = [sample.id for sample in samples if self._write_segment(step, sample)]
        self._arrived.update(written)

    def arrivals(self) -> Dict[int, Arrival]:
        """The segments of the step after the last committed one that are stored, by sample id.

        The caller takes them up, or discards them.
        """
        rows = self._db.execute(
            "SELECT sample_id, step, tokens, log_probs, versions, finished, reward, context FROM segments "
            "WHERE step = ? ORDER BY sample_id",
            (self.last_step + 1,),
        )
        found = {row[0]: Arrival(_segment(*row[1:5]), bool(row[5]), row[6], row[7]) for row in rows}
        self._arrived = set(found)
        return found

    def discard(self, sample_ids: Iterable[int]) -> None:
        """Drops what arrived for these samples in the step after the last committed one."""
        dropped = set(sample_ids)
        if not dropped:
            return
        step = self.last_step + 1
        with self._db.transaction():
            for id in dropped:
                self._db.execute("DELETE FROM segments WHERE sample_id = ? AND step = ?", (id, step))
        self._arrived -= dropped

    def begin_as(self, origin: str) -> int:
        """For a run that starts at step 0: what arrived under another origin is dropped; returns how many.

        origin: whatever the first segments depend on; they are taken up again only by a start with the same.
        """
        dropped = 0
        with self._db.transaction():
            if self._db.noted("origin") != origin:
                dropped = self._db.execute("DELETE FROM segments WHERE step > ?", (self.last_step,)).rowcount
                self._db.note("origin", origin)
        return dropped

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
        self._write_segment(step, sample)
        changed = self._db.execute(
            "UPDATE samples SET completed_step = ?, finished = ?, reward = ?, penalty = ?, settled_step = ?, "
            "settled = ? WHERE id = ? AND settled IS NULL",
            (
                sample.segments[-1].step if sample.complete else None,
                sample.finished if sample.complete else None,
                sample.reward,
                sample.penalty,
                sample.settled_step,
                sample.status.value if sample.status in _SETTLED else None,
                sample.id,
            ),
        ).rowcount
        if changed != 1:
            raise ConservationError(f"sample {sample.id} ({sample.status.value}) was settled before, or never issued")

    def _write_segment(self, step: int, sample: Sample) -> bool:
        """Whether there was one to write; of one that has arrived, only the reward is new."""
        segment = _segment_of(step, sample)
        if segment is None:
            return False
        if sample.id in self._arrived:
            self._db.execute(
                "UPDATE segments SET reward = ? WHERE sample_id = ? AND step = ?", (sample.reward, sample.id, step)
            )
            return True
        self._db.execute(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                sample.id,
                step,
                _pack(segment.tokens, np.int32),
                _pack(segment.log_probs, np.float32),
                _pack(segment.versions, np.int32),
                sample.finished,
                sample.reward,
                _context(sample.prompt_tokens, sample.segments[:-1]),
            ),
        )
        return True

    def load(self) -> List[Sample]:
        """All samples of the groups that have an unfinished or a waiting one, in order of id.

        The settled among them come without segments: only their reward still counts, for advantages.
        """
        rows = self._db.execute(
            """SELECT id, group_id, prompt_index, prompt, answer, created_step, completed_step, finished,
                      reward, penalty, settled_step, settled
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
        penalty: float,
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
            penalty=penalty,
            settled_step=settled_step,
        )

    def _segments(self, sample_id: int) -> List[Segment]:
        """Those of the committed steps."""
        rows = self._db.execute(
            "SELECT step, tokens, log_probs, versions FROM segments WHERE sample_id = ? AND step <= ? ORDER BY step",
            (sample_id, self.last_step),
        )
        return [_segment(*row) for row in rows]

    def rewind(self, step: int) -> None:
        """Back to the state after `step`: for a policy checkpoint older than the pools.

        Later segments stay, as arrived. The weights of `step` made those of the step after it. The weights that made
        still later ones are lost with the killed trainer, and their versions say so from now on (see `lost`): those
        that are trained now in their place have the same numbers.
        Raises ValueError when `step` is ahead of the pools, or when samples it needs were forgotten.
        """
        last, oldest = self.last_step, int(self._db.noted("forgotten", 0))
        if not oldest <= step <= last:
            raise ValueError(f"cannot rewind to step {step}: the pools hold steps {oldest} to {last}")
        with self._db.transaction():
            later = "SELECT sample_id, step, versions FROM segments WHERE step > ?"
            for sample_id, at, blob in self._db.execute(later, (step + 1,)).fetchall():
                versions = [v if v <= step else lost(v) for v in _unpack(blob, np.int32)]
                self._db.execute(
                    "UPDATE segments SET versions = ? WHERE sample_id = ? AND step = ?",
                    (_pack(versions, np.int32), sample_id, at),
                )
            for statement in (
                "DELETE FROM samples WHERE created_step > ?",
                "UPDATE samples SET settled = NULL, settled_step = NULL, penalty = 0 WHERE settled_step > ?",
                "UPDATE samples SET completed_step = NULL, finished = NULL, reward = NULL WHERE completed_step > ?",
                "DELETE FROM steps WHERE step > ?",
            ):
                self._db.execute(statement, (step,))
        self._arrived = set()

    def forget(self, step: int) -> None:
        """Drops the tokens of samples settled by `step`; no rewind goes before `step` any more.

        Their rows stay. Call it with the step of the oldest policy checkpoint that is kept.
        """
        with self._db.transaction():
            self._db.execute(
                "DELETE FROM segments WHERE sample_id IN (SELECT id FROM samples WHERE settled_step <= ?)", (step,)
            )
            self._db.note("forgotten", str(step))

    def trained(self) -> Dict[int, int]:
        """Step in which each trained sample trained, by sample id."""
        rows = self._db.execute("SELECT id, settled_step FROM samples WHERE settled = 'trained'")
        return dict(rows.fetchall())

    def mean_reward(self) -> Optional[float]:
        """Mean reward of the samples issued in the newest step of which none is unfinished, nor of any before it.

        None while there is no such step.
        """
        unfinished = "completed_step IS NULL AND settled_step IS NULL"
        oldest = self._db.one(f"SELECT min(created_step) FROM samples WHERE {unfinished}")
        newest = "SELECT max(created_step) FROM samples WHERE ?1 IS NULL OR created_step < ?1"
        return self._db.one(f"SELECT avg(reward) FROM samples WHERE created_step = ({newest})", (oldest,))


def _segment_of(step: int, sample: Sample) -> Optional[Segment]:
    """The segment that `sample` got in step `step`; only its last one can be."""
    last = sample.segments[-1] if sample.segments else None
    return last if last is not None and last.step == step else None


def _context(prompt_tokens: Sequence, segments: Sequence[Segment]) -> int:
    crc = zlib.crc32(_pack(prompt_tokens, np.int32))
    for segment in segments:
        crc = zlib.crc32(_pack(segment.tokens, np.int32), crc)
    return crc


def _segment(step: int, tokens: bytes, log_probs: bytes, versions: bytes) -> Segment:
    return Segment(step, _unpack(tokens, np.int32), _unpack(log_probs, np.float32), _unpack(versions, np.int32))


def _pack(values: Sequence, dtype: type) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def _unpack(blob: bytes, dtype: type) -> list:
    return np.frombuffer(blob, dtype=dtype).tolist()
