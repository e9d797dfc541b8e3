"""`train` with stand-ins for Megatron, SGLang's sampling and the judge: a run of seconds that has only one outcome.

python trainer.py CONFIG.yaml: for each line "key=value ..." on stdin a process is forked that runs `train` with these
settings and adds its output to CONFIG.out; its id is printed, and when it has ended its exit status. Forking spares
each life the imports. The policy's weights are a hash of all it ever trained on, in order, so two runs end with the
same weights only if they trained on the same samples with the same tokens, rewards and advantages in the same steps.
"""

import asyncio
import hashlib
import os
import sys
import traceback
import zlib
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # not this folder, whose names would hide others

from checkpoint_tools.publish import write_atomically  # noqa: E402
from ulorl_megatron import config as configuration  # noqa: E402
from ulorl_megatron import generation, train  # noqa: E402
from ulorl_megatron.cli import log_to_file  # noqa: E402
from ulorl_megatron.launch import STOPPED_EXIT  # noqa: E402
from ulorl_megatron.rollout.pools import Pools  # noqa: E402
from ulorl_megatron.verifier import By, Verdict  # noqa: E402
from ulorl_megatron.weight_sync import disk  # noqa: E402


class OneRank:
    first = True

    def only_first(self, work):
        return work()

    on_first = only_first


class HashPolicy:
    """Its weights are 32 bytes. A checkpoint is complete one step after its save, as one written beside training is."""

    def __init__(self, config):
        self._folder = Path(config.run.dir) / "checkpoints"
        self.weights = b"initial".ljust(32)
        self._pending, self._fresh = None, False
        self._last = 0  # step of the newest complete checkpoint
        self._oldest = None  # of the two that stay, since the last call of settle_checkpoint

    def learn(self, samples):
        for s in samples:
            text = repr((s.sample_id, s.tokens.tolist(), s.reward, s.advantage, s.behaviour_log_probs.tolist()))
            self.weights = hashlib.sha256(self.weights + text.encode()).digest()

    def load_latest(self):
        if not (self._folder / "latest").exists():
            return None
        name = (self._folder / "latest").read_text()
        self.weights = (self._folder / name).read_bytes()
        self._last = int(name.removeprefix("step-"))
        return self._last

    def save(self, step):
        self._complete()
        self._pending, self._fresh = (step, self.weights), True

    def settle_checkpoint(self, *, wait):
        if wait or not self._fresh:
            self._complete()
        self._fresh = False
        oldest, self._oldest = self._oldest, None
        return oldest

    def _complete(self):
        if self._pending is not None:
            step, weights = self._pending
            write_atomically(self._folder / f"step-{step}", weights)
            write_atomically(self._folder / "latest", f"step-{step}".encode())
            self._pending, self._oldest, self._last = None, self._last, step


def publish(policy, ranks, model, weights, version, keep):
    folder = weights / f"step-{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", b"{}")
    write_atomically(folder / "model.safetensors", policy.weights)
    return folder


class Judge:
    def __init__(self, config):
        pass

    async def ready(self):
        pass

    async def verify(self, *, question, response, answer):
        await asyncio.sleep(0.02)
        return Verdict(float(zlib.crc32(response.encode()) % 2), By.rule)

    async def close(self):
        pass


def admit(pools, step, prompts):
    """The stand-in server samples nothing: members of a group answer differently only if they are asked differently."""
    new = real_admit(pools, step, prompts)
    for sample in new:
        sample.prompt_tokens.append(sample.id % 256)
    return new


real_admit = Pools.admit


def life(config):
    train.Policy = HashPolicy
    disk.publish_weights = publish
    train.update_policy = lambda policy, samples, config: policy.learn(samples)
    generation.build_verifier = Judge
    Pools.admit = admit
    log_to_file(Path(config.run.dir).parent / "trainer.log")
    return 0 if train.train(config, OneRank()) else STOPPED_EXIT


def main(file):
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with open(Path(file).with_suffix(".out"), "a") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                status = life(configuration.load(file, line.split()))
            except BaseException:  # no life may return into the loop of its parent
                traceback.print_exc()
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
