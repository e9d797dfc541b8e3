"""The unfinished and the experience pool, and the rules by which samples enter, wait, train or leave."""

from dataclasses import dataclass, field, replace
from typing import Dict, List, Protocol, Sequence, Tuple

import torch

from ulorl_megatron.algorithm import group_advantages, overlong_penalty
from ulorl_megatron.config.schema import ExperienceConfig, Overlong, Release, RolloutConfig
from ulorl_megatron.rollout.sample import Sample, Status
from ulorl_megatron.rollout.store import ConservationError, PoolStore


class Prompt(Protocol):
    """index: row in the data set. tokens: ids after the chat template."""

    index: int
    tokens: List[int]
    answer: str


class PromptSource(Protocol):
    def take(self, position: int, n: int) -> Sequence[Prompt]:
        """The n prompts from `position` (prompts issued so far) on."""


@dataclass
class _Step:
    """What the step in progress touched."""

    issued: int = 0
    samples: Dict[int, Sample] = field(default_factory=dict)


class Pools:
    """The samples in memory, over their store. One step is: admit, recall, (decode `unfinished`), release, commit.

    Only arrived segments are durable before commit: a process that dies earlier starts the step again from the
    store, and `recall` gives it those.
    """

    def __init__(self, store: PoolStore, rollout: RolloutConfig, experience: ExperienceConfig):
        self.store = store
        self._in_flight = rollout.prompts_per_step * rollout.group_size
        self._group_size = rollout.group_size
        self._global_max_length = rollout.global_max_length
        self._experience = experience
        self._groups: Dict[int, List[Sample]] = {}
        for sample in store.load():
            self._groups.setdefault(sample.group_id, []).append(sample)
        self._groups_issued = store.groups_issued
        self._step = _Step()

    @property
    def unfinished(self) -> List[Sample]:
        return self._with_status(Status.unfinished)

    @property
    def waiting(self) -> List[Sample]:
        return self._with_status(Status.waiting)

    def _with_status(self, status: Status) -> List[Sample]:
        return [s for group in self._groups.values() for s in group if s.status is status]

    def admit(self, step: int, prompts: PromptSource) -> List[Sample]:
        """New groups, as many as fit beside the unfinished samples (prompts_per_step x group_size in all).

        The room is counted from the pools alone, so a resumed run admits what an unbroken one would
        (AReaL#1345). Returns the new samples; `unfinished` now holds what this step decodes.
        """
        room = (self._in_flight - len(self.unfinished)) // self._group_size
        new: List[Sample] = []
        for prompt in prompts.take(self._groups_issued, room):
            group_id = self._groups_issued
            self._groups_issued += 1
            group = [
                Sample(
                    id=group_id * self._group_size + member,
                    group_id=group_id,
                    prompt_index=prompt.index,
                    prompt_tokens=list(prompt.tokens),
                    answer=prompt.answer,
                    created_step=step,
                )
                for member in range(self._group_size)
            ]
            self._groups[group_id] = group
            new += group
        self._step = _Step(len(new), {s.id: s for s in self.unfinished})
        return new

    def recall(self, step: int) -> int:
        """Gives the unfinished samples back what arrived for them in this step before a kill; returns how many.

        With a reward, or truncated, they are waiting. Only complete and not yet judged, they are still unfinished.
        What does not continue one of these samples exactly, or was made by later weights than the step's, is dropped.
        """
        by_id = {sample.id: sample for sample in self.unfinished}
        arrivals = self.store.arrivals()
        fitting = {
            id: arrival
            for id, arrival in arrivals.items()
            if id in by_id and arrival.continues(by_id[id]) and all(v < step for v in arrival.segment.versions)
        }
        self.store.discard(arrivals.keys() - fitting.keys())
        for id, arrival in fitting.items():
            sample = by_id[id]
            sample.grow(arrival.segment, finished=arrival.finished, global_max_length=self._global_max_length)
            if sample.complete and arrival.reward is not None:
                sample.reward, sample.status = arrival.reward, Status.waiting
        return len(fitting)

    def release(self, step: int) -> List[Tuple[Sample, float]]:
        """The waiting samples that train in this step, with their advantages (Eq. 4), in order of id.

        They become trained; waiting samples of whole groups without a gradient become filtered (or, without
        dynamic sampling, train with advantage 0). Advantages are over the members complete so far, those
        trained earlier included; failed members never count. Whether a group has a right and a wrong member is
        decided by verdicts. With experience.overlong soft the advantages are over rewards less the lengths' penalty
        (DAPO's Eq. 13); with filter truncated samples become filtered at once and never count.
        """
        released: List[Tuple[Sample, float]] = []
        for group in self._groups.values():
            if self._experience.overlong is Overlong.filter:
                self._settle(step, Status.filtered, [s for s in group if s.status is Status.waiting and s.truncated])
            waiting = [s for s in group if s.status is Status.waiting]
            if not waiting:
                continue
            done = [s for s in group if self._counts(s)]
            whole = all(s.status is not Status.unfinished for s in group)
            unequal = any(s.reward != done[0].reward for s in done)
            if not whole and (self._experience.release is Release.group or not unequal):
                continue
            settled = Status.trained if unequal or not self._experience.dynamic_sampling else Status.filtered
            self._settle(step, settled, waiting)
            if self._experience.overlong is Overlong.soft:
                for sample in waiting:
                    sample.penalty = overlong_penalty(
                        sample.length, self._global_max_length, self._experience.overlong_cache
                    )
            if settled is Status.trained:
                rewards = torch.tensor([s.reward + s.penalty for s in done], dtype=torch.float64)
                advantages = group_advantages(rewards, torch.zeros(len(done), dtype=torch.int64)).tolist()
                by_id = {s.id: a for s, a in zip(done, advantages, strict=True)}
                released += [(s, by_id[s.id]) for s in waiting]
        return sorted(released, key=lambda pair: pair[0].id)

    def _settle(self, step: int, status: Status, samples: List[Sample]) -> None:
        for sample in samples:
            sample.status = status
            sample.settled_step = step
            self._step.samples[sample.id] = sample

    def _counts(self, sample: Sample) -> bool:
        """Whether its reward is one of the group's."""
        left_out = self._experience.overlong is Overlong.filter and sample.truncated
        return sample.complete and sample.status is not Status.failed and not left_out

    def commit(self, step: int) -> Dict[Status, int]:
        """Makes the step durable, and returns the samples of the run in each status.

        Raises ConservationError if the pools in memory and in the store disagree.
        """
        counts = self.store.commit(step, self._step.issued, self._step.samples.values())
        self._step = _Step()
        held = {Status.unfinished: len(self.unfinished), Status.waiting: len(self.waiting)}
        stored = {status: counts[status] for status in held}
        if held != stored:
            raise ConservationError(f"in memory {held}, in {self.store.path} {stored}")
        self._groups = {i: [_slim(s) for s in group] for i, group in self._groups.items() if any(map(_live, group))}
        return counts


def _live(sample: Sample) -> bool:
    return sample.status in (Status.unfinished, Status.waiting)


def _slim(sample: Sample) -> Sample:
    """A settled sample without its tokens, as the store gives it: only its reward still counts."""
    return sample if _live(sample) else replace(sample, segments=[])
