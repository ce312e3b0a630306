"""Exports: their tensors, configs and files, adapters merged and saved, and what they leave of the live weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from operator import attrgetter

from msgspec.structs import replace

from verifier.core.check import LOOP, At, Comparison, Stage, Trace, check, compare_set, compare_value, owner_of
from verifier.core.condition import ALWAYS, NEEDS, condition, knob, on, recorded, several, told
from verifier.stages.checks_conditions import (
    ADAPTER,
    ADAPTERS_SENT,
    CUT,
    EXPORTS,
    FIRST,
    LAYOUT,
    NO_ADAPTER,
    OF_SOURCE,
    SAMPLED,
    SAVED,
    SENT,
    SYNCED,
    WEIGHTS_SENT,
)
from verifier.stages.checks_content import (
    by_name,
    compare_contents,
    compare_ranks,
    describe,
    facts_of,
    left_out,
)
from verifier.stages.export.records import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    ExportedConfig,
    ExportedShard,
    ExportedTensor,
    ExportStream,
    MergedMatrix,
    SavedCheckpoint,
    SavedFiles,
    SavedTensor,
    WrittenShard,
)
from verifier.stages.load.records import LoadedShard, SourceConfig, SourceFiles, SourceTensor
from verifier.stages.train.records import JoinedTensor, LiveAdapterMatrix, LiveAdapterScaling, UpdatedShard

HALF_STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of rounding to a dtype."""
SUMMANDS = 3
"""Roundings in float32 besides those of the sum over an adapter's rank: of the factor, its product, and the base."""


@check(
    "WGT018",
    needs=(MergedMatrix,),
    applies=on(
        step=SYNCED & WEIGHTS_SENT & ADAPTER, export=ADAPTER, loop=recorded(MergedMatrix, ExportedTensor, SourceTensor)
    ),
)
def merged_matrix_wrong(trace: Trace) -> Iterator[Comparison]:
    """A matrix that is exported with its adapter added is base + alpha / rank * B A, rounded once; all others are base.

    What it checks: each such matrix against the product in float64 of the live shards, joined without megatron-bridge
    (`verifier/export/names.py`), and the source checkpoint's base. Every other tensor of a sync against the source:
    names both ways, dtypes, shapes and bits.
    Why it matters: a merge that scales by another factor, adds the adapter twice, or adds it in bf16, samples from
    another policy, by too little to see in rewards.
    Evidence: export/merged, export/tensor of trainer rank 0, load/source.
    Tolerance and its source: bitwise for what has no adapter, as nothing trains it. Of a merged matrix one rounding to
    the exported dtype, and of a sum of as many float32 numbers as the rank and 3 more, each relative to |base| + alpha
    / rank * |B| |A|.
    Where to look: the factor of the merge, its dtype, and what was merged, cast, cached or gathered before.
    What it does not catch: an adapter that rounding swallows: `merge_rounding` in the metrics says how much it takes.
    References: NeMo-RL#3696, trl#6688, UniRL#155.
    """
    for item in trace.of(MergedMatrix):
        step = HALF_STEP[item.dtype]
        allowed = 1 + (item.rank_of_adapter + SUMMANDS) * HALF_STEP["float32"] / step
        gap = float(item.gap)
        subject = f"`{item.name}`, in half steps of {item.dtype} from its base and adapter at element {item.where:,},"
        says = "the export", "base + alpha / rank * B A, float64, of the live shards"
        words = f"{allowed:.3g} half steps (one rounding, and a sum of {item.rank_of_adapter} numbers)"
        yield compare_value(item, item.name, gap, None, subject=subject, says=says, allowed=words, bound=allowed)
    for version in trace.versions(MergedMatrix):
        merged = {item.name for item in trace.of(MergedMatrix, version=version)}
        exported = [item for item in trace.of(ExportedTensor, version=version, rank=0) if item.name not in merged]
        source = by_name(trace.of(SourceTensor))
        copies = left_out(source, exported)
        base = [item for name, item in source.items() if name not in merged and name not in copies]
        says = "the export", "the source checkpoint, which nothing trains"
        yield from compare_contents(exported, base if exported else (), says, Stage.EXPORT, version)


FILES = "the files of hf_model"
"""Reporter of what was written."""


