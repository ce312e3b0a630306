"""Weights inside the trainer and out of it: loaded shards, replicas, exports, saved files."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter

from verifier.checks.conditions import (
    ADAPTER,
    ADAPTERS_SENT,
    CUT,
    EXPORTS,
    FIRST,
    LAYOUT,
    LOADED,
    NO_ADAPTER,
    OF_SOURCE,
    REPLICAS,
    SAMPLED,
    SAVED,
    SENT,
    SYNCED,
    UPDATED,
    WEIGHTS_SENT,
)
from verifier.checks.content import by_name, compare_contents, describe, facts_of, left_out, owner_of
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import ALWAYS, condition, knob, on, recorded, several, told
from verifier.core.records_config import ExportedConfig, SourceConfig
from verifier.core.records_weights import (
    ExpectedShard,
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    ExportedShard,
    ExportedTensor,
    ExportStream,
    JoinedTensor,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    LoadedShard,
    SavedCheckpoint,
    SavedTensor,
    ShardRecord,
    SourceTensor,
    UpdatedShard,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace

COPIES = "bitwise (this stage copies; it computes nothing)"

NOT_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path"})
"""Keys of config.json that say who wrote it, and where it was read."""


@check(
    "WGT001",
    needs=(ExpectedShard, LoadedShard),
    applies=on(golden=LAYOUT, roundtrip=LAYOUT, step=LOADED & LAYOUT, loop=recorded(ExpectedShard, LoadedShard)),
)
def loaded_shard_differs(trace: Trace) -> Iterator[Comparison]:
    """Every live parameter and buffer of every trainer rank holds the checkpoint's bits after load.

    What it checks: on each rank, the names of live parameters and persistent buffers against the independent layout
    (`verifier/export/names.py`), both ways; dtype, shape and bits of each against the slice cut from the checkpoint
    by that layout, which shares no code with Megatron-Bridge. In training that checkpoint is the folder that the config
    names, if it names one.
    Why it matters: a mapping that is wrong in the same way on import and export round-trips to identity; only a
    statement made apart from it can see that.
    Evidence: load/expected, load/shard, per rank.
    Tolerance and its source: bitwise; loading copies.
    What it does not catch: a wrong forward on right weights (LGP001); for a model whose layout was derived from a
    numbered checkpoint, as the report's header says then, a load that errs alike on all ranks.
    References: Megatron-Bridge#3743, prime-rl#1145, prime-rl#3333, verl#2029.
    """
    for rank in sorted({item.rank for item in trace.of(ExpectedShard, version=0)}):
        yield from compare_contents(
            trace.of(LoadedShard, version=0, rank=rank), trace.of(ExpectedShard, version=0, rank=rank),
            stage=Stage.LOAD, version=0, actual_says="the live model", expected_says="the checkpoint, cut by layout",
            allowed=COPIES, hint="look at the import mapping of this parameter and at what ran after the load",
        )  # fmt: skip


@check(
    "WGT002", needs=(LoadedShard, UpdatedShard),
    applies=on(
        golden=REPLICAS,
        roundtrip=REPLICAS,
        step=UPDATED & REPLICAS,
        loop=recorded(LoadedShard) & several(UpdatedShard),
    ),
)  # fmt: skip
def replica_differs(trace: Trace) -> Iterator[Comparison]:
    """Copies of one shard hold the same bits on every rank that has one, tied embeddings included.

    What it checks: parameters that the mesh replicates (norms and routers over tp, everything over dp and cp, experts
    over expert dp) and the two copies of a tied embedding are bitwise equal, after load and after every step.
    Why it matters: an export reads the first owner of each tensor, so drift between copies never shows in it.
    Evidence: load/shard and train/shard with the replica key that the layout gives.
    Tolerance and its source: bitwise; replicas receive the same reduced gradient and do the same arithmetic.
    What it does not catch: copies that are all wrong alike (WGT001, LSS001).
    References: verl#5702, RL#3716, RL#666, Megatron-Bridge `broadcast_from_pp_rank`.
    """
    groups: dict[tuple[Stage, int, str], list[ShardRecord]] = defaultdict(list)
    for kind in (LoadedShard, UpdatedShard):
        for item in trace.of(kind):
            groups[item.stage, item.version, item.replica].append(item)
    for (stage, version, _), (first, *others) in groups.items():
        for item in others:
            yield Comparison(
                what=item.name, same=item.digest == first.digest, stage=stage, version=version, badness=0.5,
                sentence=f"two copies of `{item.name}` differ: {owner_of(item)} and {owner_of(first)}",
                owner=owner_of(item),
                expected=f"{describe(first)} ({owner_of(first)} holds the other copy as `{first.name}`)",
                actual=describe(item), allowed="bitwise (replicas do the same arithmetic)",
                hint="look at the gradient reduction of this parameter over the axes that replicate it",
            )  # fmt: skip


@check(
    "WGT004", needs=(SourceTensor, ExportedTensor),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS,
        step=SYNCED & SENT & FIRST & NO_ADAPTER,
        answers=SENT & FIRST & NO_ADAPTER,
        loop=recorded(SourceTensor, ExportedTensor) & OF_SOURCE,
    ),
)  # fmt: skip
def export_differs_from_source(trace: Trace) -> Iterator[Comparison]:
    """The export of untouched weights is the source checkpoint: names both ways, dtypes, shapes, bits.

    What it checks: Megatron-Bridge's export at version 0 against the HF safetensors, or against a recorded manifest,
    in training what the engine gets before step 1, without adapters; in a round trip that trains an adapter, the export
    of the frozen base at every version. A source tensor that repeats a shared one, as layers for multi-token prediction
    repeat embedding and head, need not be exported, but has to be its copy.
    Why it matters: with an absolute tolerance of 0.1 a zeroed tensor and two swapped experts pass.
    Evidence: load/source, export/tensor of trainer rank 0.
    Tolerance and its source: bitwise; import and export copy.
    What it does not catch: an import and an export that are wrong alike (WGT001, LGP001).
    References: Megatron-Bridge `_ROUNDTRIP_ATOL`, SkyRL#1471, Megatron-Bridge#1716.
    """
    for version in trace.manifest.untouched_versions:
        exported = list(trace.of(ExportedTensor, version=version, rank=0))
        source = by_name(trace.of(SourceTensor))
        copies = left_out(source, exported)
        yield from compare_contents(
            exported, [item for item in source.values() if item.name not in copies],
            stage=Stage.EXPORT, version=version, actual_says="the export", expected_says="the source checkpoint",
            allowed=COPIES, hint="look at the export mapping of this tensor and at the axes that shard it",
        )  # fmt: skip
        for name, item in copies.items():
            shared = source.get(item.copy_of)
            yield Comparison(
                what=name, same=shared is not None and facts_of(item) == facts_of(shared), stage=Stage.EXPORT,
                version=version, badness=0.5, owner=owner_of(item),
                sentence=f"`{name}` is left out of the export as a copy of `{item.copy_of}`, which it is not",
                expected=f"{describe(shared)} (`{item.copy_of}` of the source checkpoint)",
                actual=f"{describe(item)} (the source checkpoint)", allowed=COPIES,
                hint="whatever reads both names gets two tensors where the trainer has one: decide which is right",
            )  # fmt: skip


@check(
    "WGT005", needs=(JoinedTensor, ExportedTensor),
    applies=on(
        roundtrip=EXPORTS & LAYOUT,
        step=SYNCED & NO_ADAPTER & SAMPLED,
        loop=recorded(JoinedTensor, ExportedTensor),
    ),
)  # fmt: skip
def export_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """After every update the export is what the trainer's live shards hold, assembled by the independent layout.

    What it checks: at each version above 0, names, dtypes, shapes and bits of the export against the live parameters
    of all ranks, joined by `verifier/export/names.py` without Megatron-Bridge; in training on the steps that
    transformers computes too, without adapters, and there of what the first step after a start begins with too.
    Why it matters: stale exports (a cached conversion task, a parameter gather that had not run) are right at the
    first sync and wrong at the second.
    Evidence: train/live, export/tensor of trainer rank 0.
    Tolerance and its source: bitwise; export copies.
    What it does not catch: a wrong step (LSS001, TRN001, WGT002).
    References: SkyRL#1345, SkyRL#1471, and stale export under `overlap_param_gather`.
    """
    for version in trace.versions(JoinedTensor):
        yield from compare_contents(
            trace.of(ExportedTensor, version=version, rank=0), trace.of(JoinedTensor, version=version),
            stage=Stage.EXPORT, version=version, actual_says="the export", expected_says="the live shards",
            allowed=COPIES, hint="compare with version 0: what was cached, or not yet gathered, when the export ran",
        )  # fmt: skip


@check("WGT020", needs=(UpdatedShard, ExportedShard), applies=on(step=CUT))
def exported_shard_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """At every sync of a training run the export is what each rank's own shards hold.

    What it checks: on each rank, dtype, shape and bits of every live shard after the step's last update, against what
    the independent layout (`verifier/export/names.py`) cuts for it from the rank's own export stream. Before the first
    step after a resume, the same of what the shards held when the checkpoint was loaded.
    Why it matters: a cached tensor, a parameter of the step before, a buffer that was filled for another name: one sync
    that is wrong between two sampled steps is healed by the next, and the answers in between are of no policy. A
    reference that was loaded last and stands in the place of the resumed weights samples the first step.
    Evidence: train/shard, export/shard, load/shard, per rank.
    Tolerance and its source: bitwise; an export copies.
    What it does not catch: names, dtypes and shapes that no shard is cut from (PLN002, WGT015); streams that differ
    between ranks (WGT006); a wrong step (LSS001, TRN001, WGT002); a wrong load (CKP001). On a GPU models above 256 MiB
    are not compared.
    References: SkyRL#1345, SkyRL#1471, SkyRL#1816, slime#2380.
    """
    stepped = set(trace.versions(UpdatedShard))
    for version in trace.versions(ExportedShard):
        kind, when = (UpdatedShard, "the last update") if version in stepped else (LoadedShard, "the load")
        for rank in sorted({item.rank for item in trace.of(ExportedShard, version=version)}):
            yield from compare_contents(
                trace.of(ExportedShard, version=version, rank=rank), trace.of(kind, version=version, rank=rank),
                stage=Stage.EXPORT, version=version, actual_says="the export, cut by layout",
                expected_says=f"the live model after {when}", allowed=COPIES,
                hint="look at when the export read this tensor, and at what it caches or gathers into",
            )  # fmt: skip


@check(
    "WGT006",
    needs=(ExportedTensor,),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS,
        loop=several(ExportedTensor) & told("whole exports", "ranks export other tensors"),
    ),
)
def export_ranks_disagree(trace: Trace) -> Iterator[Comparison]:
    """Every trainer rank's export yields the same tensors in the same order.

    What it checks: names in order, dtypes, shapes and bits of each rank's stream against rank 0's, at each version.
    Why it matters: colocated engines load what their own rank exported; a rank that yields another order feeds bytes
    under the wrong names, or hangs the collective of the next tensor.
    Evidence: export/tensor of all ranks.
    Tolerance and its source: bitwise; every rank receives the same broadcast.
    What it does not catch: all ranks wrong alike (WGT004, WGT005).
    References: SkyRL#1581, SkyRL#1816.
    """
    for version in trace.versions(ExportedTensor):
        for rank in range(trace.manifest.world_size):
            yield _compare_streams(
                trace, (version, rank), (version, 0), attrgetter("name", "dtype", "shape", "digest"), allowed=COPIES,
                got_says=f"the export of trainer rank {rank}", want_says="rank 0's",
                hint="look at what orders and gathers the conversion tasks on this rank",
            )  # fmt: skip


def _compare_streams(
    trace: Trace,
    actual: tuple[int, int],
    expected: tuple[int, int],
    facts: Callable[[ExportedTensor], object],
    *,
    got_says: str,
    want_says: str,
    allowed: str,
    hint: str,
) -> Comparison:
    """The export stream of one (version, rank) against another's: where they part in some facts, and how."""
    got, want = (list(trace.of(ExportedTensor, version=version, rank=rank)) for version, rank in (actual, expected))
    stage, version = Stage.EXPORT, actual[0]
    for place, (ours, theirs) in enumerate(itertools.zip_longest(got, want)):
        if ours is None or theirs is None:
            how = f"ends after {len(got)} tensors, {want_says} after {len(want)}"
        elif ours.name != theirs.name:
            how = f"has `{ours.name}` in place {place}, {want_says} has `{theirs.name}`"
        elif facts(ours) != facts(theirs):
            how = f"has another `{ours.name}` than {want_says}"
        else:
            continue
        return Comparison(
            what=(theirs or ours).name, same=False, stage=stage, version=version, badness=0.9,
            absent=ours is None or theirs is None, sentence=f"{got_says} {how}", owner=owner_of(ours or theirs),
            expected=f"`{theirs.name}` {describe(theirs)} ({want_says})" if theirs else f"the end ({want_says})",
            actual=f"`{ours.name}` {describe(ours)} ({got_says})" if ours else f"the end ({got_says})",
            allowed=allowed, hint=hint,
        )  # fmt: skip
    return Comparison(what=got_says, same=True, stage=stage, version=version)


