"""Floating-point operations of a training step, and their share of what the GPUs can do: MFU.

Operations of a step, forward and backward, recomputation not counted:

    6 N T + sum over sequences of 6 L W n (n + 1) / 2

    N  elements of the matrices that a token is multiplied by: of the experts those that it visits, and the output head
    T  tokens;  n  tokens of a sequence;  L  layers with attention
    W  width of all heads' queries plus that of their values: scores and their use cost 2 W forward for each pair

With adapters the frozen weights have no gradient: 4 N T. Adapters themselves are not counted, nor is the scan of
state-space layers.

Source:
    Chowdhery et al., PaLM, arXiv:2204.02311, appendix B (6 N, and 12 L H Q T of attention that is not causal).
    NVIDIA H100 and H200 datasheets: bf16 dense, SXM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifier.config.training import TrainConfig
from verifier.model.families import Content, Scope, family_of, layer_scopes, sizes_of

PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Name of a GPU -> bf16 dense operations a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Cost of training tokens of one model."""

    matrices: int
    """Elements that a token is multiplied by."""
    pair: int
    """Forward operations of attention for a pair of tokens, over all layers."""
    passes: int = 3
    """Matrix products of a weight: forward, gradient of its input, and of itself unless it is frozen."""

    def of(self, lengths: Iterable[int]) -> int:
        """Operations of sequences of these lengths, forward and backward."""
        lengths = list(lengths)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 2 * self.passes * self.matrices * sum(lengths) + 3 * self.pair * pairs


def training_flops(sizes: Mapping[str, Any], *, frozen: bool = False) -> TrainingFlops | None:
    """Cost of training the model of a config.json; None for a family that the table does not have.

    Args:
        sizes: config.json.
        frozen: only adapters are trained.
    """
    family = family_of(sizes)
    if family is None:
        return None
    named = sizes_of(sizes)
    visited = int(sizes.get("num_experts_per_tok") or 0)
    matrices, attention = named["vocab"] * named["hidden"], 0
    hybrid = any(row.scope is Scope.ATTENTION for row in family.tensors)
    for scopes in layer_scopes(sizes):
        attention += Scope.ATTENTION in scopes or not hybrid
        for row in family.tensors:
            if row.scope in scopes and row.content is Content.MATRIX:
                count = visited if row.scope is Scope.EXPERT else 1
                matrices += count * math.prod(named[dim] for dim in row.dims)
    width = named["mla_q"] + named["mla_out"] if "mla_q" in named else 2 * named["q"]
    return TrainingFlops(matrices=matrices, pair=2 * attention * width, passes=2 if frozen else 3)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Cost of a run's steps against what its GPUs can do."""

    flops: TrainingFlops
    peak: float
    """Operations a second of all GPUs that train."""

    def facts(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Metrics of a step's training: sequences of these lengths in so many seconds; empty for a step without."""
        if not lengths or not seconds:
            return {}
        return {"mfu": self.flops.of(lengths) / seconds / self.peak}


def utilisation_of(config: TrainConfig, sizes: Mapping[str, Any], gpus: Sequence[str]) -> Utilisation | None:
    """Utilisation of a run; None without GPUs, with one whose peak is not known, in fp32, or for an unknown family.

    Args:
        config: of the run.
        sizes: config.json of its model.
        gpus: names of the GPUs, the trainer's first.
    """
    used = gpus[: config.mesh.world_size]
    if not used or config.dtype != "bfloat16" or any(name not in PEAKS for name in used):
        return None
    flops = training_flops(sizes, frozen=bool(config.lora.rank))
    return None if flops is None else Utilisation(flops, sum(PEAKS[name] for name in used))
