"""Hypothesis strategies for meshes, lengths, rollouts, packings, trajectories, plans and shards.

They shrink towards one rank, one rollout, one token. `docs/examples/test_your_packer.py` is an example to paste.
"""

from verifier.strategies.layouts import chunk_plans, meshes, shards, stages
from verifier.strategies.rollouts import Packing, length_profiles, packings, rollouts

__all__ = [
    "Packing", "chunk_plans", "length_profiles", "meshes", "packings", "rollouts", "shards", "stages",
]  # fmt: skip
