"""What the loop calls after each update."""

from pathlib import Path
from typing import Optional

from ulorl_megatron.config.schema import Config, WeightSyncKind
from ulorl_megatron.launch import OnFirstRank, Ranks
from ulorl_megatron.policy import Policy
from ulorl_megatron.weight_sync import disk
from ulorl_megatron.weight_sync.distributed import DistributedSync


class WeightSync:
    """The servers' copy of the policy, by servers.weight_sync. Collective; a context manager."""

    def __init__(self, config: Config, policy: Policy, ranks: Ranks, generation: OnFirstRank):
        self._config, self._policy, self._ranks, self._generation = config, policy, ranks, generation
        broadcast = config.servers.weight_sync is WeightSyncKind.distributed
        self._distributed: Optional[DistributedSync] = DistributedSync(policy, ranks) if broadcast else None

    def __enter__(self) -> "WeightSync":
        return self

    def __exit__(self, kind, *exception) -> None:
        if self._distributed is not None and kind is None:  # after an error the other ranks may be gone
            self._distributed.close()

    def __call__(self, version: int) -> None:
        """Every server that gets work holds the policy's weights as `version`, and has confirmed it.

        Raises UserError when no server is left, and when a comparison by checksums (servers.verify_weights_every)
        finds other weights in one.
        """
        every = self._config.servers.verify_weights_every
        compare = every > 0 and version % every == 0
        if self._distributed is not None:
            self._distributed(self._generation, version)
        if self._distributed is None or compare:
            folder = self._publish(version)
        if self._distributed is None:
            self._generation.load_weights(folder, version)
        if compare:
            self._generation.verify_weights(folder)

    def _publish(self, version: int) -> Path:
        config = self._config
        weights = Path(config.run.dir) / "weights"
        return disk.publish_weights(
            self._policy, self._ranks, config.model, weights, version, config.checkpoint.keep_weights
        )
