"""Seconds to give a real server new weights by disk and by broadcast, against a plain copy and a plain broadcast.

python benchmarks/weight_sync.py --dir DIR [--hidden 1024] [--layers 12] [--repeat 5]

One trainer rank and one SGLang server on this machine, a random dense model (the default: 0.6 GB in float32). The plain
ways are `cp -r` of the published folder, and gloo's broadcast of one flat tensor to a second process. By both ways the
server loads the weights, drops its cache and confirms the version; how much of it is the server's own work is printed
for `disk`, where it can be told. Prints medians, ratios, and the memory of the trainer process beyond the policy's.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List

sys.path.insert(0, str(Path(__file__).parents[1]))


def receive(port: int, nbytes: int, times: int) -> None:
    """The other process of the plain broadcast."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    flat = torch.empty(nbytes, dtype=torch.uint8)
    for _ in range(times):
        dist.barrier()
        dist.broadcast(flat, 0)
    dist.barrier()
    dist.destroy_process_group()


def plain_broadcast(nbytes: int, times: int) -> List[float]:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = multiprocessing.get_context("spawn").Process(target=receive, args=(store.port, nbytes, times))
    peer.start()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    flat, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(times):
        dist.barrier()
        seconds.append(timed(dist.broadcast, flat, 0))
    dist.barrier()  # the other has it all
    dist.destroy_process_group()
    peer.join()
    return seconds


def timed(work: Callable, *arguments) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def main(args: argparse.Namespace) -> None:
    import torch

    from benchmarks.checkpoint_save import make_model
    from ulorl_megatron.config.schema import Config, Dtype
    from ulorl_megatron.launch import OnFirstRank, Ranks
    from ulorl_megatron.policy import Policy
    from ulorl_megatron.rollout.loop_thread import LoopThread
    from ulorl_megatron.rollout.served_model import ServedModel
    from ulorl_megatron.rollout.server_pool import ServerPool
    from ulorl_megatron.weight_sync.disk import publish_weights
    from ulorl_megatron.weight_sync.distributed import DistributedSync

    torch.set_num_threads(1)
    model = args.dir / "model"
    make_model(model, args.hidden, args.layers)
    config = Config()
    config.run.dir, config.model.path, config.model.dtype = str(args.dir / "run"), str(model), Dtype.float32
    config.rollout.global_max_length, config.data.max_prompt_length = 256, 64
    pool = ServerPool(config, ServedModel(model, 2048, frozenset({2**20})))

    with Ranks() as ranks, LoopThread() as loop:

        class Servers:
            """What the syncs ask of generation."""

            def open_weight_update(self) -> List[str]:
                return loop.run(pool.open_update())

            def close_weight_update(self, version: int, failures: Dict[str, str]) -> None:
                loop.run(pool.close_update(version, failures))

        pool.start()
        try:
            policy = Policy(config)
            loop.run(pool.wait_ready())
            weights, version = args.dir / "weights", 0
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            sync = DistributedSync(policy, ranks)
            servers = OnFirstRank(ranks, Servers)
            found: Dict[str, List[float]] = {"publish": [], "load": [], "cp": [], "broadcast": []}
            for turn in range(args.repeat + 1):  # the first is to warm up
                version += 2
                publish = timed(publish_weights, policy, ranks, config.model, weights, version - 1, 2)
                folder = weights / f"step-{version - 1:06d}"
                load = timed(loop.run, pool.update_weights(folder, version - 1))
                copy = timed(subprocess.run, ["cp", "-r", folder, args.dir / f"copy-{turn}"])
                broadcast = timed(sync, servers, version)
                if turn:
                    for name, seconds in zip(found, (publish, load, copy, broadcast), strict=True):
                        found[name].append(seconds)
            sync.close()
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
            nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        finally:
            loop.run(pool.close())
    found["plain broadcast"] = plain_broadcast(nbytes, args.repeat + 1)[1:]
    m = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(f"{nbytes / 1e9:.2f} GB of weights")
    print(f"disk         publish {m['publish']:.2f} s, the server loads {m['load']:.2f} s")
    print(f"cp -r        {m['cp']:.2f} s; publishing takes {m['publish'] / m['cp']:.2f} of it")
    print(f"distributed  {m['broadcast']:.2f} s, which is {m['broadcast'] / (m['publish'] + m['load']):.2f} of disk")
    plain = m["plain broadcast"]
    print(f"plain        {plain:.2f} s; the sync takes {m['broadcast'] / plain:.2f} times that")
    print(f"memory of the syncs at most {peak:.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    main(arguments)
