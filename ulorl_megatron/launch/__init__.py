"""From one command to the ranks of a run, and how they wait for each other."""

from ulorl_megatron.launch.local import FOLLOWER_EXIT, is_rank, start_ranks
from ulorl_megatron.launch.ranks import FirstRankFailed, OnFirstRank, Ranks

__all__ = ["FOLLOWER_EXIT", "FirstRankFailed", "OnFirstRank", "Ranks", "is_rank", "start_ranks"]
