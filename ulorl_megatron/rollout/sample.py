"""One response on its way: a prompt, what was decoded so far, and what became of it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional


def lost(version: int) -> int:
    """The version of a token once the weights that made it are lost with a killed trainer; others get their number."""
    return version if version < 0 else -1 - version


def age(version: int, current: int) -> int:
    """How many versions before `current` a token was made; at least 1 if by weights that are lost."""
    return current - version if version >= 0 else max(1, current - (-1 - version))


class Status(Enum):
    """Where a sample is. issued = unfinished + waiting + trained + filtered + failed, always."""

    unfinished = "unfinished"  # decoded in part; continues next step
    waiting = "waiting"  # complete (verified or truncated), not yet released to training
    trained = "trained"
    filtered = "filtered"  # complete, and its group had no gradient to give; or truncated (experience.overlong filter)
    failed = "failed"  # server or verifier gave up on it; never trained, never a silent 0


@dataclass(frozen=True)
class Segment:
    """What one request brought.

    step: the step it was decoded in. tokens: ids. log_probs: of those ids at the sampling temperature, as the
    server gave them (nats). versions: weight version that made each token, as the server stamped it; see `lost`.
    """

    step: int
    tokens: List[int]
    log_probs: List[float]
    versions: List[int]


@dataclass
class Sample:
    """id: unique in the run. group_id: the issued prompt (unique per issue, not per row). prompt_index: row
    in the data set. finished: the last token is EOS. truncated: global_max_length reached without EOS. reward: the
    verdict, 1 or 0. penalty: what its length takes from that in the advantage, 0 or less (experience.overlong soft)."""

    id: int
    group_id: int
    prompt_index: int
    prompt_tokens: List[int]
    answer: str
    created_step: int
    segments: List[Segment] = field(default_factory=list)
    status: Status = Status.unfinished
    finished: bool = False
    truncated: bool = False
    reward: Optional[float] = None
    penalty: float = 0.0
    settled_step: Optional[int] = None

    @property
    def tokens(self) -> List[int]:
        """Response ids so far."""
        return [t for s in self.segments for t in s.tokens]

    @property
    def log_probs(self) -> List[float]:
        return [p for s in self.segments for p in s.log_probs]

    @property
    def versions(self) -> List[int]:
        return [v for s in self.segments for v in s.versions]

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def complete(self) -> bool:
        return self.finished or self.truncated

    def grow(self, segment: Segment, *, finished: bool, global_max_length: int) -> None:
        """The only way a sample gets tokens.

        finished: the server said EOS. Sets `finished` or, at exactly global_max_length tokens, `truncated`.
        Raises ValueError if tokens, log-probs and versions differ in length, a log-prob is missing, the
        sample is complete already, or the total would pass global_max_length.
        """
        n = len(segment.tokens)
        if len(segment.log_probs) != n or len(segment.versions) != n:
            raise ValueError(
                f"sample {self.id}: {n} tokens, {len(segment.log_probs)} log-probs, {len(segment.versions)} versions"
            )
        if any(p is None for p in segment.log_probs):
            raise ValueError(f"sample {self.id}: a token of the segment has no log-prob")
        if self.complete:
            raise ValueError(f"sample {self.id} is complete and cannot grow")
        if self.length + n > global_max_length:
            raise ValueError(f"sample {self.id}: {self.length} + {n} tokens pass the cap of {global_max_length}")
        self.segments.append(segment)
        self.finished = finished
        self.truncated = not finished and self.length == global_max_length
