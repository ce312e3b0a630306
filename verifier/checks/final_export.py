"""The product of a training run: the checkpoint that it exports at its end."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from verifier.checks.conditions import LAYOUT
from verifier.checks.content import by_name, compare_contents, compare_ranks, left_out
from verifier.checks.weights import compare_adapters, compare_index
from verifier.core.check import Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.records_config import SavedFiles, SourceFiles
from verifier.core.records_weights import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    MergedMatrix,
    SavedCheckpoint,
    SavedTensor,
    SourceTensor,
    UpdatedShard,
    WrittenShard,
)

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


@check("WGT021", needs=(SourceFiles, SavedFiles), applies=on(export=ALWAYS, loop=recorded(SourceFiles, SavedFiles)))
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
