"""From the policy's shards to the servers: HF copies of the weights, one folder a version."""

from ulorl_megatron.weight_sync.disk import publish_weights

__all__ = ["publish_weights"]
