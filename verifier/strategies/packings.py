"""Whole packing problems: rollouts and the alignment that they are packed for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from verifier.data.rollout import Rollout
from verifier.strategies.rollouts import length_profiles, rollouts
from verifier.train.token_layout import FP8_RECIPES, Alignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Something to pack. Its repr names sizes and lengths, so that a failing example reads at a glance."""

    rollouts: list[Rollout]
    alignment: Alignment

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, response) lengths in pack order."""
        return [(rollout.prompt_length, rollout.response_length) for rollout in self.rollouts]

    def __repr__(self) -> str:
        sizes = self.alignment
        return f"Packing(tp={sizes.tp}, cp={sizes.cp}, sp={sizes.sp}, fp8={sizes.fp8!r}, lengths={self.lengths})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def packings(
    draw: st.DrawFn,
    *,
    max_tp: int = 8,
    max_cp: int = 8,
    max_rollouts: int = 6,
    max_tokens: int = 40,
    without_sp: bool = False,
    fp8: bool = False,
    num_moe_layers: int = 0,
) -> Packing:
    """Rollouts and an alignment; shrinks to one rank and one rollout of one token.

    Args:
        draw: given by Hypothesis.
        max_tp: greatest tensor-parallel size.
        max_cp: greatest context-parallel size.
        max_rollouts: most rollouts in a pack.
        max_tokens: longest rollout.
        without_sp: whether packings without sequence parallelism occur too; trainers turn it on whenever tp > 1.
        fp8: whether fp8 recipes occur; they pad to hundreds of rows.
        num_moe_layers: layers with routes; 0 for none.
    """
    tp = draw(st.integers(1, max_tp), label="tp")
    cp = draw(st.integers(1, max_cp), label="cp")
    alignment = Alignment(
        tp=tp,
        cp=cp,
        sp=draw(st.sampled_from([True, False]), label="sp") if without_sp and tp > 1 else True,
        fp8=draw(st.sampled_from(FP8_RECIPES), label="fp8") if fp8 else "",
    )
    lengths = length_profiles(
        max_rollouts=max_rollouts, max_tokens=max_tokens, multiple=min(alignment.sequence_multiple, max_tokens)
    )
    batch = draw(rollouts(lengths=lengths, num_moe_layers=num_moe_layers))
    return Packing(rollouts=batch, alignment=alignment)
