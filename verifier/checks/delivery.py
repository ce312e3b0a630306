"""The plan and the transport: order, names, dtypes and bytes of what travels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from verifier.checks.content import by_name, compare_contents, owner_of
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_engine import Handover, ReceivedTensor
from verifier.core.records_weights import ExportedTensor, PlanDigest, PlannedTensor, SourceTensor
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("PLN001", needs=(PlanDigest,), scope="plan")
def plan_differs_between_ranks(trace: Trace) -> Iterator[Comparison]:
    """All trainer ranks, and every engine rank, hold the same chunk plan before a byte moves.

    What it checks: each party's plan digest at each version against trainer rank 0's at its first plan.
    Why it matters: ranks whose plans differ hang for half an hour, or load bytes under the wrong names.
    Evidence: plan/plan of all trainer and engine ranks.
    Tolerance and its source: exact digests.
    What it does not catch: a plan that is wrong everywhere alike (PLN002).
    References: SkyRL#1581, SkyRL#1505, SkyRL#1816.
    """
    plans = list(trace.of(PlanDigest))
    first = next(item for item in plans if item.role == "trainer" and item.rank == 0)
    for item in plans:
        yield Comparison(
            what=f"plan of {owner_of(item)}", same=item.digest == first.digest, stage=Stage.PLAN, version=item.version,
            badness=0.9, owner=owner_of(item),
            sentence=f"{owner_of(item)} holds another chunk plan than trainer rank 0{_sizes(item, first)}",
            expected=f"{first.digest} (trainer rank 0)", actual=f"{item.digest} ({owner_of(item)})",
            allowed="exact (one plan is the only source of order)",
            hint="compare the export order, names and dtypes of the two ranks",
        )  # fmt: skip


def _sizes(item: PlanDigest, first: PlanDigest) -> str:
    """Comparison of two plans by their sizes, as the end of a sentence."""
    for what in ("tensors", "chunks"):
        got, want = getattr(item, f"num_{what}"), getattr(first, f"num_{what}")
        if got is None or want is None:
            return ""
        if got != want:
            return f": {got} {what}, not {want}"
    return ", of the same size"


@check("PLN002", needs=(PlannedTensor, SourceTensor), scope="plan")
def planned_tensor_differs_from_source(trace: Trace) -> Iterator[Comparison]:
    """The plan names every checkpoint tensor once, with the checkpoint's dtype and shape.

    What it checks: names both ways, dtypes and shapes of the plan's entries against the source checkpoint.
    Why it matters: a tensor that is not planned keeps its old value in the engine; a planned dtype that is not the
    checkpoint's rounds an fp32 router bias to bf16 on the wire.
    Evidence: plan/entry, load/source.
    Tolerance and its source: exact.
    What it does not catch: wrong contents under right names (WGT004, WGT005, TPT001).
    References: RL#3540, prime-rl#3524, SkyRL#1581.
    """
    source, entries = by_name(trace.of(SourceTensor)), by_name(trace.of(PlannedTensor))
    for name in source | entries:
        wanted, found = (
            f"{item.dtype} {list(item.shape)}" if item else "absent" for item in (source.get(name), entries.get(name))
        )
        absent = "absent" in (wanted, found)
        yield Comparison(
            what=name, same=found == wanted, stage=Stage.PLAN, badness=1.0 if absent else 0.5,
            sentence=f"`{name}` is planned as {found}, the source checkpoint has {wanted}",
            expected=f"{wanted} (the source checkpoint)", actual=f"{found} (the plan)", allowed="exact",
            hint="look at what casts, drops or renames tensors between the export and the plan", absent=absent,
        )  # fmt: skip


@check("TPT001", needs=(ExportedTensor, ReceivedTensor), scope="transport")
def received_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """Every engine rank received what was exported: names both ways, dtypes, shapes, bits, at every version.

    What it checks: the receiver's own digests, chunk by chunk of what its loader is about to be given, against the
    export's; on a GPU, of the planned ranges of its buffer.
    Why it matters: bytes under the wrong names, freed or refilled buffers and casts on the wire load without an error.
    Evidence: export/tensor of trainer rank 0, transport/receipt of every engine rank.
    Tolerance and its source: bitwise; a transport copies.
    What it does not catch: what the engine makes of it (ENG001, ENG002).
    References: SkyRL#1581, slime#929, RL#3651, RL#3540.
    """
    for version, rank in product(trace.versions(ReceivedTensor), range(trace.manifest.engine_ranks)):
        yield from compare_contents(
            trace.of(ReceivedTensor, version=version, rank=rank), trace.of(ExportedTensor, version=version, rank=0),
            stage=Stage.TRANSPORT, version=version, actual_says=f"what engine rank {rank} received",
            expected_says="the export", allowed="bitwise (a transport copies)",
            hint="look at the buffer's life between pack and receive, and at casts on the sender's side",
        )  # fmt: skip


@check("TPT003", needs=(Handover,), scope="transport")
def transfer_refused(trace: Trace) -> Iterator[Comparison]:
    """No transfer was refused: the stream kept to the plan and all parties held the same plan.

    What it checks: what ended each transfer, if something did.
    Why it matters: a stream that departs from its plan would put bytes under wrong names; it is stopped, and this says
    why.
    Evidence: transport/handover.
    Tolerance and its source: exact.
    What it does not catch: contents (TPT001).
    References: SkyRL#1581, SkyRL#1471.
    """
    for item in trace.of(Handover):
        yield Comparison(
            what=item.name, same=not item.refused, stage=Stage.TRANSPORT, version=item.version, badness=1.0,
            sentence=f"the {item.name} was refused: {item.refused}", expected="every planned tensor, in order",
            actual=item.refused, allowed="exact",
            hint="the first bad stage of the other findings says where it began",
        )  # fmt: skip


@check("TPT002", needs=(ExportedTensor,), scope="transport")
def export_not_transferred(trace: Trace) -> Iterator[Comparison]:
    """Every exported version was transferred to every engine rank.

    What it checks: each (version, engine rank) has receipts, as many as the export has tensors.
    Why it matters: a sync behind a flag that is off leaves the engine frozen, and looks like staleness.
    Evidence: export/tensor of trainer rank 0, transport/receipt.
    Tolerance and its source: exact counts.
    What it does not catch: wrong contents (TPT001).
    References: verl#4248, verl#7495.
    """
    for version, rank in product(trace.manifest.synced_versions, range(trace.manifest.engine_ranks)):
        want = sum(1 for _ in trace.of(ExportedTensor, version=version, rank=0))
        got = sum(1 for _ in trace.of(ReceivedTensor, version=version, rank=rank))
        yield Comparison(
            what=f"version {version}", same=got == want and want > 0, stage=Stage.TRANSPORT, version=version,
            badness=1.0, owner=f"engine rank {rank}",
            sentence=f"engine rank {rank} confirmed {got} of the {want} tensors of version {version}"
            if want else f"version {version} was never exported",
            expected=f"{want} confirmed" if want else "an export to confirm", actual=f"{got} confirmed",
            allowed="exact counts", hint="look at what gates the sync, and at the chunks that the receiver refused",
            absent=got < want or not want,
        )  # fmt: skip