SEVERAL = condition(
    "one version was exported",
    lambda run: len(run.facts.exported) > 1 or "export" in (knob(run, "undertakes") or ()),
)  # fmt: skip


@check(
    "WGT015", needs=(ExportedTensor,),
    applies=on(roundtrip=EXPORTS & NO_ADAPTER, loop=recorded(ExportedTensor) & SEVERAL),
)  # fmt: skip
def export_order_changes(trace: Trace) -> Iterator[Comparison]:
    """Every version is exported in the order of the first, with the same dtypes and shapes.

    What it checks: names in order, dtypes and shapes of rank 0's stream at each later version against its first.
    Why it matters: names are sent once and bytes with every version; a stream in the order of a set, a cache or an
    arrival is refused, or puts tensors of one shape under each other's names.
    Evidence: export/tensor of trainer rank 0.
    Tolerance and its source: exact; training changes values only.
    What it does not catch: contents (WGT004, WGT005); ranks that differ (WGT006).
    References: SkyRL#1581, Megatron-Bridge#4083.
    """
    first, *later = trace.versions(ExportedTensor)
    for version in later:
        yield _compare_streams(
            trace, (version, 0), (first, 0), attrgetter("name", "dtype", "shape"),
            allowed="exact (training changes values only)",
            got_says=f"the export of version {version}", want_says=f"that of version {first}",
            hint="look at what orders the conversion tasks, and what they skip",
        )  # fmt: skip