@check(
    "WGT019",
    needs=(
        SavedCheckpoint, SavedTensor, SourceTensor, WrittenShard, LiveAdapterMatrix, LiveAdapterScaling,
        ExportedAdapterMatrix, ExportedAdapterScaling,
    ),
    applies=on(
        export=ALWAYS,
        loop=recorded(SavedCheckpoint, SavedTensor, SourceTensor, WrittenShard, UpdatedShard),
    ), wholly=on(export=LAYOUT, loop=ALWAYS),
)  # fmt: skip
def final_export_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """The checkpoint that a run leaves holds the weights that its last update left.

    What it checks: of the files of `hf_model`, read by their index, names, dtypes and shapes against the source's, both
    ways; and on each rank dtype, shape and bits of every live shard after the last update, against what the independent
    layout (`verifier/export/names.py`) cuts from the files. Of a run that trains adapters, every matrix without one
    against the source (WGT018 judges the others), and the files of the adapter against the live ones, its configuration
    too (WGT013).
    Why it matters: it is what the run was for. Written before the last update, with a shard missing, an adapter left
    out or a cast in between, it loads everywhere and is only worse.
    Evidence: export/saved, export/saved-files, export/written, load/source, train/shard; train/adapter, export/adapter,
    export/merged.
    Tolerance and its source: bitwise; an export copies.
    Where to look: when the export read this tensor, what it casts or gathers, which tensors share a file, and the
    index.
    What it does not catch: contents of families without a layout, which the report says; config.json (WGT011), and the
    other files (WGT021).
    References: prime-rl#1707, SkyRL#1345, Megatron-Bridge#4188.
    """
    for files in trace.of(SavedCheckpoint):
        version, says = files.version, (f"{FILES}, cut by layout", "the live model after the last update")
        yield from _against_source(trace, files)
        yield from compare_ranks(trace, (WrittenShard, version), (UpdatedShard, version), says)
        if trace.has(LiveAdapterScaling):
            yield from compare_adapters(trace, version)


@check("WGT021", needs=(SourceFiles, SavedFiles), applies=on(export=ALWAYS, loop=NEEDS))
def final_files_differ(trace: Trace) -> Iterator[Comparison]:
    """Tokenizer, chat template, generation settings and code of the checkpoint that a run leaves are the source's.

    What it checks: of all files of `hf_model` beside its weights, their index and config.json, names and bytes against
    those of the source, both ways; the source's weights in other forms than safetensors, which are those from before
    the training, are to be absent.
    Why it matters: the weights are right, and whoever loads them samples without an end, with another temperature, by
    another chat template or with cut prompts: an empty generation_config.json outdoes the end tokens of config.json.
    Evidence: load/files, export/files.
    Tolerance and its source: exact; training changes weights.
    Where to look: what reads and saves tokenizers and generation settings, and what is copied.
    What it does not catch: files that are wrong in the source; folders within it.
    References: Automodel#3890, LlamaFactory#8399, marin#4153, colibri#1478.
    """
    for files in trace.of(SavedFiles):
        source = next(trace.of(SourceFiles, version=files.version))
        got, want = files.digests, source.digests
        counts = {"number of files": (len(got), len(want))}
        for name, (is_there, was_there) in (
            {each: (got.get(each), want.get(each)) for each in sorted(want | got)} | counts
        ).items():
            says, absent = (FILES, "the source checkpoint"), is_there is None
            yield compare_value(files, name, is_there, was_there, says=says, absent=absent, owner="")


def _against_source(trace: Trace, files: SavedCheckpoint) -> Iterator[Comparison]:
    """Names, dtypes and shapes of all tensors; the bits, too, of those that an adapter's run does not change."""
    saved, source = by_name(trace.of(SavedTensor, version=files.version)), by_name(trace.of(SourceTensor))
    frozen = trace.has(LiveAdapterScaling) and not trace.has(WrittenShard)
    merged = {item.name for item in trace.of(MergedMatrix, version=files.version)}
    copies = left_out(source, saved.values())
    wanted = [
        item if (frozen and name not in merged) or name not in saved
        else replace(item, digest=saved[name].digest)
        for name, item in source.items() if name not in copies
    ]  # fmt: skip
    says = FILES, "the source checkpoint"
    yield from compare_contents(saved.values(), wanted, says, Stage.EXPORT, files.version)
    yield from compare_index(files, source, says)


NOT_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "auto_map"})
"""Keys of config.json that say who wrote it, where it was read, and which code of its folder could read it."""


