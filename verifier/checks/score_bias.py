"""Score biases of routers: each step moves them by the tokens that experts were given, and by nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import UPDATED
from verifier.checks.content import owner_of
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import condition, knob, on
from verifier.core.records_trainer import RouterBalance
from verifier.core.stage import Stage
from verifier.core.trace import Trace

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
    With a rate of 0 no bit moves. Every rank of a stage must have recorded the layer.
    Why it matters: the bias chooses experts, and has no gradient that a comparison of gradients would see. Counts of
    one rank, counts that an evaluation left, or a bias in bf16 unbalance experts slowly, and ranks drift apart.
    Evidence: train/balance ("before", "after", "tokens").
    Tolerance and its source: bitwise; one float32 sum of the bias and the rate, and integers of which a sign is taken.
    Megatron counts in float32, which is exact up to 2**24 tokens of a layer.
    What it does not catch: counts that are wrong by one factor for all experts, as where recomputation counts again:
    no sign changes. A bias that moves before the first step of a process (CKP001 across a resume), or on its way to
    the engine (ENG001).
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
        yield Comparison(
            what=f"ranks of layer {layer} in {name}", same=len(found) == num_ranks, stage=Stage.TRAIN, version=version,
            badness=1.0,
            sentence=f"{len(found)} ranks counted the tokens of layer {layer} in {name}, it has {num_ranks}",
            expected=f"{num_ranks} ranks", actual=f"{len(found)} ranks", allowed="exact (counts)",
            hint="look at which ranks recorded their routers", absent=len(found) < num_ranks,
        )  # fmt: skip
        tokens = np.sum([trace.array(item, "tokens")[row].astype(np.int64) for item, row in found], axis=0)
        first, at = found[0]
        before, rate = trace.array(first, "before")[at], np.float32(first.rate)
        signs = np.sign(tokens.sum() - len(tokens) * tokens)
        expected = before + signs.astype(np.float32) * rate
        yield from (_kept(trace, item, row, layer) for item, row in found if "left" in trace.arrays(item))
        for item, row in found:
            after = trace.array(item, "after")[row]
            bad = np.flatnonzero(after.view(np.int32) != expected.view(np.int32))
            worst = int(bad[0]) if bad.size else 0
            mean = tokens.mean()
            yield Comparison(
                what=f"layer {layer} in {name} on rank {item.rank}", same=not bad.size, stage=Stage.TRAIN,
                version=version, badness=bad.size / len(tokens), owner=owner_of(item),
                sentence=f"{name} leaves a score bias of {after[worst]:.9g} for expert {worst} of layer {layer}, it "
                f"should be {expected[worst]:.9g}",
                expected=f"{before[worst]:.9g} before it, and {first.rate:g} * {signs[worst]:+d}: {tokens[worst]:,} "
                f"tokens, {mean:,.1f} in the mean",
                actual=f"{after[worst]:.9g}", mismatched=f"experts: {bad.size:,} of {len(tokens):,}",
                allowed="bitwise (one float32 sum)",
                hint="look at whose tokens were counted, over which ranks, and at the bias's dtype",
            )  # fmt: skip


def _kept(trace: Trace, item: RouterBalance, row: int, layer: int) -> Comparison:
    """Compare the bias before an update with what the update before left."""
    left, before = (trace.array(item, name)[row] for name in ("left", "before"))
    bad = np.flatnonzero(left.view(np.int32) != before.view(np.int32))
    worst = int(bad[0]) if bad.size else 0
    return Comparison(
        what=f"layer {layer} before {item.name} on rank {item.rank}", same=not bad.size, stage=Stage.TRAIN,
        version=item.version, badness=bad.size / len(left), owner=owner_of(item),
        sentence=f"before {item.name} the score bias of expert {worst} of layer {layer} is {before[worst]:.9g}, the "
        f"update before left {left[worst]:.9g}",
        expected=f"{left[worst]:.9g} (what the update before left)", actual=f"{before[worst]:.9g} (the live router)",
        mismatched=f"experts: {bad.size:,} of {len(left):,}", allowed="bitwise (nothing writes it)",
        hint="look at what touches the routers' buffers between two steps, and at their dtype",
    )  # fmt: skip