@check(
    "WGT016", needs=(ExportStream,),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS & NO_ADAPTER,
        step=SYNCED & WEIGHTS_SENT,
        answers=SENT & WEIGHTS_SENT,
        loop=recorded(ExportStream),
    ),
)  # fmt: skip
def exported_tensor_overwritten(trace: Trace) -> Iterator[Comparison]:
    """A tensor that an export has handed out stays as it was while its reader holds it.

    What it checks: each tensor of the stream, as long as it is held, whenever a later one lies in the same memory.
    Why it matters: a stream that gathers into one buffer is right for a reader that takes one tensor at a time, and
    gives a reader that fills buckets the last tensor under all their names.
    Evidence: export/stream of every trainer rank.
    Tolerance and its source: exact; the digest of the moment it was handed out.
    What it does not catch: memory that is written when nothing more comes (TPT001).
    References: vllm#43464, vllm#39650, cosmos-rl#703.
    """
    for item in trace.of(ExportStream):
        overwritten = list(dict.fromkeys(each.name for each in item.reread if each.still_held != each.handed_over))
        yield Comparison(
            what=overwritten[0] if overwritten else item.name, same=not overwritten, stage=Stage.EXPORT,
            version=item.version, badness=0.9, owner=owner_of(item),
            sentence=f"{len(overwritten)} of {item.num_tensors} exported tensors were written over while they were "
            f"held, `{', '.join(overwritten[:1])}` the first",
            expected="none written over", actual=f"{len(overwritten)} written over", allowed="exact",
            hint="look at what the export gathers and converts into, and at whether it is used again",
        )  # fmt: skip