@check(
    "WGT004", needs=(SourceTensor, ExportedTensor),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS,
        step=SYNCED & SENT & FIRST & NO_ADAPTER,
        answers=SENT & FIRST & NO_ADAPTER,
        loop=NEEDS & OF_SOURCE,
    ),
)  # fmt: skip
def export_differs_from_source(trace: Trace) -> Iterator[Comparison]:
    """The export of untouched weights is the source checkpoint: names both ways, dtypes, shapes, bits.

    What it checks: Megatron-Bridge's export at version 0 against the HF safetensors or a recorded manifest; in training
    what the engine gets before step 1, without adapters; in a round trip that trains an adapter, the frozen base at
    every version. A source tensor that repeats a shared one, as layers for multi-token prediction repeat embedding and
    head, need not be exported, but has to be its copy.
    Why it matters: with an absolute tolerance of 0.1 a zeroed tensor and two swapped experts pass.
    Evidence: load/source, export/tensor of trainer rank 0.
    Tolerance and its source: bitwise; import and export copy.
    Where to look: the export mapping of this tensor, and the axes that shard it.
    What it does not catch: an import and an export that are wrong alike (WGT001, LGP001).
    References: Megatron-Bridge `_ROUNDTRIP_ATOL`, SkyRL#1471, Megatron-Bridge#1716.
    """
    for version in trace.manifest.untouched_versions:
        exported = list(trace.of(ExportedTensor, version=version, rank=0))
        source = by_name(trace.of(SourceTensor))
        copies = left_out(source, exported)
        rest = [item for item in source.values() if item.name not in copies]
        yield from compare_contents(exported, rest, ("the export", "the source checkpoint"), Stage.EXPORT, version)
        for name, item in copies.items():
            at, shared = At(Stage.EXPORT, version), source.get(item.copy_of)
            same = shared is not None and facts_of(item) == facts_of(shared)
            says = ("the source", f"its `{item.copy_of}`")
            sentence = f"`{name}` is left out of the export as a copy of `{item.copy_of}`, which it is not"
            yield compare_value(at, name, describe(item), describe(shared), same=same, sentence=sentence, says=says)


@check(
    "WGT005", needs=(JoinedTensor, ExportedTensor),
    applies=on(roundtrip=EXPORTS & LAYOUT, step=SYNCED & NO_ADAPTER & SAMPLED, loop=NEEDS),
)  # fmt: skip
def export_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """After every update the export is what the trainer's live shards hold, assembled by the independent layout.

    What it checks: at each version above 0, names, dtypes, shapes and bits of the export against the live parameters of
    all ranks, joined by `verifier/export/names.py` without Megatron-Bridge; a copy that the source has under a second
    name, where it is exported, against what it repeats. In training on the steps that transformers
    computes too, without adapters, and there of what the first step after a start begins with.
    Why it matters: stale exports (a cached conversion task, a parameter gather that had not run) are right at the first
    sync and wrong at the second.
    Evidence: train/live, export/tensor of trainer rank 0.
    Tolerance and its source: bitwise; an export copies.
    Where to look: what was cached, or not yet gathered, when the export ran: compare with version 0.
    What it does not catch: a wrong step (LSS001, TRN001, WGT002).
    References: SkyRL#1345, SkyRL#1471, and stale export under `overlap_param_gather`.
    """
    copies = {item.name: item.copy_of for item in trace.of(SourceTensor) if item.copy_of}
    for version in trace.versions(JoinedTensor):
        exported = list(trace.of(ExportedTensor, version=version, rank=0))
        live, first = list(trace.of(JoinedTensor, version=version)), dict[str, JoinedTensor]()
        if trace.manifest.command == LOOP:  # several ranks may tell a tensor
            others = [item for item in live if first.setdefault(item.name, item).rank != item.rank]
            live = [item for item in live if first[item.name].rank == item.rank]
            for rank in sorted({item.rank for item in others}):
                own = [item for item in others if item.rank == rank]
                told, says = [first[item.name] for item in own], (f"trainer rank {rank}", "the first rank that has it")
                yield from compare_contents(own, told, says, Stage.TRAIN, version)
        held = by_name(live)
        names = {item.name for item in exported if copies.get(item.name) in held} - held.keys()
        live += [replace(held[copies[name]], name=name) for name in sorted(names)]
        yield from compare_contents(exported, live, ("the export", "the live shards"), Stage.EXPORT, version)


