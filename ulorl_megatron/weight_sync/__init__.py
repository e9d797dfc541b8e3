"""From the policy's shards to the servers: by an HF folder of each version, or by broadcast."""

from ulorl_megatron.weight_sync.disk import publish_weights
from ulorl_megatron.weight_sync.sync import WeightSync

__all__ = ["WeightSync", "publish_weights"]
