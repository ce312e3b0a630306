"""Choices of routers, and losses of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value, times
from verifier.core.condition import condition, knob, on
from verifier.stages.checks_conditions import (
    EXPERTS,
    GRADIENTS,
    LOWER,
    NO_ADAPTER,
    NOT_REPLAYED,
    SAMPLED,
    STEPPED,
    UPDATED,
)
from verifier.stages.loss.records import RouterChoices, RouterGradients

NOISES = 4
"""Times the greatest noise of a score that a chosen one may lie below the best: two scores move, in two programs."""
SPARE = 8
"""Tokens that may depart from transformers' groups of experts where transformers' own dtype makes none depart."""


@check(
    "LSS005", needs=(RouterChoices,),
    applies=on(
        roundtrip=EXPERTS & LOWER & NO_ADAPTER & STEPPED & GRADIENTS,
        step=EXPERTS & LOWER & NOT_REPLAYED & SAMPLED,
    ),
)  # fmt: skip
def router_chooses_experts_far_from_the_best(trace: Trace) -> Iterator[Comparison]:
    """In an update in less than fp32, each token's experts are the best ones, but for ties that rounding decides.

    What it checks: the experts that the trainer's routers chose in the update, layer by layer, against the scores that
    transformers in fp32 gives all experts for the same tokens; in the layers before, it takes the trainer's experts.
    The worst chosen expert may score below the K-th best by what rounding moves two scores. Tokens with an expert of a
    group that transformers closes to them (DeepSeek) are counted.
    Why it matters: in less than fp32 gradients are judged under the experts that the trainer chose (LSS001), so a
    router that chooses wrongly in updates alone, by noise, capacity or a stale bias, changes no other comparison.
    Evidence: loss/choices (a measurement by the oracle's process, from the experts that each rank's routers used).
    Tolerance and its source: four times the greatest change of any score of the update by the run's dtype, by
    transformers itself under the same routes . Clean runs were within 0.72 of that change. Of groups twice as many
    tokens as transformers' own choice in that dtype has, four standard deviations, and 8.
    Where to look: what the router adds to its scores while it trains: noise, a bias, a capacity.
    What it does not catch: a choice between experts whose scores are nearer than that; choices in passes that score
    (LGP001) or replay (RPL001); in fp32 LSS001 sees a wrong choice by its gradient.
    References: transformers#41663.
    """
    noises: dict[tuple[int, str], float] = defaultdict(float)
    for item in trace.of(RouterChoices):
        key = item.version, item.name
        noises[key] = max(noises[key], float(item.noise))
    for item in trace.of(RouterChoices):
        allowed = NOISES * noises[item.version, item.name]
        most = 2 * item.closed_in_dtype
        most = math.floor(most + 4 * math.sqrt(most)) + SPARE
        gap, sequence, position = float(item.shortfall), *item.place
        share, same = max(times(gap, allowed), item.closed / most), gap <= allowed and item.closed <= most
        sentence = f"a router of layer {item.layer} chose an expert that scores {gap:.3g} of the scores' range below "
        sentence += f"the best ones, for token {position} of sequence {sequence}"
        if item.closed > most:
            sentence += f"; {item.closed:,} tokens have one of a group that is closed to them"
        words = f"{allowed:.3g} of the range ({NOISES} times the noise of a score in the run's dtype), {most:,} tokens"
        sides = f"{gap:.3g}; {item.closed:,} of {item.num_tokens:,} tokens outside of their groups", "the best experts"
        at, what = At(Stage.LOSS, item.version), f"layer {item.layer}, {item.name}"
        found = compare_value(at, what, *sides, same=same, sentence=sentence, allowed=words)
        yield replace(found, share=share)


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
