"""From one command to the ranks of a run, and how they wait for each other."""

from ulorl_megatron.launch.local import FOLLOWER_EXIT, is_rank, start_ranks
from ulorl_megatron.launch.ranks import FirstRankFailed, OnFirstRank, Ranks
from ulorl_megatron.launch.stop import STOPPED_EXIT, StopSignals, stop_asked

__all__ = [
    "FOLLOWER_EXIT",
    "STOPPED_EXIT",
    "FirstRankFailed",
    "OnFirstRank",
    "Ranks",
    "StopSignals",
    "is_rank",
    "start_ranks",
    "stop_asked",
]