@check(
    "WGT011",
    needs=(SourceConfig, ExportedConfig),
    applies=on(golden=ALWAYS, roundtrip=EXPORTS, export=ALWAYS, loop=recorded(SourceConfig, ExportedConfig)),
)
def exported_config_differs(trace: Trace) -> Iterator[Comparison]:
    """The config.json that goes with an export says what the source's says.

    What it checks: every key, both ways, of what megatron-bridge writes beside an export, against the source's, both as
    transformers reads them; the version of transformers apart.
    Why it matters: the weights are right and the next run reads them with another number of experts, rope base,
    epsilon or tie; a trainer that sets a runtime option on the model's own configuration exports it too.
    Evidence: load/config, export/config.
    Tolerance and its source: exact; training changes weights and no architecture.
    What it does not catch: what the trainer itself takes from the source's config.json (LGP001).
    References: SkyRL#1727, Megatron-Bridge#5994.
    """
    for version in trace.versions(ExportedConfig):
        got = next(trace.of(ExportedConfig, version=version)).values
        want = next(trace.of(SourceConfig, version=version)).values
        for key in want | got:
            if key in NOT_OF_THE_MODEL:
                continue
            is_there, was_there = got.get(key, "absent"), want.get(key, "absent")
            yield Comparison(
                what=f"config.json {key}", same=is_there == was_there, stage=Stage.EXPORT, version=version, badness=1.0,
                sentence=f"`{key}` is {is_there} in the exported config.json and {was_there} in the source's",
                expected=f"{was_there} (the source's config.json)", actual=f"{is_there} (the exported one)",
                allowed="exact", hint="look for what sets options on the model's own configuration",
            )  # fmt: skip


