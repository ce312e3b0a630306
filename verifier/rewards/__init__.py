"""Rewards: a completion and the gold answer to a number."""
