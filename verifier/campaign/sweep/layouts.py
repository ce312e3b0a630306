"""Layouts that a sweep tries, and those that the model or Megatron refuses, each with its reason; loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verifier.config.sweep import SweepConfig
from verifier.config.training import BatchOptions, DataOptions, TrainConfig
from verifier.data.rollout import Rollout, make_rollout
from verifier.errors import UsageError
from verifier.launch.fork_launcher import require_ranks
from verifier.megatron.token_layout import Alignment
from verifier.mesh import Mesh
from verifier.mesh.mesh import axes_of
from verifier.model.families import num_experts_of, size_if_any
from verifier.model.mesh_fit import validate
from verifier.platform import Tier
from verifier.report.gate_result import LeftOut
from verifier.trainer.fitting import require_fit

LONGEST = 2048
"""Tokens of the longest made-up rollout where nothing else is said."""
RECOMPUTE = {"none": ("none",), "full": ("full",), "both": ("none", "full")}
"""Value of `--recompute` -> values of `megatron.recompute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptLayout:
    """One mesh with or without recomputation; the search for its largest budget is its own."""

    mesh: Mesh
    recompute: str
    """Value of `megatron.recompute`."""

    @property
    def name(self) -> str:
        """Name in tables and rows, such as "tp2 ep2, recompute full"."""
        return self.mesh.label() + ("" if self.recompute == "none" else f", recompute {self.recompute}")

    @property
    def multiple(self) -> int:
        """Multiple of tokens that a pack is padded to."""
        return Alignment(tp=self.mesh.tp, cp=self.mesh.cp, sp=self.mesh.tp > 1).total_multiple

    def micro_batches(self, asked: int) -> int:
        """Micro-batches of a data-parallel rank: as asked, or the next multiple that interleaved stages take."""
        multiple = self.mesh.pp if self.mesh.vpp > 1 else 1
        return -(-asked // multiple) * multiple


def train_config(config: SweepConfig, layout: SweptLayout, max_tokens: int) -> TrainConfig:
    """Return the config of the training run whose steps a trial takes."""
    size = layout.mesh.dp * layout.micro_batches(config.micro_batches)
    return TrainConfig(
        model=config.model, dtype=config.dtype, mesh=layout.mesh, seed=config.seed,
        megatron=replace(config.megatron, recompute=layout.recompute), batch=BatchOptions(max_tokens=max_tokens),
        data=DataOptions(batch_size=size), run=config.run / "trials",
    )  # fmt: skip


def layouts_of(config: SweepConfig, sizes: Mapping[str, Any], tier: Tier) -> tuple[list[SweptLayout], list[LeftOut]]:
    """Return the layouts to try, and those that are refused before anything starts.

    Raises:
        UsageError: `--mesh` that cannot be read, or more ranks than can be started.
    """
    valid: list[SweptLayout] = []
    invalid: list[LeftOut] = []
    for name, axes in _asked(config, sizes):
        try:
            mesh = Mesh.fitting(**axes)
            validate(sizes, mesh)
            require_ranks(mesh.world_size)
            found = [SweptLayout(mesh=mesh, recompute=kind) for kind in RECOMPUTE[config.recompute]]
            for layout in found:
                require_fit(train_config(config, layout, first_budget(config, layout)), sizes, tier)
            valid += [layout for layout in found if layout not in valid]
        except UsageError as refused:
            invalid.append(LeftOut(what=name, reason=str(refused)))
    return valid, invalid


def first_budget(config: SweepConfig, layout: SweptLayout) -> int:
    """Return `--least-tokens`, raised to the multiple that the mesh pads packs to."""
    return -(-config.least_tokens // layout.multiple) * layout.multiple


def longest_of(config: SweepConfig, sizes: Mapping[str, Any]) -> int:
    """Return the length of the longest made-up rollout.

    Raises:
        UsageError: `--longest` is above the model's greatest length.
    """
    most = size_if_any(sizes, "max_position_embeddings")
    if config.longest is None:
        return LONGEST if most is None else min(LONGEST, most)
    if most is not None and config.longest > most:
        raise UsageError(f"--longest is {config.longest:,}, above the {most:,} positions of the model: lower it")
    return config.longest


def _asked(config: SweepConfig, sizes: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    if config.meshes:
        yield from ((text, axes_of(text)) for text in config.meshes)
        return
    ranks = config.ranks or 1
    require_ranks(ranks)
    mixture = bool(num_experts_of(sizes))
    for tp, pp, cp in itertools.product(_divisors(ranks), repeat=3):
        if ranks % (tp * pp * cp):
            continue
        dp = ranks // (tp * pp * cp)
        dense = tp * cp * dp
        experts = [
            (ep, etp) for etp in sorted({1, tp}) for ep in _divisors(dense) if dense % (ep * etp) == 0
        ] if mixture else [(1, 1)]  # fmt: skip
        for (ep, etp), vpp in itertools.product(experts, (1, 2) if pp > 1 else (1,)):
            axes = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp, "dp": dp}
            yield " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "1 rank", axes


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


SHORTEST = 8
"""Part of the longest rollout's length that the shortest one has."""


def lengths_of(budget: int, *, longest: int, multiple: int, seed: int) -> list[int]:
    """Draw lengths whose sum, each padded to `multiple`, is the budget.

    Args:
        budget: tokens of a micro-batch, padding included; a multiple of `multiple`.
        longest: greatest length.
        multiple: tokens that each rollout is padded to a multiple of.
        seed: of the draw.
    """
    random = np.random.default_rng([seed, budget, multiple])
    most, left = max(1, longest // multiple), budget // multiple
    lengths: list[int] = []
    while left:
        rows = min(left, int(random.integers(max(1, most // SHORTEST), most + 1)))
        lengths.append(max(1, rows * multiple - int(random.integers(multiple))))
        left -= rows
    return lengths


def made_up(budget: int, *, copies: int, longest: int, multiple: int, vocabulary: int, seed: int) -> list[Rollout]:
    """Make the rollouts of a step, which `split_by_tokens` packs into `copies` full micro-batches.

    Every micro-batch has rollouts of the same lengths: then each is filled to the last token, since rollouts go from
    the longest to the shortest, each to the emptiest micro-batch. A quarter of each rollout is its prompt. Token ids
    are below `vocabulary`; for the lengths see `lengths_of`.
    """
    random = np.random.default_rng([seed, budget])
    rollouts = []
    for number, length in enumerate(lengths_of(budget, longest=longest, multiple=multiple, seed=seed) * copies):
        tokens, prompt = random.integers(vocabulary, size=length), max(1, length // 4)
        rollouts.append(make_rollout(f"made-up {number}", tokens[:prompt], tokens[prompt:]))
    return rollouts
