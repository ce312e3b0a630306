"""Lengths, rollouts, packings and step-wise trajectories, from the plain to the awkward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from verifier.data.rollout import MISSING_ROUTE, Rollout, make_rollout
from verifier.megatron.token_layout import FP8_RECIPES, Alignment


@st.composite
def length_profiles(
    draw: st.DrawFn, *, max_rollouts: int = 6, max_tokens: int = 40, multiple: int = 1
) -> list[tuple[int, int]]:
    """(prompt, response) lengths of a batch.

    Profiles: any lengths; totals on, just below and just above each alignment edge; anti-correlated ones, where all
    totals are alike and a long prompt has a short response; and single tokens. Shrinks to one rollout of one token.
    `max_tokens` is of prompt and response together; `multiple` is the distance between alignment edges, in tokens.
    """
    profile = draw(st.sampled_from(["plain", "edge", "anti-correlated", "one token"]), label="lengths")
    prompts_and_rest = draw(
        st.lists(
            st.tuples(st.integers(1, max_tokens), st.integers(0, max_tokens - 1)), min_size=1, max_size=max_rollouts
        )
    )
    lengths: list[tuple[int, int]] = []
    for prompt, rest in prompts_and_rest:
        total = prompt + rest % (max_tokens - prompt + 1)
        if profile == "edge":
            edge = -(-total // multiple) * multiple
            total = max(1, min(edge + rest % 3 - 1, max_tokens))
        elif profile == "anti-correlated":
            total = sum(lengths[0]) if lengths else total
        elif profile == "one token":
            total = 1
        prompt = min(prompt, total)
        lengths.append((prompt, total - prompt))
    return lengths


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    lengths: st.SearchStrategy[list[tuple[int, int]]] | None = None,
    num_moe_layers: int = 0,
    topk: int = 2,
    num_experts: int = 8,
) -> list[Rollout]:
    """A batch of rollouts in which no two tokens have the same id, log-probability or weight version neighbours.

    Tokens are numbered from 1 through the batch, so a token that turns up in the wrong place is known by its id. Some
    rollouts are multi-turn (tool output between sampled tokens), some are masked out, some were sampled while the
    weights changed, and the engine may lack the route of a last token. `lengths` are `length_profiles()` by default;
    `num_moe_layers` is the number of layers with routes.
    """
    pairs = draw(lengths if lengths is not None else length_profiles())
    traits = st.tuples(st.sampled_from(["one turn", "tool", "masked"]), st.integers(0, 3))
    batch, next_token = [], 1
    for at, (prompt, response) in enumerate(pairs):
        kind, first_version = draw(traits, label=f"rollout {at}")
        total = prompt + response
        tokens = np.arange(next_token, next_token + total)
        sampled = np.arange(response) % 3 != 1 if kind == "tool" else np.ones(response, bool)
        batch.append(
            make_rollout(
                f"r{at}",
                tokens[:prompt],
                tokens[prompt:],
                group=f"g{at // 2}",
                sampled=sampled,
                mask=np.zeros(response, bool) if kind == "masked" else sampled,
                logprobs=-tokens[prompt:] / np.float32(256),
                versions=first_version + np.arange(response) // 4,
                reward=float(at),
                routes=_routes(tokens, num_moe_layers, topk, num_experts) if num_moe_layers else None,
            )
        )
        next_token += total
    return batch


def _routes(tokens: Sequence[int] | np.ndarray, num_moe_layers: int, topk: int, num_experts: int) -> np.ndarray:
    """[L, M, K] distinct experts that differ between neighbouring tokens and layers; the last token has none."""
    first_LM1 = np.asarray(tokens)[:, None, None] + 3 * np.arange(num_moe_layers)[None, :, None]
    routes = ((first_LM1 + np.arange(topk)) % num_experts).astype(np.int16)
    routes[-1] = MISSING_ROUTE
    return routes


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

    `without_sp` draws packings without sequence parallelism too, which trainers turn on whenever tp > 1; `fp8` draws
    fp8 recipes, which pad to hundreds of rows; `num_moe_layers` is the number of layers with routes.
    """
    tp = draw(st.integers(1, max_tp), label="tp")
    cp = draw(st.integers(1, max_cp), label="cp")
    sp = draw(st.sampled_from([True, False]), label="sp") if without_sp and tp > 1 else True
    recipe = draw(st.sampled_from(FP8_RECIPES), label="fp8") if fp8 else ""
    alignment = Alignment(tp=tp, cp=cp, sp=sp, fp8=recipe)
    lengths = length_profiles(
        max_rollouts=max_rollouts, max_tokens=max_tokens, multiple=min(alignment.sequence_multiple, max_tokens)
    )
    batch = draw(rollouts(lengths=lengths, num_moe_layers=num_moe_layers))
    return Packing(rollouts=batch, alignment=alignment)
