"""Saves step 1, then is in the middle of writing step 2 for ever.

python -m tests.policy.killed_while_writing MODEL RUN
"""

import functools
import sys
import threading
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async

from tests.policy.support import make_samples, objective, policy_config
from ulorl_megatron.policy import Policy


def main(model: Path, run: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = policy_config(model, run)
    config.checkpoint.asynchronous = True
    policy = Policy(config)
    policy.save(1)
    policy.settle_checkpoint(wait=True)

    items = []
    reached = threading.Event()
    write_item = filesystem_async._write_item

    @functools.wraps(write_item)
    def write_some(transforms, stream, *args, **kwargs):
        items.append(write_item(transforms, stream, *args, **kwargs))
        if len(items) == 20:
            stream.flush()
            reached.set()
            threading.Event().wait()
        return items[-1]

    filesystem_async._write_item = write_some
    policy.save(2)
    reached.wait()
    policy.update(make_samples(), objective())
    print("updated after the save of step 2", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
