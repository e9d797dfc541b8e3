"""Rollouts in simulated time: the real pools, scheduler and server pool over servers that are a formula."""
