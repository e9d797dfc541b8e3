"""UloRL's Algorithm 1. Every rank runs this; `generation` and `monitor` live on rank 0, the policy on all ranks."""

from pathlib import Path

from ulorl_megatron.config.schema import Config
from ulorl_megatron.generation import Generation
from ulorl_megatron.launch import OnFirstRank, Ranks
from ulorl_megatron.monitor import Clock, Monitor
from ulorl_megatron.policy import Policy
from ulorl_megatron.update import update_metrics, update_policy
from ulorl_megatron.weight_sync import publish_weights


def train(config: Config, ranks: Ranks) -> None:
    """Runs config.run.total_steps steps, or resumes after the last checkpoint in config.run.dir."""
    with (
        OnFirstRank(ranks, Generation, config) as generation,
        OnFirstRank(ranks, Monitor, config) as monitor,
    ):
        generation.start()
        policy = Policy(config)
        done = policy.load_latest() or 0
        generation.resume(done)
        monitor.resume(done)
        _load_servers(generation, policy, ranks, config, done)
        if done == 0 and config.evaluation.every:
            monitor.evaluation(0, generation.evaluate())

        clock = Clock()
        for step in range(done + 1, config.run.total_steps + 1):
            with clock("rollout"):  # one segment of every unfinished sample and of new prompts, verified on the way
                generation.collect(step)
            samples = generation.release(step)  # complete, and of a group with right and wrong answers
            with clock("train"):  # Eq. 7 and 10; with nothing to learn from, a step without an update
                update = update_policy(policy, samples, config) if samples else None
            with clock("sync"):
                _load_servers(generation, policy, ranks, config, step)

            # The pools first: after a kill before the checkpoint, generation.resume takes them one step back.
            experience = generation.commit(step)
            monitor.step(step, experience | update_metrics(update) | clock.lap())
            last = step == config.run.total_steps
            if is_due(config.evaluation.every, step, last):
                with clock("evaluate"):
                    monitor.evaluation(step, generation.evaluate())
            if is_due(config.checkpoint.every, step, last):
                with clock("checkpoint"):
                    generation.forget(policy.save(step))
        monitor.summary()


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether something done every so many steps (0: never) is done after `step`."""
    return every > 0 and (last or step % every == 0)


def _load_servers(generation: OnFirstRank, policy: Policy, ranks: Ranks, config: Config, version: int) -> None:
    """Every server holds the policy's weights as `version`, and has confirmed it."""
    weights = Path(config.run.dir) / "weights"
    folder = publish_weights(policy, ranks, Path(config.model.path), weights, version, config.checkpoint.keep_weights)
    generation.load_weights(folder, version)
