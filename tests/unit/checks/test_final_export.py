"""WGT019 on hand-written exports of all weights and of adapters."""

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ONE_RANK, make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Facts
from verifier.core.trace import Trace
from verifier.stages.export.records import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    MergedMatrix,
    SavedCheckpoint,
    SavedTensor,
    WrittenShard,
)
from verifier.stages.load.records import SourceTensor
from verifier.stages.train.records import LiveAdapterMatrix, LiveAdapterScaling, UpdatedShard
from verifier.stages.transport.records import Handover


def held(name, content, version=3):
    return {
        "name": name, "version": version, "digest": "vd1:" + content * 32, "dtype": "float32", "shape": (2, 2)
    }  # fmt: skip


def files(contents, missing=()):
    saved = [SavedTensor(**held(name, content)) for name, content in contents.items()]
    return [*saved, SavedCheckpoint(name="shards", version=3, missing=tuple(missing))]


SOURCE = [SourceTensor(**held(name, "0", 0)) for name in "ab"]
LIVE = [UpdatedShard(coordinate="tp=0", replica=name, **held(name, "1")) for name in "ab"]
WRITTEN = [WrittenShard(coordinate="tp=0", **held(name, "1")) for name in "ab"]
ADAPTERS = [
    *(kind(**held("a.lora_A.weight", "2")) for kind in (LiveAdapterMatrix, ExportedAdapterMatrix)),
    *(kind(name="alpha / rank", version=3, scaling=2.0) for kind in (LiveAdapterScaling, ExportedAdapterScaling)),
    MergedMatrix(name="a", version=3, dtype="float32", rank_of_adapter=4, gap=0.5, where=0),
]


def run_of(records):
    """The run that leaves these records: of adapters or not, with a layout or without."""
    facts = Facts(part="export", frozen_base=any(isinstance(item, MergedMatrix) for item in records))
    cut = any(isinstance(item, WrittenShard) for item in records)
    return replace(ONE_RANK, layout="a row" if cut else "", facts=facts)


def judged(*records):
    outcome = run_check(REGISTRY["WGT019"], make_trace(records, run_of(records)))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


def test_trained_weights_in_the_files_hold():
    assert judged(*SOURCE, *LIVE, *WRITTEN, *files({"a": "1", "b": "1"})) == (Verdict.HOLDS, None)


def test_weights_of_another_step_are_seen():
    stale = [replace(WRITTEN[0], digest="vd1:" + "9" * 32), WRITTEN[1]]
    verdict, sentence = judged(*SOURCE, *LIVE, *stale, *files({"a": "9", "b": "1"}))
    assert verdict is Verdict.VIOLATED
    assert sentence.startswith("`a` holds other bits in the files of hf_model, cut by layout than in the live model")


def test_a_tensor_that_is_not_in_the_files_is_seen():
    verdict, sentence = judged(*SOURCE, *LIVE, WRITTEN[0], *files({"a": "1"}))
    assert (verdict, sentence) == (Verdict.VIOLATED, "`b` is absent from the files of hf_model")


def test_an_index_that_names_what_is_in_no_file_is_seen():
    verdict, sentence = judged(*SOURCE, *LIVE, *WRITTEN, *files({"a": "1", "b": "1"}, missing=["c"]))
    assert (verdict, sentence) == (
        Verdict.VIOLATED,
        "the index names `c`, which is in no file and not in the source checkpoint",
    )


def test_another_dtype_in_the_files_is_seen():
    saved = [replace(item, dtype="bfloat16") if item.name == "b" else item for item in files({"a": "1", "b": "1"})]
    assert judged(*SOURCE, *LIVE, *WRITTEN, *saved)[1].startswith("`b` has dtype bfloat16 in the files")


def test_a_family_without_a_layout_is_judged_by_names():
    assert judged(*SOURCE, *LIVE, *files({"a": "7", "b": "8"})) == (Verdict.HOLDS, None)


def test_a_matrix_without_an_adapter_is_the_sources():
    assert judged(*SOURCE, *ADAPTERS, *files({"a": "5", "b": "0"})) == (Verdict.HOLDS, None)
    assert judged(*SOURCE, *ADAPTERS, *files({"a": "5", "b": "6"}))[0] is Verdict.VIOLATED


def test_a_file_of_another_adapter_is_seen():
    other = [
        replace(item, digest="vd1:" + "3" * 32) if isinstance(item, ExportedAdapterMatrix) else item
        for item in ADAPTERS
    ]
    assert judged(*SOURCE, *other, *files({"a": "5", "b": "0"}))[0] is Verdict.VIOLATED


@pytest.mark.parametrize("code", ["WGT019", "WGT013"])
def test_an_alpha_of_its_own_for_some_linears_is_seen(code):
    asked = {"alpha_pattern": '{"down_proj": 8}'}
    other = [replace(item, further=asked) if isinstance(item, ExportedAdapterScaling) else item for item in ADAPTERS]
    records = [*SOURCE, *other, *files({"a": "5", "b": "0"})]
    trace = make_trace(records, run_of(records))
    outcome = run_check(REGISTRY[code], trace)
    assert outcome.verdict is Verdict.VIOLATED
    assert outcome.finding.first.sentence == (
        'settings of the exported adapter besides rank, alpha and linears: 1 (`alpha_pattern = {"down_proj": '
        "8}`), there "
        "should be none"
    )


@pytest.mark.parametrize(("synced", "verdict"), [((3, 4), Verdict.INCONCLUSIVE), ((3,), Verdict.VIOLATED)])
def test_an_adapter_that_a_sync_never_exported_is_left_to_its_delivery(synced, verdict):
    """Version 4 has live matrices and no file: TPT002 says so of a version that was to be delivered."""
    live = [replace(item, version=4) for item in ADAPTERS if isinstance(item, LiveAdapterMatrix | LiveAdapterScaling)]
    trace = make_trace([*ADAPTERS, *live])
    trace.manifest = replace(trace.manifest, synced_versions=synced, engine_ranks=1)
    assert run_check(REGISTRY["WGT013"], trace).verdict is verdict
    ended = Handover(name="transfer", version=4, refused="")
    facts = replace(trace.manifest.facts, updates=(1,), adapters_sent=True)
    config = {"algorithm": "grpo", "data": {}}
    run = replace(trace.manifest, command="train", facts=facts, config=config)
    delivered = run_check(REGISTRY["TPT002"], Trace(run, [*ADAPTERS, *live, ended], {}.__getitem__)).finding.bad
    assert ("no adapter matrices of version 4 were exported" in [item.sentence for item in delivered]) == (4 in synced)
