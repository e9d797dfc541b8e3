"""UloRL's Algorithm 1. Every rank runs this; `generation` and `monitor` live on rank 0, the policy on all ranks."""

from contextlib import ExitStack

from ulorl_megatron.config.schema import Config
from ulorl_megatron.generation import Generation
from ulorl_megatron.launch import OnFirstRank, Ranks, StopSignals
from ulorl_megatron.monitor import Clock, Monitor
from ulorl_megatron.policy import Policy
from ulorl_megatron.update import update_metrics, update_policy
from ulorl_megatron.weight_sync import WeightSync


def train(config: Config, ranks: Ranks) -> bool:
    """Runs config.run.total_steps steps, or resumes after the last checkpoint in config.run.dir.

    False: it was asked to stop before the last (SIGUSR1), and left a checkpoint of all that it had trained.
    """
    with (
        OnFirstRank(ranks, Generation, config) as generation,
        OnFirstRank(ranks, Monitor, config) as monitor,
        ExitStack() as resources,
    ):
        generation.start()
        policy = Policy(config)
        done = policy.load_latest() or 0
        generation.resume(done)
        monitor.resume(done)
        load_servers = resources.enter_context(WeightSync(config, policy, ranks, generation))
        load_servers(done)
        if done == 0 and config.evaluation.every:
            monitor.evaluation(0, generation.evaluate())

        resources.enter_context(StopSignals())
        clock = Clock()
        for step in range(done + 1, config.run.total_steps + 1):
            with clock("rollout"):  # one segment of every unfinished sample and of new prompts, verified on the way
                whole = generation.collect(step)
            if not whole:
                _leave(config, generation, policy, done, step - 1)
                return False
            with clock("checkpoint"):  # of the step before, written meanwhile
                _settle_checkpoint(generation, policy, wait=False)
            samples = generation.release(step)  # complete, and of a group with right and wrong answers
            # Pools first: after a kill before the checkpoint, generation.resume takes them back to the one before.
            experience = generation.commit(step)
            last = step == config.run.total_steps
            if config.rollout.overlap and not last:
                generation.collect_ahead(step + 1)  # goes on while the policy trains, and under its new weights
            with clock("train"):  # Eq. 7 and 10; with nothing to learn from, a step without an update
                update = update_policy(policy, samples, config) if samples else None
            with clock("sync"):
                load_servers(step)
            monitor.step(step, experience | update_metrics(update) | clock.lap())
            monitor.exhibits(step, generation.exhibits())
            if is_due(config.evaluation.every, step, last):
                with clock("evaluate"):
                    monitor.evaluation(step, generation.evaluate())
            with clock("checkpoint"):
                if is_due(config.checkpoint.every, step, last):
                    policy.save(step)
                _settle_checkpoint(generation, policy, wait=last)
        monitor.summary()
        return True


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether something done every so many steps (0: never) is done after `step`."""
    return every > 0 and (last or step % every == 0)


def _leave(config: Config, generation: OnFirstRank, policy: Policy, begun: int, step: int) -> None:
    """A checkpoint of `step`, the last whole one, unless it has one. begun: the step this start went on from."""
    if step > begun and not is_due(config.checkpoint.every, step, last=False):
        policy.save(step)
    _settle_checkpoint(generation, policy, wait=True)


def _settle_checkpoint(generation: OnFirstRank, policy: Policy, *, wait: bool) -> None:
    """Once it is written on all ranks, the last checkpoint is the latest, and what only dropped ones needed goes."""
    oldest = policy.settle_checkpoint(wait=wait)
    if oldest is not None:
        generation.forget(oldest)
