"""Score biases of routers: each step moves them by the tokens that experts were given, and by nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import UPDATED
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_array, compare_value
from verifier.core.condition import condition, knob, on
from verifier.core.records_trainer import RouterBalance

BALANCED = condition(
    "routers have no score biases", lambda run: run.facts.score_bias or knob(run, "megatron.moe_bias_update_rate")
)  # fmt: skip


@check("TRN004", needs=(RouterBalance,), applies=on(step=UPDATED & BALANCED))
def score_bias_moved_wrong(trace: Trace) -> Iterator[Comparison]:
    """Each step moves each router's score bias by rate * sign(mean - tokens of the expert), bit by bit.

    What it checks: per update, layer and rank, the bias after the step against that before it on the layer's first
    rank, moved by the rate that the config asks for: up where an expert was given fewer tokens than the mean, down
    where it was given more. And that before it against what the update before left, in the same process. Tokens are
    summed over all ranks that hold the layer, from the outputs of their routers in the forward passes of the update.
    Every rank of a stage must have recorded the layer.
    Why it matters: the bias chooses experts, and has no gradient that a comparison of gradients would see. Counts of
    one rank, counts that an evaluation left, or a bias in bf16 unbalance experts slowly, and ranks drift apart.
    Evidence: train/balance ("before", "after", "tokens").
    Tolerance and its source: bitwise; one float32 sum of the bias and the rate, and integers of which a sign is taken.
    Where to look: whose tokens were counted, over which ranks, what touches the routers' buffers between two steps, and
    the bias's dtype.
    What it does not catch: counts that are wrong by one factor for all experts, as where recomputation counts again: no
    sign changes. A bias that moves before the first step of a process (CKP001 across a resume), or on its way to the
    engine (ENG001).
    References: torchtitan#4148, torchtitan#3386, torchtitan#3686, Megatron-LM#1482, Megatron-LM#7081, miles#811.
    """
    held: dict[tuple[int, str, int], list[tuple[RouterBalance, int]]] = defaultdict(list)
    for item in trace.of(RouterBalance):
        for row, layer in enumerate(item.layers):
            held[item.version, item.name, layer].append((item, row))
    mesh = trace.manifest.mesh
    num_ranks = trace.manifest.world_size // (mesh.pp if mesh else 1)
    for (version, name, layer), found in sorted(held.items()):
        found.sort(key=lambda pair: pair[0].rank)
        place, what, absent = At(Stage.TRAIN, version), f"ranks of layer {layer} in {name}", len(found) < num_ranks
        subject = f"the number of ranks that counted the tokens of layer {layer} in {name}"
        yield compare_value(place, what, len(found), num_ranks, subject=subject, absent=absent)
        tokens = np.sum([trace.array(item, "tokens")[row].astype(np.int64) for item, row in found], axis=0)
        first, at = found[0]
        before, rate = trace.array(first, "before")[at], np.float32(first.rate)
        signs = np.sign(tokens.sum() - len(tokens) * tokens)
        expected = before + signs.astype(np.float32) * rate
        yield from (_kept(trace, item, row, layer) for item, row in found if "left" in trace.arrays(item))
        for item, row in found:
            after = trace.array(item, "after")[row]
            what = f"layer {layer} in {name} on rank {item.rank}"
            subject = f"the score bias of layer {layer} after {name}"
            says = "", f"what it was, and {first.rate:g} * sign({tokens.mean():,.1f} - tokens of the expert)"
            yield compare_array(item, what, after, expected, unit="expert", subject=subject, says=says)


def _kept(trace: Trace, item: RouterBalance, row: int, layer: int) -> Comparison:
    """Compare the bias before an update with what the update before left."""
    """Compare the bias before an update with what the update before left."""
    left, before = (trace.array(item, name)[row] for name in ("left", "before"))
    what = f"layer {layer} before {item.name} on rank {item.rank}"
    says = ("the live router", "what the update before left")
    subject = f"the score bias of layer {layer} before {item.name}"
    return compare_array(item, what, before, left, unit="expert", subject=subject, says=says)
