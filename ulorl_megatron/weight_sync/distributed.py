"""Weights by broadcast: every rank sends the HF tensors it owns straight to the servers, in flat buckets.

No rank ever holds the whole model, and nothing touches a disk. The servers take one bucket at a time: two ranks that
broadcast at once could be answered in different orders by two servers, and wait for ever.
"""

import asyncio
import logging
import uuid
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ulorl_megatron.launch import OnFirstRank, Ranks
from ulorl_megatron.policy import Policy
from ulorl_megatron.rollout.client import Endpoint
from ulorl_megatron.weight_sync.channel import Channel, SyncFailed

log = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20
_TURN = "weight-bucket"


class DistributedSync:
    """Use one object for a whole run: the channels stay open between syncs. Every method is collective."""

    def __init__(self, policy: Policy, ranks: Ranks, *, bucket_bytes: int = BUCKET_BYTES):
        self._policy, self._ranks, self._bucket_bytes = policy, ranks, bucket_bytes
        self._urls: List[str] = []
        self._clients: List[Endpoint] = []
        self._channel: Optional[Channel] = None
        self._runner = asyncio.Runner()

    def __call__(self, generation: OnFirstRank, version: int) -> None:
        """Every server that gets work from now on holds the policy's weights, and has confirmed `version`.

        A server that fails on the way is left out, and the others get everything again, since nobody knows what a
        broken broadcast has left in them. Raises WeightUpdateFailed when none is left.
        """
        while True:
            urls = generation.open_weight_update()
            if urls != self._urls:
                self._disconnect()
                self._urls, self._clients = urls, [Endpoint(url) for url in urls]
            failures = self._send_all(version)
            generation.close_weight_update(version, failures)
            if not failures:
                return
            self._disconnect()

    def close(self) -> None:
        self._disconnect()
        self._runner.close()

    def _send_all(self, version: int) -> Dict[str, str]:
        """This rank's tensors, bucket by bucket; which servers to leave out, over all ranks."""
        failed: Optional[SyncFailed] = None
        names: List[str] = []
        tensors: List[Tensor] = []
        size = 0
        for name, tensor in self._policy.hf_tensors():  # to its end, for the ranks that gather with this one
            if failed is None and tensors and size + tensor.nbytes > self._bucket_bytes:
                failed = self._send(names, tensors, version)
                names, tensors, size = [], [], 0
            if failed is None:
                names.append(name)
                tensors.append(tensor)
                size += tensor.nbytes
        if failed is None and tensors:
            failed = self._send(names, tensors, version)
        found = [error for error in self._ranks.gather(_told(failed)) if error]
        gone = {url: reason for failures, urls in found for url, reason in failures.items() if url in urls}
        everyone = {url: reason for failures, _ in found for url, reason in failures.items()}
        return gone or everyone

    def _send(self, names: List[str], tensors: List[Tensor], version: int) -> Optional[SyncFailed]:
        with self._ranks.exclusive(_TURN):
            try:
                if self._channel is None:
                    name = f"ulorl-{uuid.uuid4().hex}"
                    backend = "nccl" if torch.cuda.is_available() else "gloo"
                    self._channel = self._runner.run(Channel.open(self._clients, name, backend))
                self._runner.run(self._channel.send(names, tensors, version))
            except SyncFailed as error:
                log.error("%s", error)
                return error
        return None

    def _disconnect(self) -> None:
        if self._channel is not None:
            with self._ranks.exclusive(_TURN):
                self._runner.run(self._channel.close())
        for client in self._clients:
            self._runner.run(client.close())
        self._channel, self._clients, self._urls = None, [], []


def _told(failed: Optional[SyncFailed]) -> Optional[Tuple[Dict[str, str], List[str]]]:
    return None if failed is None else (failed.failures, failed.gone)