@check("WGT020", needs=(UpdatedShard, ExportedShard), applies=on(step=CUT))
def exported_shard_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """At every sync of a training run the export is what each rank's own shards hold.

    What it checks: on each rank, dtype, shape and bits of every live shard after the step's last update, against what
    the independent layout (`verifier/export/names.py`) cuts for it from the rank's own export stream. Before the first
    step after a resume, the same of what the shards held when the checkpoint was loaded.
    Why it matters: a cached tensor, a parameter of the step before or a buffer that was filled for another name is
    healed by the next sync, and the answers in between are of no policy. A reference that was loaded last and stands in
    the place of the resumed weights samples the first step.
    Evidence: train/shard, export/shard, load/shard, per rank.
    Tolerance and its source: bitwise; an export copies.
    Where to look: when the export read this tensor, and what it caches or gathers into.
    What it does not catch: names, dtypes and shapes that no shard is cut from (PLN002); streams that differ between
    ranks or versions (WGT006); a wrong step (LSS001, TRN001, WGT002); a wrong load (CKP001). On a GPU models above 256
    MiB are not compared.
    References: SkyRL#1345, SkyRL#1471, SkyRL#1816, slime#2380.
    """
    stepped = set(trace.versions(UpdatedShard))
    for version in trace.versions(ExportedShard):
        kind, when = (UpdatedShard, "the last update") if version in stepped else (LoadedShard, "the load")
        says = "the export, cut by layout", f"the live model after {when}"
        yield from compare_ranks(trace, (ExportedShard, version), (kind, version), says)


SEVERAL = condition(
    "one version was exported",
    lambda run: len(run.facts.exported) > 1 or "export" in (knob(run, "undertakes") or ()),
)  # fmt: skip
OF_RANKS = on(
    golden=ALWAYS, roundtrip=EXPORTS,
    loop=several(ExportedTensor) & told("whole exports", "ranks export other tensors"),
)  # fmt: skip
OF_VERSIONS = on(roundtrip=EXPORTS & NO_ADAPTER, loop=recorded(ExportedTensor) & SEVERAL)


@check(
    "WGT006",
    needs=(ExportedTensor,),
    applies=OF_RANKS | OF_VERSIONS,
)
def export_streams_disagree(trace: Trace) -> Iterator[Comparison]:
    """Every trainer rank's export, and every version's, yields the same tensors in the same order.

    What it checks: names in order, dtypes, shapes and bits of each rank's stream against rank 0's, at each version; and
    names in order, dtypes and shapes of rank 0's stream at each later version against its first.
    Why it matters: colocated engines load what their own rank exported; a rank that yields another order feeds bytes
    under the wrong names, or hangs the collective of the next tensor. Names are sent once and bytes with every version:
    a stream in the order of a set, a cache or an arrival is refused, or puts tensors of one shape under each other's
    names.
    Evidence: export/tensor of all ranks.
    Tolerance and its source: bitwise; every rank receives the same broadcast, and training changes values only.
    Where to look: what orders and gathers the conversion tasks on this rank, and what they skip.
    What it does not catch: all ranks and versions wrong alike (WGT004, WGT005).
    References: SkyRL#1581, SkyRL#1816, Megatron-Bridge#4083.
    """
    versions = trace.versions(ExportedTensor)
    if OF_RANKS(trace.manifest) is None:
        for version, rank in itertools.product(versions, range(trace.manifest.world_size)):
            says = f"the export of trainer rank {rank}", "rank 0's"
            yield _compare_streams(trace, (version, rank), (version, 0), ("name", "dtype", "shape", "digest"), says)
    if OF_VERSIONS(trace.manifest) is None:
        first, *later = versions
        for version in later:
            says = f"the export of version {version}", f"that of version {first}"
            yield _compare_streams(trace, (version, 0), (first, 0), ("name", "dtype", "shape"), says)


def _compare_streams(
    trace: Trace, actual: tuple[int, int], expected: tuple[int, int], fields: tuple[str, ...], says: tuple[str, str]
) -> Comparison:
    """The export stream of one (version, rank) against another's: where they part in some fields, and how."""
    facts = attrgetter(*fields)
    got, want = (list(trace.of(ExportedTensor, version=version, rank=rank)) for version, rank in (actual, expected))
    for place, (ours, theirs) in enumerate(itertools.zip_longest(got, want)):
        if ours is None or theirs is None:
            how = f"ends after {len(got)} tensors, {says[1]} after {len(want)}"
        elif ours.name != theirs.name:
            how = f"has `{ours.name}` in place {place}, {says[1]} has `{theirs.name}`"
        elif facts(ours) != facts(theirs):
            how = f"has another `{ours.name}` than {says[1]}"
        else:
            continue
        left, right = (f"`{item.name}` {describe(item)}" if item else "the end" for item in (ours, theirs))
        at = At(Stage.EXPORT, actual[0], owner_of(ours or theirs))
        name = (theirs or ours).name
        absent = "the end" in (left, right)
        sentence = f"{says[0]} {how}"
        return compare_value(at, name, left, right, same=False, sentence=sentence, says=says, absent=absent)
    return compare_value(At(Stage.EXPORT, actual[0]), says[0], len(got), len(want))


