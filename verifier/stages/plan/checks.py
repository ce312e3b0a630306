"""Plans of chunks between ranks and against the source."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value, owner_of
from verifier.core.condition import NEEDS, on
from verifier.stages.checks_conditions import EXPORTS, NO_ADAPTER, SENT, SYNCED, WEIGHTS_SENT
from verifier.stages.checks_content import by_name, left_out
from verifier.stages.load.records import SourceTensor
from verifier.stages.plan.records import PlanDigest, PlannedTensor

DELIVERED = {"roundtrip": EXPORTS & NO_ADAPTER, "step": SYNCED & WEIGHTS_SENT, "answers": SENT & WEIGHTS_SENT}
"""Runs whose engine gets whole weights, by what their trace is of."""


@check("PLN001", needs=(PlanDigest,), applies=on(**DELIVERED, loop=NEEDS))
def plan_differs_between_ranks(trace: Trace) -> Iterator[Comparison]:
    """All trainer ranks, and every engine rank, hold the same chunk plan before a byte moves.

    What it checks: each party's plan digest at each version against trainer rank 0's at its first plan.
    Why it matters: ranks whose plans differ hang for half an hour, or load bytes under the wrong names.
    Evidence: plan/plan of all trainer and engine ranks.
    Tolerance and its source: exact digests; one plan is the only source of order.
    Where to look: the export order, names and dtypes of the two ranks.
    What it does not catch: a plan that is wrong everywhere alike (PLN002).
    References: SkyRL#1581, SkyRL#1505, SkyRL#1816.
    """
    plans = list(trace.of(PlanDigest))
    first = next(item for item in plans if item.role == "trainer" and item.rank == 0)
    for item in plans:
        sentence = f"{owner_of(item)} holds another chunk plan than trainer rank 0{_sizes(item, first)}"
        says, what = (owner_of(item), "trainer rank 0"), f"plan of {owner_of(item)}"
        yield compare_value(item, what, item.digest, first.digest, sentence=sentence, says=says)


def _sizes(item: PlanDigest, first: PlanDigest) -> str:
    for what in ("tensors", "chunks"):
        got, want = getattr(item, f"num_{what}"), getattr(first, f"num_{what}")
        if got is None or want is None:
            return ""
        if got != want:
            return f": {got} {what}, not {want}"
    return ", of the same size"


@check("PLN002", needs=(PlannedTensor, SourceTensor), applies=on(**DELIVERED, loop=NEEDS))
def planned_tensor_differs_from_source(trace: Trace) -> Iterator[Comparison]:
    """The plan names every checkpoint tensor once, with the checkpoint's dtype and shape.

    What it checks: names both ways, dtypes and shapes of the plan's entries against the source checkpoint, of which
    copies of shared tensors (WGT004) may be left out.
    Why it matters: a tensor that is not planned keeps its old value in the engine; a planned dtype that is not the
    checkpoint's rounds an fp32 router bias to bf16 on the wire.
    Evidence: plan/entry, load/source.
    Tolerance and its source: exact.
    Where to look: what casts, drops or renames tensors between the export and the plan.
    What it does not catch: wrong contents under right names (WGT004, WGT005, TPT001).
    References: RL#3540, prime-rl#3524, SkyRL#1581.
    """
    source, entries = by_name(trace.of(SourceTensor)), by_name(trace.of(PlannedTensor))
    copies = left_out(source, entries.values())
    for name in source | entries:
        if name in copies:
            continue
        wanted, found = (
            f"{item.dtype} {list(item.shape)}" if item else "absent" for item in (source.get(name), entries.get(name))
        )

        absent, says = "absent" in (wanted, found), ("the plan", "the source checkpoint")
        badness = 1.0 if absent else 0.5
        yield compare_value(At(Stage.PLAN), name, found, wanted, says=says, absent=absent, badness=badness)
