"""WGT004, WGT005 and PLN002 on source tensors that repeat a shared one, as layers for further tokens do."""

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ONE_RANK, make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.model.families import copies_of
from verifier.stages.export.records import ExportedTensor
from verifier.stages.load.records import SourceTensor
from verifier.stages.plan.records import PlannedTensor
from verifier.stages.train.records import JoinedTensor

HEAD, REPEATED = "lm_head.weight", "model.layers.2.shared_head.head.weight"
MTP = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def described(name, content, shape=(2,)):
    return {"name": name, "version": 0, "digest": "vd1:" + content * 32, "dtype": "float32", "shape": shape}


def source(content, shape=(2,)):
    return [
        SourceTensor(**described(HEAD, "a")),
        SourceTensor(copy_of=copies_of(MTP)[REPEATED], **described(REPEATED, content, shape)),
    ]


def verdict(code, *records):
    outcome = run_check(REGISTRY[code], make_trace(records, ONE_RANK))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


@pytest.mark.parametrize(("content", "shape"), [("b", (2,)), ("a", (1, 2))])
def test_a_repeated_tensor_that_differs_is_no_copy(content, shape):
    said = f"`{REPEATED}` is left out of the export as a copy of `{HEAD}`, which it is not"
    records = [*source(content, shape), ExportedTensor(**described(HEAD, "a"))]
    assert verdict("WGT004", *records) == (Verdict.VIOLATED, said)


def test_a_copy_need_not_be_exported():
    assert verdict("WGT004", *source("a"), ExportedTensor(**described(HEAD, "a"))) == (Verdict.HOLDS, None)


def test_a_copy_of_nothing_is_no_copy():
    records = [source("a")[1], SourceTensor(**described("w", "a")), ExportedTensor(**described("w", "a"))]
    assert verdict("WGT004", *records)[0] is Verdict.VIOLATED


@pytest.mark.parametrize(("content", "found"), [("a", Verdict.HOLDS), ("b", Verdict.VIOLATED)])
def test_a_copy_that_is_exported_is_compared_as_every_tensor(content, found):
    exported = [ExportedTensor(**described(HEAD, "a")), ExportedTensor(**described(REPEATED, content))]
    assert verdict("WGT004", *source("a"), *exported)[0] is found


@pytest.mark.parametrize(("contents", "found"), [("bb", Verdict.HOLDS), ("b", Verdict.HOLDS), ("ba", Verdict.VIOLATED)])
def test_a_copy_that_is_exported_is_what_the_live_shards_hold_of_the_shared_tensor(contents, found):
    """After a step; the bridge exports the copies of some families and not those of others."""
    pairs = zip((HEAD, REPEATED), contents, strict=False)
    exported = [ExportedTensor(**{**described(name, content), "version": 1}) for name, content in pairs]
    live = JoinedTensor(**{**described(HEAD, "b"), "version": 1})
    assert verdict("WGT005", *source("a"), live, *exported)[0] is found


def test_the_shared_tensor_itself_has_to_be_exported():
    assert verdict("WGT004", *source("a"), ExportedTensor(**described(REPEATED, "a")))[0] is Verdict.VIOLATED


@pytest.mark.parametrize(("names", "found"), [((HEAD,), Verdict.HOLDS), ((REPEATED,), Verdict.VIOLATED)])
def test_a_plan_may_leave_out_copies_alone(names, found):
    entries = [PlannedTensor(version=0, name=name, dtype="float32", shape=(2,)) for name in names]
    assert verdict("PLN002", *source("a"), *entries)[0] is found


def test_without_such_layers_nothing_is_a_copy():
    assert copies_of({"num_hidden_layers": 2, "num_nextn_predict_layers": 0}) == {}
    assert copies_of({"num_hidden_layers": 2}) == {}


def test_with_tied_embeddings_the_head_is_a_copy_of_the_embedding():
    assert set(copies_of({**MTP, "tie_word_embeddings": True}).values()) == {"model.embed_tokens.weight"}
