"""Losses of the routers themselves, which no token's loss has: balance of experts and size of logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verifier.checks.conditions import NOT_REPLAYED, UPDATED
from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value
from verifier.core.condition import condition, knob, on
from verifier.core.records_trainer import RouterGradients

GRADIENT = Tolerance(
    absolute=1e-4, unit="of the pass's greatest", source="fp32: sums over experts and rows, a softmax and its gradient"
)
ROUNDINGS = 32
"""Roundings of the gradient that comes through the experts, which is taken off, and of the sum that it is taken from.
"""
EPSILON = {"float32": 2.0**-24, "float64": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of one rounding of a gradient, by the type of the logits; weights of experts are float32."""
WHOLE_BATCH = ("aux_loss", "seq_aux_loss")
"""Balancing losses that are a mean over one micro-batch, whose sequences are packed into one."""
RUNNING = "global_aux_loss"
"""Balancing loss over all ranks, with the mean of the experts' rows of the update's micro-batches so far."""

_Counts = Mapping[tuple[int, int, int], tuple[int, np.ndarray]]
"""(group of ranks, layer, micro-batch) -> ranks that recorded it, and [experts] the rows of each."""


ROUTER_LOSSES = NOT_REPLAYED & condition(
    "routers have no losses of their own",
    lambda run: knob(run, "megatron.moe_aux_loss") or knob(run, "megatron.moe_z_loss"),
)  # fmt: skip


@check("LSS006", needs=(RouterGradients,), applies=on(step=UPDATED & ROUTER_LOSSES))
def router_loss_differs_from_formula(trace: Trace) -> Iterator[Comparison]:
    """The routers' own losses pull at their logits as the config asks: by balance of experts, and by the z-loss.

    What it checks: per rank, layer and micro-batch of an update, on up to 32 rows: what is added to the gradient of the
    logits besides what comes through the experts, against the closed form in float64 of the recorded logits, of the
    rows of each expert over all tensor and context-parallel ranks, and of the coefficients of the config. For
    `global_aux_loss` rows are those of all ranks, and an expert's the mean over the update's micro-batches so far.
    Why it matters: a balancing loss that is computed, reported and never differentiated, whose coefficient is not
    applied, or that shrinks with every rank, leaves the loss as it is; experts starve slowly.
    Evidence: loss/routers, and the manifest's config.
    Tolerance and its source: 1e-4 of the pass's greatest, 7.2 standard deviations of a sum of 110,000 terms, and 32
    roundings of the gradient beside it, by the type of the logits.
    Where to look: which ranks recorded their routers, what attaches their losses to their output, their coefficients,
    and what scales them.
    What it does not catch: replayed routes; a gradient that is lost behind the logits; a loss below the noise of logits
    in bf16; what Megatron's definition makes of micro-batches of unequal rows in `global_aux_loss` (Megatron-LM#7213).
    References: Automodel#1408, Megatron-LM#5047, Automodel#3359, Megatron-LM#7452, Megatron-LM#7213.
    """
    asked, mesh = trace.manifest.config.get("megatron"), trace.manifest.mesh
    if not isinstance(asked, Mapping) or mesh is None:
        return
    size = mesh.tp * mesh.cp
    running = asked["moe_load_balancing"] == RUNNING
    updates: dict[tuple[int, str], list[RouterGradients]] = defaultdict(list)
    for item in trace.of(RouterGradients):
        updates[item.version, item.name].append(item)
    for items in updates.values():
        # Of a loss over all ranks, those that hold a layer are one group.
        width = trace.manifest.world_size // mesh.pp if running else size
        counts = _counts_of_groups(trace, items, width)
        if running:
            counts = _so_far(counts)
        for item in items:
            parts = {name: ragged.split(trace.array(item, name), item.kept) for name in ("logits", "found", "size")}
            for at, (layer, number, rows) in enumerate(zip(item.layers, item.numbers, item.rows, strict=True)):
                members, own = counts[_key(item, layer, number, width)]
                where, place = At(Stage.LOSS, item.version), f"micro-batch {number} of layer {layer}"
                subject, absent = f"the number of ranks that recorded {place}", members < width
                what = f"ranks of {place}, rank {item.rank}"
                yield compare_value(where, what, members, width, subject=subject, absent=absent)
                logits = parts["logits"][at].astype(np.float64)
                expected = rows * size * _balance(asked, item, logits, own, rows * width) + _z(asked, logits)
                yield _compared(item, layer, number, parts["found"][at], expected, parts["size"][at])


