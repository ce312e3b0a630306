"""TRN005 and TRN002 on hand-written updates: each part of an audit, and each group of parameters, is judged alone."""

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ONE_RANK, make_trace
from tests.snapshots.training_traces import AUDITED, GROUPS, training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.records_trainer import AdamAudit, TrainerStep


def audited(**values):
    audit = AdamAudit(name="update 2", version=2, coordinate="tp=0", tensors=AUDITED, remembered=1)
    outcome = run_check(REGISTRY["TRN005"], make_trace([replace(audit, **values)], ONE_RANK))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


def grouped(*groups):
    records = [replace(item, groups=groups) if isinstance(item, TrainerStep) else item for item in training()]
    outcome = run_check(REGISTRY["TRN002"], make_trace(records))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


def test_an_update_by_the_formula_holds():
    assert audited() == (Verdict.HOLDS, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gap": "nan"}, "update 2 leaves masters of `decoder.weight` that are not finite, unlike what Adam makes"),
        ({"gap": 1.1e-3}, "update 2 leaves masters of `decoder.weight` that are 0.0011 learning rates off what Adam"),
        (
            {"moments": 1.5},
            "the gap of moments of `decoder.weight` after update 2 to Adam's, in roundings of float32, is 1.5, "
            "it should be "
            "at most 1",
        ),
        (
            {"moments": "nan"},
            "the gap of moments of `decoder.weight` after update 2 to Adam's, in roundings of float32, is nan",
        ),
        ({"copied": False}, "after update 2 weights of `decoder.weight` are not its masters"),
        ({"left": 0.5}, "the greatest element of the gradient of `decoder.weight` that update 2 begins with is 0.5"),
    ],
)
def test_each_fact_of_a_tensor_is_judged(values, said):
    verdict, sentence = audited(tensors=(replace(AUDITED[0], **values),))
    assert verdict is Verdict.VIOLATED
    assert sentence.startswith(said)


def test_state_that_moves_between_updates_is_seen():
    verdict, sentence = audited(moved=("decoder.weight",))
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "tensors whose masters, moments or weights moved before update 2: 1 of 1 (`decoder.weight`), there "
        "should be none"
    )


def test_masters_of_other_weights_are_seen():
    verdict, sentence = audited(strays=("decoder.weight", "norm.weight"))
    assert (verdict, sentence) == (
        Verdict.VIOLATED,
        "tensors whose weights are not the optimizer's masters before update 2: 2 (`decoder.weight` and 1 more), there "
        "should be none",
    )


@pytest.mark.parametrize("moment", [1e-9, "nan"])
def test_a_new_run_begins_without_moments(moment):
    assert audited(name="update 1", begun_with=0.0) == (Verdict.HOLDS, None)
    said = f"the greatest moment that update 1, the first of the run, begins with is {moment}, it should be 0"
    assert audited(name="update 1", begun_with=moment) == (Verdict.VIOLATED, said)


def test_a_parameter_that_is_not_trained_is_seen():
    assert audited(frozen=("norm.weight",)) == (
        Verdict.VIOLATED,
        "parameters that are not trained, and are of no adapter's base: 1 (`norm.weight`), there should be none",
    )  # fmt: skip


def test_a_record_of_an_older_version_has_no_groups():
    assert grouped() == (Verdict.HOLDS, None)


def test_norms_that_decay_are_seen():
    verdict, sentence = grouped(GROUPS[0], replace(GROUPS[1], weight_decay=0.1))
    assert (verdict, sentence) == (
        Verdict.VIOLATED,
        "the weight decay of group 1 of update 1 on rank 0 is 0.1 (the optimizer's), it should be 0 (the cosine "
        "schedule "
        "at step 1)",
    )  # fmt: skip


def test_a_group_of_norms_and_matrices_is_seen():
    verdict, sentence = grouped(replace(GROUPS[0], vectors=3))
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "the number of norms and biases beside 6 others, which decay, in group 0 of update 1 on rank 0 is 3, it "
        "should be 0"
    )


def test_matrices_that_do_not_decay_are_seen():
    assert grouped(GROUPS[0], replace(GROUPS[0], weight_decay=0.0))[0] is Verdict.VIOLATED


def test_one_group_with_an_old_rate_is_seen():
    assert grouped(replace(GROUPS[0], learning_rate=4e-4), GROUPS[1])[0] is Verdict.VIOLATED
