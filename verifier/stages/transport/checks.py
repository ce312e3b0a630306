"""Tensors as they arrive, and exports that are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import NEEDS, condition, on, recorded
from verifier.core.record import kind_of
from verifier.stages.checks_conditions import ADAPTERS_SENT, SENT, SYNCED
from verifier.stages.checks_content import compare_contents
from verifier.stages.engine.records import CheckpointView
from verifier.stages.export.records import ExportedAdapterMatrix, ExportedTensor
from verifier.stages.plan.checks import DELIVERED
from verifier.stages.transport.records import Handover, ReceivedTensor


@check(
    "TPT001", needs=(ExportedTensor, ReceivedTensor),
    applies=on(**DELIVERED, loop=recorded(ReceivedTensor) | recorded(Handover)),
)  # fmt: skip
def received_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """Every engine rank received what was exported: names both ways, dtypes, shapes, bits, at every version.

    What it checks: the receiver's own digests, chunk by chunk of what its loader is about to be given, against the
    export's; on a GPU, of the planned ranges of its buffer. Memory that is read in place (CUDA IPC) is digested when it
    is packed and the chunk before is loaded.
    Why it matters: bytes under the wrong names, freed or refilled buffers and casts on the wire load without an error.
    Evidence: export/tensor of trainer rank 0, transport/receipt of every engine rank.
    Tolerance and its source: bitwise; a transport copies.
    Where to look: the buffer's life between pack and receive, and casts on the sender's side.
    What it does not catch: what the engine makes of it, and bytes that change in memory read in place between their
    digest and their load (ENG001).
    References: SkyRL#1581, slime#929, RL#3651, RL#3540.
    """
    for version, rank in product(trace.versions(ReceivedTensor), range(trace.manifest.engine_ranks)):
        received = trace.of(ReceivedTensor, version=version, rank=rank)
        exported = trace.of(ExportedTensor, version=version, rank=0)
        says = (f"what engine rank {rank} received", "the export")
        yield from compare_contents(received, exported, says, Stage.TRANSPORT, version)


NO_ADAPTERS = condition("adapters are exported", lambda run: kind_of(ExportedAdapterMatrix) not in run.facts.recorded)
WHOLE = on(**DELIVERED, loop=recorded(ReceivedTensor) | recorded(Handover) & NO_ADAPTERS)
ADAPTERS = on(
    step=SYNCED & ADAPTERS_SENT, answers=SENT & ADAPTERS_SENT, loop=recorded(ExportedAdapterMatrix, CheckpointView)
)


@check("TPT002", needs=(Handover,), applies=WHOLE | ADAPTERS | on(loop=NEEDS))
def export_not_transferred(trace: Trace) -> Iterator[Comparison]:
    """Every exported version, or its adapter, was transferred to every engine rank, and no transfer was refused.

    What it checks: what ended each transfer, if something did; each (version, engine rank) has receipts, as many as the
    export has tensors; of an adapter, has the matrices of that version's export that the rank was asked for after the
    sync.
    Why it matters: a sync behind a flag that is off leaves the engine frozen, and looks like staleness. A stream that
    departs from its plan would put bytes under wrong names.
    Evidence: export/tensor of trainer rank 0, transport/receipt, transport/handover; export/adapter, engine/view.
    Tolerance and its source: exact counts.
    Where to look: what gates the sync, and the chunks that the receiver refused.
    What it does not catch: wrong contents (TPT001), such as an adapter of the version before (ENG001).
    References: verl#4248, verl#7495, SkyRL#1581, SkyRL#1471.
    """
    for item in trace.of(Handover):
        sentence, right = f"the {item.name} was refused: {item.refused}", "every planned tensor, in order"
        yield compare_value(item, item.name, item.refused, right, same=not item.refused, sentence=sentence)
    for version, rank in product(trace.manifest.synced_versions, range(trace.manifest.engine_ranks)):
        if WHOLE(trace.manifest) is None:
            want = sum(1 for _ in trace.of(ExportedTensor, version=version, rank=0))
            got = sum(1 for _ in trace.of(ReceivedTensor, version=version, rank=rank))
            yield _compare_delivered(version, rank, "tensors", got, want)
        if ADAPTERS(trace.manifest) is None:
            exported = [item.name for item in trace.of(ExportedAdapterMatrix, version=version)]
            held = {item.tensor for item in trace.of(CheckpointView, version=version, rank=rank)}
            got = sum(name in held for name in exported)
            yield _compare_delivered(version, rank, "adapter matrices", got, len(exported))


def _compare_delivered(version: int, rank: int, noun: str, got: int, want: int) -> Comparison:
    sentence = f"engine rank {rank} has {got} of the {want} {noun} of version {version}"
    at, right = At(Stage.TRANSPORT, version, f"engine rank {rank}"), want or f"an export of {noun}"
    sentence, absent = sentence if want else f"no {noun} of version {version} were exported", got < want or not want
    return compare_value(at, f"version {version}", got, right, sentence=sentence, absent=absent)
