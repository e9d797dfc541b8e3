"""One rank's broadcast channel to all servers: a process group in which it is rank 0 and the servers follow."""

import asyncio
import socket
from datetime import timedelta
from typing import Coroutine, Dict, List, Sequence
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ulorl_megatron.rollout.client import Endpoint, RequestError, RequestRejected
from ulorl_megatron.weight_sync.receiver import server_layout

TIMEOUT_S = 600.0  # of one bucket


class SyncFailed(Exception):
    """Some servers did not take part to the end. failures: url -> what went wrong. gone: those that do not answer."""

    def __init__(self, failures: Dict[str, Exception]):
        super().__init__("; ".join(str(error) for error in failures.values()))
        self.failures = {url: str(error) for url, error in failures.items()}
        self.gone = [url for url, error in failures.items() if isinstance(error, (RequestError, TimeoutError))]


class Channel:
    """Opened by `open`; lives in one event loop together with its clients. Not usable after SyncFailed."""

    def __init__(self, clients: Sequence[Endpoint], name: str, group: dist.ProcessGroup):
        self._clients, self._name, self._group = clients, name, group

    @classmethod
    async def open(cls, clients: Sequence[Endpoint], name: str, backend: str) -> "Channel":
        """Has every server join a new group `name` (unique for as long as the servers live). Raises SyncFailed."""
        sizes = [(await server_layout(client))["tp_size"] for client in clients]
        host = _address_towards(clients[0].url)
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        world, offset, joins = 1 + sum(sizes), 1, []
        for client, size in zip(clients, sizes, strict=True):
            joins.append(
                client.control(
                    "/init_weights_update_group",
                    {
                        "master_address": host,
                        "master_port": store.port,
                        "rank_offset": offset,
                        "world_size": world,
                        "group_name": name,
                        "backend": backend,
                    },
                    TIMEOUT_S,
                )
            )
            offset += size
        group = await _all(clients, joins, lambda: _new_group(store, name, world, backend, timeout))
        return cls(clients, name, group)

    async def send(self, names: List[str], tensors: List[Tensor], version: int) -> None:
        """Broadcasts the tensors as one flat bucket; every server has loaded them on return. Raises SyncFailed."""
        flat = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors])
        message = {
            "names": names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "weight_version": str(version),
            "flush_cache": True,  # keys and values of the old weights (RLinf#96, AReaL#421)
        }
        posts = [
            client.control("/update_weights_from_distributed", message, TIMEOUT_S) for client in self._clients
        ]
        await _all(self._clients, posts, lambda: self._broadcast(flat))

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()

    async def close(self) -> None:
        """Has the servers leave the group, those that still can."""
        message = {"group_name": self._name}
        leaving = (client.control("/destroy_weights_update_group", message, 30.0) for client in self._clients)
        await asyncio.gather(*leaving, return_exceptions=True)
        dist.destroy_process_group(self._group)


async def _all(clients: Sequence[Endpoint], posts: List[Coroutine], collective):
    """The posts, and meanwhile in a thread our side of the collective they start. Returns its result."""
    ours = asyncio.create_task(asyncio.to_thread(collective))
    outcomes = await asyncio.gather(*posts, return_exceptions=True)
    failures = {}
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, (RequestError, RequestRejected, TimeoutError)):
            failures[client.url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    try:
        result = await ours
    except RuntimeError as error:  # torch's, of a peer that left or a time that passed
        raise SyncFailed(failures or {client.url: RequestRejected(str(error)) for client in clients}) from error
    if failures:
        raise SyncFailed(failures)
    return result


def _new_group(store: dist.Store, name: str, world: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Rank 0's side of SGLang's init_custom_process_group, beside the ranks' own group."""
    group, _ = distributed_c10d._new_process_group_helper(
        world, 0, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _address_towards(url: str) -> str:
    """The address of this machine from which it reaches `url`, and at which that machine can reach it."""
    parts = urlsplit(url)
    family = socket.getaddrinfo(parts.hostname, parts.port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port))
        return probe.getsockname()[0]
