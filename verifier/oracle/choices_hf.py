"""Experts that a trainer's routers chose in an update, against transformers' scores of all experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from verifier.oracle.batches_hf import Batch, batches, hidden_of
from verifier.oracle.routes_hf import Route
from verifier.oracle.streaming_hf import StreamedModel

Measured = Mapping[str, torch.Tensor]
"""Columns of N choices of one router: ``shortfall`` [N], how far the worst chosen expert scores below the K-th best,
and ``noise`` [N], the greatest change of a score by the run's dtype, as shares of the scores' range; ``closed`` [N], an
expert was chosen of a group that is closed to the token, and ``closed_in_dtype`` [N], the same of transformers' own
choice in the run's dtype; ``places`` [N, 2], sequence and position."""


@torch.inference_mode()
def choice_gaps(
    _: object, checkpoint: str, sequences: Sequence[Sequence[int]], routes: Sequence[Sequence[Route]], dtype: str,
    device: str = "cpu",
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure how far chosen experts score below the best; a request of an engine server.

    Both passes of transformers, in the run's dtype and in float32, take the chosen experts, so that each layer's scores
    are those of the tokens that the trainer's router saw, and differ by rounding alone. `checkpoint` has the weights
    before the update. `dtype` is that of the run, less than float32; transformers computes on `device`, "cpu" or
    "cuda". Returns per layer the fields of `RouterChoices` that are its own.
    """
    rounded = _scores(str(checkpoint), sequences, routes, getattr(torch, dtype), device)
    exact = _scores(str(checkpoint), sequences, routes, torch.float32, device)
    routed = [_positions(rows) for rows in routes]
    layers: dict[int, list[Measured]] = defaultdict(list)
    for (batch, scores), (_, low) in zip(exact, rounded, strict=True):
        for layer, chosen in batch.experts.items():
            shape = (*batch.tokens.shape, -1)
            told = (batch, layer, routed, scores[layer].view(shape), low[layer].view(shape), chosen)
            layers[layer] += _measured(*told)
    joined = {
        layer: {key: torch.cat([part[key] for part in parts]) for key in parts[0]} for layer, parts in layers.items()
    }
    return [{"layer": layer, **_summary(found)} for layer, found in sorted(joined.items()) if len(found["places"])]


def _scores(
    checkpoint: str, sequences: Sequence[Sequence[int]], routes: Sequence[Sequence[Route]], dtype: torch.dtype,
    device: str,
) -> list[tuple[Batch, dict[int, torch.Tensor]]]:  # fmt: skip
    """Batches, and by layer [B * T, E] float32 what its router chooses the greatest of."""
    model, found = StreamedModel(checkpoint, dtype, device), []
    for batch in batches(sequences, routes):
        scores: dict[int, torch.Tensor] = {}
        hidden_of(model, batch, lambda layer, values, into=scores: into.update({layer: values.float().cpu()}))
        found.append((batch, scores))
    return found


def _positions(rows: Sequence[Route]) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for position, layer, *_ in rows:
        found[layer].append(position)
    return found


def _measured(
    batch: Batch, layer: int, routed: Sequence[Mapping[int, list[int]]], scores_BTE: torch.Tensor,
    low_BTE: torch.Tensor, chosen_BTK: torch.Tensor,
) -> Iterator[Measured]:  # fmt: skip
    """Measure a layer's choices for each sequence of a batch."""
    for row, place in enumerate(batch.places):
        at = torch.tensor(routed[place].get(layer, []), dtype=torch.int64)
        scores_NE, low_NE, chosen_NK = scores_BTE[row, at], low_BTE[row, at], chosen_BTK[row, at]
        k = chosen_NK.shape[-1]
        open_NE = _is_open(scores_NE)
        most = scores_NE.where(open_NE, -torch.inf).amax(-1)
        span = (most - scores_NE.where(open_NE, torch.inf).amin(-1)).clamp_min(torch.finfo(torch.float32).tiny)
        best_N = scores_NE.where(open_NE, -torch.inf).topk(k).values[:, -1]
        closed_N = ~open_NE.gather(-1, chosen_NK).all(-1)
        shortfall_N = (best_N - scores_NE.gather(-1, chosen_NK).amin(-1)) / span
        both_NE = open_NE & _is_open(low_NE)
        change_NE = (low_NE - scores_NE).abs().where(both_NE, 0.0)
        yield {
            "shortfall": shortfall_N.where(~closed_N, 0.0).clamp_min(0.0), "noise": change_NE.amax(-1) / span,
            "closed": closed_N, "closed_in_dtype": ~open_NE.gather(-1, low_NE.topk(k).indices).all(-1),
            "places": torch.stack([torch.full_like(at, place), at], dim=-1),
        }  # fmt: skip


def _is_open(scores: torch.Tensor) -> torch.Tensor:
    """Experts that may be chosen: those of groups that are not get a score of -inf, of DeepSeek-V2 exactly 0."""
    return scores.isfinite() & (scores != 0)


def _summary(found: Measured) -> dict[str, Any]:
    shortfall, closed = found["shortfall"], found["closed"]
    return {
        "num_tokens": len(shortfall), "shortfall": float(shortfall.max()), "noise": float(found["noise"].max()),
        "closed": int(closed.sum()), "closed_in_dtype": int(found["closed_in_dtype"].sum()),
        "place": found["places"][(shortfall + closed).argmax()].tolist(),
    }  # fmt: skip
