"""The parallel layout of ranks: integers only."""

from verifier.mesh.mesh import Coordinate, Mesh

__all__ = ["Coordinate", "Mesh"]