@check(
    "WGT013", needs=(LiveAdapterMatrix, ExportedAdapterMatrix, LiveAdapterScaling, ExportedAdapterScaling),
    applies=on(
        roundtrip=EXPORTS & ADAPTER & LAYOUT,
        step=SYNCED & ADAPTERS_SENT,
        answers=SENT & ADAPTERS_SENT,
        loop=recorded(LiveAdapterMatrix, ExportedAdapterMatrix, LiveAdapterScaling, ExportedAdapterScaling),
    ),
)  # fmt: skip
def exported_adapter_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """The adapter that an engine is given is the one that the trainer's ranks hold.

    What it checks: at each version above 0, names, dtypes, shapes and bits of the matrices in the adapter's file, and
    alpha over rank in its configuration, against the live adapters of all ranks, joined without megatron-bridge
    (`verifier/export/adapters.py`); and that the configuration asks for nothing else, such as another alpha for some
    linears, layers that have no adapter, or DoRA.
    Why it matters: fused linears have one pair of matrices, the published form one for each projection; parts in
    another order have the right shapes, and an adapter is small enough that rewards still move.
    Evidence: train/adapter, export/adapter, train/adapter-scaling, export/adapter-scaling.
    Tolerance and its source: bitwise, the factor to six digits; export copies.
    What it does not catch: an adapter whose effect in the trainer is another one (LGP001); a sync that exports none
    (TPT004).
    References: miles#1792, TensorRT-LLM#8063, vllm#55545, peft#1930.
    """
    for version in trace.versions(LiveAdapterScaling):
        if version not in trace.manifest.synced_versions or any(trace.of(ExportedAdapterMatrix, version=version)):
            yield from compare_adapters(trace, version)


