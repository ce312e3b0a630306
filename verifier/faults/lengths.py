"""Reward of trials that no second reader knows: the length of an answer."""

from __future__ import annotations


def length(completion: str, answer: str) -> float:
    """Characters of a completion, whatever the gold answer is."""
    return float(len(completion))
