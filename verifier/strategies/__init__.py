"""Hypothesis strategies for meshes, lengths, rollouts, packings, trajectories, plans and shards.

They shrink towards one rank, one rollout, one token. `docs/examples/test_your_packer.py` is an example to paste.
"""

from verifier.strategies.meshes import meshes, stages
from verifier.strategies.packings import Packing, packings
from verifier.strategies.plans import chunk_plans, shards
from verifier.strategies.rollouts import length_profiles, rollouts, step_lists

__all__ = [
    "Packing", "chunk_plans", "length_profiles", "meshes", "packings", "rollouts", "shards", "stages", "step_lists",
]  # fmt: skip