@check(
    "WGT016", needs=(ExportStream,),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS & NO_ADAPTER,
        step=SYNCED & WEIGHTS_SENT,
        answers=SENT & WEIGHTS_SENT,
        loop=NEEDS,
    ),
)  # fmt: skip
def exported_tensor_overwritten(trace: Trace) -> Iterator[Comparison]:
    """A tensor that an export has handed out stays as it was while its reader holds it.

    What it checks: each tensor of the stream, as long as it is held, whenever a later one lies in the same memory.
    Why it matters: a stream that gathers into one buffer is right for a reader that takes one tensor at a time, and
    gives a reader that fills buckets the last tensor under all their names.
    Evidence: export/stream of every trainer rank.
    Tolerance and its source: exact; the digest of the moment it was handed out.
    Where to look: what the export gathers and converts into, and whether it is used again.
    What it does not catch: memory that is written when nothing more comes (TPT001).
    References: vllm#43464, vllm#39650, cosmos-rl#703.
    """
    for item in trace.of(ExportStream):
        overwritten = list(dict.fromkeys(each.name for each in item.reread if each.still_held != each.handed_over))
        subject = "exported tensors that were written over while they were held"
        yield compare_set(
            item, next(iter(overwritten), item.name), overwritten, total=item.num_tensors, subject=subject
        )


@check(
    "WGT011", needs=(SourceConfig, ExportedConfig),
    applies=on(golden=ALWAYS, roundtrip=EXPORTS, export=ALWAYS, loop=NEEDS),
)  # fmt: skip
def exported_config_differs(trace: Trace) -> Iterator[Comparison]:
    """The config.json that goes with an export says what the source's says.

    What it checks: every key, both ways, of what megatron-bridge writes beside an export, against the source's, both as
    transformers reads them; the version of transformers apart.
    Why it matters: the weights are right and the next run reads them with another number of experts, rope base, epsilon
    or tie; a trainer that sets a runtime option on the model's own configuration exports it too.
    Evidence: load/config, export/config.
    Tolerance and its source: exact; training changes weights and no architecture.
    Where to look: what sets options on the model's own configuration.
    What it does not catch: what the trainer itself takes from the source's config.json (LGP001).
    References: SkyRL#1727, Megatron-Bridge#5994.
    """
    for version in trace.versions(ExportedConfig):
        exported = next(trace.of(ExportedConfig, version=version))
        got, want = exported.values, next(trace.of(SourceConfig, version=version)).values
        for key in [each for each in want | got if each not in NOT_OF_THE_MODEL]:
            says = "the exported config.json", "the source's"
            held, stated = got.get(key), want.get(key)
            yield compare_value(exported, f"config.json {key}", _with_open_dtype(held, stated), stated, says=says)


def _with_open_dtype(held: str | None, stated: str | None) -> str | None:
    """A key's JSON without the dtype of a part of the model, such as `vision_config`, where the source's is open.

    transformers fills it in when it loads the model.
    """
    part, source = json.loads(held or "null"), json.loads(stated or "null")
    if isinstance(part, dict) and isinstance(source, dict) and source.get("dtype", "") is None:
        return json.dumps(part | {"dtype": None}, sort_keys=True)
    return held


