"""From the plan to the engine: what travels, and what the engine holds of it after loading."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

from verifier.checks.conditions import (
    ADAPTERS_SENT,
    AWAKE,
    EXPECTED,
    EXPORTS,
    NO_ADAPTER,
    SENT,
    SYNCED,
    WEIGHTS_SENT,
)
from verifier.checks.content import by_name, compare_contents, compare_ranks, left_out
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_set, compare_value, owner_of
from verifier.core.condition import condition, on, recorded
from verifier.core.record import kind_of
from verifier.core.records_weights import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    EngineRestart,
    ExpectedView,
    ExportedAdapterMatrix,
    ExportedTensor,
    Handover,
    LoadedNames,
    PlanDigest,
    PlannedTensor,
    Poison,
    ReceivedTensor,
    SourceTensor,
    SyncedSettings,
    SyncedTensor,
)

DELIVERED = {"roundtrip": EXPORTS & NO_ADAPTER, "step": SYNCED & WEIGHTS_SENT, "answers": SENT & WEIGHTS_SENT}
"""Runs whose engine gets whole weights, by what their trace is of."""


@check("PLN001", needs=(PlanDigest,), applies=on(**DELIVERED, loop=recorded(PlanDigest)))
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
    """Comparison of two plans by their sizes, as the end of a sentence."""
    for what in ("tensors", "chunks"):
        got, want = getattr(item, f"num_{what}"), getattr(first, f"num_{what}")
        if got is None or want is None:
            return ""
        if got != want:
            return f": {got} {what}, not {want}"
    return ", of the same size"


@check(
    "PLN002", needs=(PlannedTensor, SourceTensor),
    applies=on(**DELIVERED, loop=recorded(PlannedTensor, SourceTensor)),
)  # fmt: skip
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


@check("TPT002", needs=(Handover,), applies=WHOLE | ADAPTERS | on(loop=recorded(Handover)))
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
    """Number of things that an engine rank has of what was exported of a version, which is not nothing."""
    sentence = f"engine rank {rank} has {got} of the {want} {noun} of version {version}"
    at, right = At(Stage.TRANSPORT, version, f"engine rank {rank}"), want or f"an export of {noun}"
    sentence, absent = sentence if want else f"no {noun} of version {version} were exported", got < want or not want
    return compare_value(at, f"version {version}", got, right, sentence=sentence, absent=absent)


RESTARTED = condition("no engine was started again", lambda run: run.facts.restarted)


@check(
    "ENG001", needs=(CheckpointView, ExpectedView),
    applies=on(roundtrip=EXPORTS, step=RESTARTED | SYNCED, answers=SENT, loop=recorded(CheckpointView) & EXPECTED),
)  # fmt: skip
def engine_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """After every sync each engine rank's live tensors, mapped back to checkpoint layout, are what was sent.

    What it checks: names both ways, dtypes, shapes and bits of every checkpoint slice that an engine rank holds, read
    from the tensors that its forward uses. Of each tensor, and each place that holds it, that the elements of the
    different parts which the ranks say they hold add up to those of the whole. After a restart the same of what a new
    process holds, as it is asked after its answers, by what the trainer exports at that moment.
    Why it matters: reload bugs leave single layers half-processed, or loaded twice, without an error. A rank that takes
    itself for another loads that one's part, and holds exactly what it asked for. A new process holds the checkpoint
    that the run began with, and requests that reach it before a sync are answered by that policy.
    Evidence: engine/view, engine/view-expected (the export cut to the engine rank's slice), engine/restart.
    Tolerance and its source: bitwise; loading copies. Where an engine holds a tensor in a wider dtype (a router of a
    bfloat16 checkpoint in float32), in that dtype: the report says once which.
    Where to look: the engine's weight loader, and its processing after this version's reload; the rank and the sizes by
    which each engine rank cuts a layer; what is sent between a start and the first request.
    What it does not catch: buffers that no checkpoint tensor names (ENG002), and tensors that the engine quantised
    (ENG002, LGP002); a restart after the last samples of a run, or while answers are sampled ahead.
    References: vllm#42821, SkyRL#1680, prime-rl#2714, verl#7986, vllm-gguf-plugin#103, vllm#56949, miles#1724.
    """
    for version, rank in product(trace.versions(CheckpointView), range(trace.manifest.engine_ranks)):
        says = f"engine rank {rank}", "the export, cut to this rank"
        yield from compare_ranks(trace, (CheckpointView, version), (ExpectedView, version), says, [rank])
    yield from _parts(trace)
    for restart, rank in product(trace.of(EngineRestart), range(trace.manifest.engine_ranks)):
        looked = any(trace.of(CheckpointView, version=restart.version, rank=rank))
        at, sentence = At(Stage.ENGINE, restart.version), f"nobody looked at engine rank {rank} after its restart"
        what, right = f"engine rank {rank} after its restart", "a look at what it holds"
        yield compare_value(at, what, right if looked else "none", right, sentence=sentence, absent=not looked)


def _parts(trace: Trace) -> Iterator[Comparison]:
    """Elements of each tensor that the engine's ranks hold together, against those of the whole."""
    for version in trace.versions(CheckpointView):
        wholes = {item.name: item.whole for item in trace.of(ExpectedView, version=version)}
        parts: dict[tuple[str, str], set[tuple[tuple[int, int], ...]]] = defaultdict(set)
        for item in trace.of(CheckpointView, version=version):
            if item.tensor in wholes:
                parts[item.tensor, item.holder].add(item.box)
        for (name, holder), boxes in parts.items():
            whole = math.prod(wholes[name])
            held = sum(math.prod(end - begin for begin, end in box) for box in boxes)
            says, at = (f"in {len(boxes)} different parts of `{holder}`", ""), At(Stage.ENGINE, version)
            sentence = f"the engine's ranks together hold {held:,} of the {whole:,} elements of `{name}`"
            yield compare_value(at, name, held, whole, sentence=sentence, says=says)


@check(
    "ENG002", needs=(SyncedTensor, ColdTensor),
    applies=on(roundtrip=EXPORTS, step=SYNCED & AWAKE, answers=SENT & AWAKE, loop=recorded(SyncedTensor, ColdTensor)),
)  # fmt: skip
def engine_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine equals, bit for bit, an engine that loads the same weights cold.

    What it checks: per engine rank, every parameter, buffer (persistent or not) and derived tensor, at the version for
    which an engine was started cold; at every other version those buffers that no update loads, which are the same.
    Why it matters: rotary caches, scales and repacked weights are in no checkpoint; a reload can lose them.
    Evidence: engine/state and engine/cold of the same version.
    Tolerance and its source: bitwise; both hold a function of the same bits.
    Where to look: what the reload does with tensors that are in no checkpoint.
    What it does not catch: an engine that loads wrongly both cold and live (ENG001, LGP002).
    References: vllm#44371, vllm#16564, vllm#48284, RFC vllm#48312.
    """
    versions = sorted({*trace.versions(SyncedTensor), *trace.versions(ColdTensor)})
    for version, rank in product(versions, range(trace.manifest.engine_ranks)):
        cold = list(trace.of(ColdTensor, version=version, rank=rank))
        state = list(trace.of(SyncedTensor, version=version, rank=rank))
        if not any(item.sort == "parameter" for item in cold):  # the buffers that no update brings, views apart
            loaded = _loaded(trace.of(LoadedNames, rank=rank))
            buffers = [item for item in cold or trace.of(ColdTensor, rank=rank) if item.sort == "buffer"]
            cold = [item for item in buffers if item.name not in loaded]
            kept = by_name(cold)
            state = [item for name, item in by_name(state).items() if name in kept]
        says = f"synced engine rank {rank}", "an engine that loaded them cold"
        yield from compare_contents(state, cold, says, Stage.ENGINE, version)


def _loaded(reports: Iterable[LoadedNames]) -> set[str]:
    """Names that the engine's loader reported as loaded."""
    return {name for item in reports for name in item.names}


@check("ENG003", needs=(Poison,), applies=on(**DELIVERED, loop=recorded(Poison)))
def poison_left_tensor_intact(trace: Trace) -> Iterator[Comparison]:
    """Before each sync the receiver was really poisoned, so that what it holds afterwards came from the sync.

    What it checks: of the engine's floating-point parameters and buffers, those that still held a finite value after
    the poison, per engine rank: none, but those that the engine declares it cannot reach.
    Why it matters: without poison a sync that skips a tensor leaves the right old value in place and passes.
    Evidence: engine/poison (the outcome of each tensor).
    Tolerance and its source: exact.
    Where to look: what the poison cannot reach: a sync may not reach it either.
    What it does not catch: tensors that the engine never reads.
    References: prime-rl#2714, slime `--check-weight-update-equal`.
    """
    for item in trace.of(Poison):
        intact = [name for name, outcome in item.outcomes.items() if outcome == "left"]
        subject, total = "tensors that were still finite after the poison", len(item.outcomes)
        yield compare_set(item, next(iter(intact), f"engine rank {item.rank}"), intact, total=total, subject=subject)


@check("ENG004", needs=(LoadedNames, SyncedTensor), applies=on(**DELIVERED, loop=recorded(LoadedNames, SyncedTensor)))
def engine_parameter_not_loaded(trace: Trace) -> Iterator[Comparison]:
    """At every sync the engine's own loader reported every parameter of the engine as loaded.

    What it checks: per engine rank, each parameter that the engine holds against what `load_weights` reported over all
    chunks of the update.
    Why it matters: a name that the loader does not know is skipped without an error, and vLLM drops the set that its
    loader returns.
    Evidence: engine/loaded, engine/state (parameters).
    Tolerance and its source: exact.
    Where to look: the received names, and the engine's own mapping of names.
    What it does not catch: a parameter that was loaded with wrong contents (ENG001).
    References: vLLM `receive_weights`, prime-rl#2326, slime debugging guide.
    """
    for version, rank in product(trace.versions(LoadedNames), range(trace.manifest.engine_ranks)):
        loaded = _loaded(trace.of(LoadedNames, version=version, rank=rank))
        for held in trace.of(SyncedTensor, version=version, rank=rank, sort="parameter"):
            sentence = f"engine rank {rank} never loaded its parameter `{held.name}`"
            there = "loaded" if held.name in loaded else "not reported by the loader"
            yield compare_value(held, held.name, there, "loaded", sentence=sentence)


@check(
    "ENG005",
    needs=(SyncedSettings, ColdSettings),
    applies=on(roundtrip=EXPORTS, step=SYNCED & AWAKE, loop=recorded(SyncedSettings, ColdSettings)),
)
def engine_setting_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine computes with the epsilons, scales, windows and flags that a cold one computes with.

    What it checks: per engine rank and module, every number, flag and name that is an attribute of the module or of an
    object that computes for it (attention backend, router), at every version, against an engine started cold; in
    training against the engine itself before anything was sent to it.
    Why it matters: no update brings them, as they are no tensors. A reload that builds or processes a layer anew can
    take a default instead, and a wrong epsilon hides below any noise.
    Evidence: engine/settings, engine/cold-settings.
    Tolerance and its source: exact; a reload changes weights and nothing else.
    Where to look: what the reload builds or processes anew in this module.
    What it does not catch: a setting that is wrong in a cold engine too (LGP002), values in closures, and the order of
    a module's list of different names, which may come from a set. What a cold engine has not is not judged: a forward
    that does without it does not read it. On GPUs it has no subject yet.
    References: vllm#44371, vllm#48284, RL#1046, slime#1734.
    """
    for rank, version in product(range(trace.manifest.engine_ranks), trace.versions(SyncedSettings)):
        live = by_name(trace.of(SyncedSettings, version=version, rank=rank))
        start = list(trace.of(ColdSettings, version=version, rank=rank)) or trace.of(ColdSettings, rank=rank)
        for module, cold in by_name(start).items():
            got, want = live[module].values if module in live else {}, cold.values
            other = [name for name in want if got.get(name) != want[name]]
            first = next(iter(other), "")
            name = f"{module}.{first}" if other else module
            at, says = At(Stage.ENGINE, version, f"engine rank {rank}"), ("the synced engine", "one that loaded cold")
            part = f"{len(other)} of the {len(want)} settings of this module"
            yield compare_value(at, name, got.get(first), want.get(first), same=not other, says=says, mismatched=part)