def _key(item: RouterGradients, layer: int, number: int, size: int) -> tuple[int, int, int]:
    """Ranks of a group lie beside each other: tensor parallelism is fastest, then context; pipeline stages are last."""
    return item.rank // size, layer, number


def _counts_of_groups(trace: Trace, items: list[RouterGradients], size: int) -> _Counts:
    """Ranks of each micro-batch of each layer, and [experts] its rows."""
    found: dict[tuple[int, int, int], tuple[int, np.ndarray]] = {}
    for item in items:
        for layer, number, own in zip(item.layers, item.numbers, trace.array(item, "counts"), strict=True):
            key = _key(item, layer, number, size)
            members, total = found.get(key, (0, np.zeros(len(own), np.int64)))
            found[key] = members + 1, total + own
    return found


def _so_far(counts: _Counts) -> _Counts:
    """Mean of the rows of each expert over the micro-batches of its layer up to each, in the order of their passes."""
    found: dict[tuple[int, int, int], tuple[int, np.ndarray]] = {}
    sums: dict[tuple[int, int], np.ndarray] = {}
    for (group, layer, number), (members, own) in sorted(counts.items(), key=lambda pair: pair[0]):
        sums[group, layer] = sums.get((group, layer), 0) + own
        found[group, layer, number] = members, sums[group, layer] / (number + 1)
    return found


def _balance(
    asked: Mapping[str, Any], item: RouterGradients, logits: np.ndarray, counts: np.ndarray, tokens: int
) -> np.ndarray:
    """[rows, experts] gradient of the balancing loss, coefficient * E * sum over experts of share * mean score.

    Source:
        Switch Transformers (arXiv 2101.03961), equations 4 to 6, for several experts of a row.
    """
    if asked["moe_load_balancing"] not in (*WHOLE_BATCH, RUNNING):
        return np.zeros_like(logits)
    by_score = asked["moe_aux_loss"] * len(counts) * counts / (item.experts_of_row * tokens) / tokens
    if item.scores == "softmax":
        scores = _softmax(logits)
        return np.asarray(scores * (by_score - (scores * by_score).sum(-1, keepdims=True)))
    if item.scores == "sigmoid":
        raw = 1 / (1 + np.exp(-logits))
        slope = raw * (1 - raw)
    else:
        raw = np.sqrt(np.logaddexp(0, logits))
        slope = 0.5 / raw / (1 + np.exp(-logits))
    total = raw.sum(-1, keepdims=True)
    mean = (raw / total * by_score).sum(-1, keepdims=True)
    return np.asarray((by_score - mean) / total * slope)


def _z(asked: Mapping[str, Any], logits: np.ndarray) -> np.ndarray:
    """[rows, experts] gradient of the z-loss, coefficient * the square of the logarithm of the sum of exponentials.

    Source:
        ST-MoE (arXiv 2202.08906), equation 5.
    """
    sums = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return np.asarray(2 * asked["moe_z_loss"] * sums * _softmax(logits))


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)))


def _compared(
    item: RouterGradients, layer: int, number: int, found: np.ndarray, expected: np.ndarray, size: np.ndarray
) -> Comparison:
    most = float(np.abs(expected).max(initial=0.0))
    allowed = GRADIENT.absolute * most + ROUNDINGS * EPSILON[item.dtype] * size[:, None] + 1e-30
    gap = np.abs(found - expected)
    gap = np.where(np.isnan(gap), np.inf, gap)
    row, expert = (int(place) for place in np.unravel_index(int(np.argmax(gap / allowed)), gap.shape))
    bound = float(allowed[row, 0])
    what = f"routers of layer {layer} in micro-batch {number} of {item.name} on rank {item.rank}"
    subject = f"what the router of layer {layer} adds to the gradient of a logit of expert {expert} in {item.name}"
    says = "less what comes through the experts", "balancing and z-loss of the config, float64"
    words = f"{bound:.3g}, {GRADIENT}, and {ROUNDINGS} roundings of {item.dtype}"
    left, right = float(found[row, expert]), float(expected[row, expert])
    same = bool((gap <= allowed).all())
    return compare_value(item, what, left, right, same=same, subject=subject, says=says, allowed=words, bound=bound)