@check(
    "WGT013", needs=(LiveAdapterMatrix, ExportedAdapterMatrix, LiveAdapterScaling, ExportedAdapterScaling),
    applies=on(
        roundtrip=EXPORTS & ADAPTER & LAYOUT,
        step=SYNCED & ADAPTERS_SENT,
        answers=SENT & ADAPTERS_SENT,
        loop=NEEDS,
    ),
)  # fmt: skip
def exported_adapter_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """The adapter that an engine is given is the one that the trainer's ranks hold.

    What it checks: at each version above 0, names, dtypes, shapes and bits of the matrices in the adapter's file, and
    alpha over rank in its configuration, against the live adapters of all ranks, joined without megatron-bridge
    (`verifier/export/names.py`); and that the configuration asks for nothing else, such as another alpha for some
    linears, layers that have no adapter, or DoRA.
    Why it matters: fused linears have one pair of matrices, the published form one for each projection; parts in
    another order have the right shapes, and an adapter is small enough that rewards still move.
    Evidence: train/adapter, export/adapter, train/adapter-scaling, export/adapter-scaling.
    Tolerance and its source: bitwise, the factor to six digits; export copies.
    Where to look: how fused adapters are split, the axes that shard them, and what writes the adapter's configuration.
    What it does not catch: an adapter whose effect in the trainer is another one (LGP001); a sync that exports none
    (TPT002).
    References: miles#1792, TensorRT-LLM#8063, vllm#55545, peft#1930.
    """
    for version in trace.versions(LiveAdapterScaling):
        if version not in trace.manifest.synced_versions or any(trace.of(ExportedAdapterMatrix, version=version)):
            yield from compare_adapters(trace, version)


def compare_adapters(trace: Trace, version: int) -> Iterator[Comparison]:
    """The file of an exported adapter and its configuration, against the live adapters of a version."""
    exported, live = (trace.of(kind, version=version) for kind in (ExportedAdapterMatrix, LiveAdapterMatrix))
    says = "the exported adapter", "the live adapters"
    hint = "look at how fused adapters are split, at the axes that shard them, and at what writes the configuration"
    yield from compare_contents(exported, live, says, Stage.EXPORT, version, hint=hint)
    at = At(Stage.EXPORT, version)
    for item in trace.of(LiveAdapterScaling, version=version):
        given = next(trace.of(ExportedAdapterScaling, version=version), None)
        want, got = f"{float(item.scaling):g}", f"{float(given.scaling):g}" if given else "absent"
        yield compare_value(at, "alpha / rank", got, want, says=says, absent=given is None, hint=hint)
        further = [f"{key} = {value}" for key, value in given.further.items()] if given else []
        subject = "settings of the exported adapter besides rank, alpha and linears"
        yield compare_set(at, "further settings", further, subject=subject, says=says, hint=hint)


@check(
    "WGT014",
    needs=(ExportedTensor, SavedCheckpoint),
    applies=on(
        golden=SAVED,
        roundtrip=EXPORTS & SAVED,
        loop=NEEDS & told("saved export", "the files are not of a version that was exported"),
    ),
)
def saved_checkpoint_differs_from_export(trace: Trace) -> Iterator[Comparison]:
    """The checkpoint that megatron-bridge writes to files holds what it exports: every tensor, where the index says.

    What it checks: of the last version (golden: of the first), what a reader finds in the shards by their index,
    against the export: names both ways, dtypes, shapes and bits. Absent is what lies in a shard and not in the index,
    and what the index places where it is not.
    Why it matters: files are written shard by shard, as the source had them; a shard of which one tensor never comes is
    left out whole, and the index is made to fit.
    Evidence: export/tensor of trainer rank 0, export/saved, export/saved-files.
    Tolerance and its source: bitwise; a file is a copy.
    Where to look: which tensors share a shard, and what the index is made of.
    What it does not catch: an export that is wrong as well (WGT004, WGT005); tokenizers and generation settings;
    checkpoints of more than 1 GiB, which are not written.
    References: Megatron-Bridge#4188, Megatron-Bridge#4083, AReaL#1403, Relax#148.
    """
    for files in trace.of(SavedCheckpoint):
        exported = by_name(trace.of(ExportedTensor, version=files.version, rank=0))
        saved, says = trace.of(SavedTensor, version=files.version), ("the saved checkpoint", "the export")
        yield from compare_contents(saved, exported.values(), says, Stage.EXPORT, files.version)
        yield from compare_index(files, exported, says)


def compare_index(files: SavedCheckpoint, right: Mapping[str, object], says: tuple[str, str]) -> Iterator[Comparison]:
    """Names that the index of saved files has and no file, where they should not be there at all."""
    for name in files.missing:
        if name not in right:
            at = At(Stage.EXPORT, files.version)
            sentence = f"the index names `{name}`, which is in no file and not in {says[1]}"
            yield compare_value(at, name, "in the index alone", "absent", absent=True, says=says, sentence=sentence)
