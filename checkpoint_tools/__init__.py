"""HF and Megatron-Core checkpoints: one declarative map, converters that prove what they did, a command
line."""