def compare_adapters(trace: Trace, version: int) -> Iterator[Comparison]:
    """The file of an exported adapter and its configuration, against the live adapters of a version."""
    yield from compare_contents(
        trace.of(ExportedAdapterMatrix, version=version), trace.of(LiveAdapterMatrix, version=version),
        stage=Stage.EXPORT, version=version, actual_says="the exported adapter",
        expected_says="the live adapters", allowed="bitwise (export copies)",
        hint="look at how fused adapters are split, and at the axes that shard them",
    )  # fmt: skip
    for live in trace.of(LiveAdapterScaling, version=version):
        exported = next(trace.of(ExportedAdapterScaling, version=version), None)
        want, got = f"{float(live.scaling):g}", f"{float(exported.scaling):g}" if exported else "absent"
        yield Comparison(
            what="alpha / rank", same=got == want, stage=Stage.EXPORT, version=version, badness=1.0,
            sentence=f"the exported adapter is multiplied by {got}, the live ones by {want}",
            expected=f"{want} (the live adapters)", actual=f"{got} (the exported adapter)", allowed="six digits",
            hint="look at alpha and rank in the adapter's configuration", absent=exported is None,
        )  # fmt: skip
        further = exported.further if exported else {}
        asked = ", ".join(f"{key} = {value}" for key, value in further.items()) or "nothing"
        yield Comparison(
            what="further settings", same=not further, stage=Stage.EXPORT, version=version, badness=1.0,
            sentence=f"the exported adapter's configuration asks a reader for {asked} besides rank, alpha and linears",
            expected="nothing (the live adapters have one rank and one alpha)", actual=f"{asked} (adapter_config.json)",
            allowed="exact", hint="look at what writes the adapter's configuration",
        )  # fmt: skip


@check(
    "WGT014",
    needs=(ExportedTensor, SavedCheckpoint),
    applies=on(
        golden=SAVED,
        roundtrip=EXPORTS & SAVED,
        loop=recorded(ExportedTensor, SavedCheckpoint)
        & told("saved export", "the files are not of a version that was exported"),
    ),
)
def saved_checkpoint_differs_from_export(trace: Trace) -> Iterator[Comparison]:
    """The checkpoint that megatron-bridge writes to files holds what it exports: every tensor, where the index says.

    What it checks: of the last version (golden: of the first), what a reader finds in the shards by their index,
    against the export: names both ways, dtypes, shapes and bits. Absent is what lies in a shard and not in the index,
    and what the index places where it is not.
    Why it matters: files are written shard by shard, as the source had them; a shard of which one tensor never comes is
    left out whole, and the index is made to fit. The next run, or whoever deploys the model, reads that.
    Evidence: export/tensor of trainer rank 0, export/saved, export/saved-files.
    Tolerance and its source: bitwise; a file is a copy.
    What it does not catch: an export that is wrong as well (WGT004, WGT005); tokenizers and generation settings;
    checkpoints of more than 1 GiB, which are not written.
    References: Megatron-Bridge#4188, Megatron-Bridge#4083, AReaL#1403, Relax#148.
    """
    for files in trace.of(SavedCheckpoint):
        exported = by_name(trace.of(ExportedTensor, version=files.version, rank=0))
        yield from compare_contents(
            trace.of(SavedTensor, version=files.version), exported.values(),
            stage=Stage.EXPORT, version=files.version, actual_says="the saved checkpoint", expected_says="the export",
            allowed="bitwise (a file is a copy)", hint="look at which tensors share a shard, and at the index",
        )  # fmt: skip
        for name in files.missing:
            if name not in exported:
                yield Comparison(
                    what=name, same=False, stage=Stage.EXPORT, version=files.version, badness=1.0, absent=True,
                    sentence=f"the index names `{name}`, which is in no shard and was not exported",
                    expected="absent (the export)", actual="in the index alone (the saved checkpoint)",
                    allowed="exact", hint="look at what the index is made of",
                )  # fmt: skip
