"""Watching a run: progress lines, TensorBoard, metrics.jsonl, the final summary."""

from ulorl_megatron.monitor.clock import Clock
from ulorl_megatron.monitor.monitor import Monitor, finished

__all__ = ["Clock", "Monitor", "finished"]
