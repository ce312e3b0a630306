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
            "update 2 leaves moments of `decoder.weight` that are 1.5 times what float32 may round them by off what",
        ),
        ({"moments": "nan"}, "update 2 leaves moments of `decoder.weight` that are nan times"),
        ({"copied": False}, "after update 2 weights of `decoder.weight` are not its masters"),
        ({"left": 0.5}, "update 2 begins with a gradient of `decoder.weight` of up to 0.5"),
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
        "masters, moments or weights of 1 of 1 tensors moved before update 2, `decoder.weight` the first"
    )


def test_masters_of_other_weights_are_seen():
    verdict, sentence = audited(strays=("decoder.weight", "norm.weight"))
    assert (verdict, sentence) == (
        Verdict.VIOLATED,
        "before update 2 the weights of 2 tensors are not the optimizer's masters, `decoder.weight` the first",
    )


@pytest.mark.parametrize("moment", [1e-9, "nan"])
def test_a_new_run_begins_without_moments(moment):
    assert audited(name="update 1", begun_with=0.0) == (Verdict.HOLDS, None)
    said = f"update 1, the first of the run, begins with moments of up to {moment if moment == 'nan' else '1e-09'}"
    assert audited(name="update 1", begun_with=moment) == (Verdict.VIOLATED, said)


def test_a_parameter_that_is_not_trained_is_seen():
    assert audited(frozen=("norm.weight",)) == (
        Verdict.VIOLATED, "1 parameters are not trained, `norm.weight` the first"
    )  # fmt: skip


def test_a_record_of_an_older_version_has_no_groups():
    assert grouped() == (Verdict.HOLDS, None)


def test_norms_that_decay_are_seen():
    verdict, sentence = grouped(GROUPS[0], replace(GROUPS[1], weight_decay=0.1))
    assert (verdict, sentence) == (
        Verdict.VIOLATED, "update 1 has a weight decay of group 1 of 0.1, it should be 0"
    )  # fmt: skip


def test_a_group_of_norms_and_matrices_is_seen():
    verdict, sentence = grouped(replace(GROUPS[0], vectors=3))
    assert verdict is Verdict.VIOLATED
    assert sentence == "update 1 has 3 norms and biases in group 0, which decays, it should have none"


def test_matrices_that_do_not_decay_are_seen():
    assert grouped(GROUPS[0], replace(GROUPS[0], weight_decay=0.0))[0] is Verdict.VIOLATED


def test_one_group_with_an_old_rate_is_seen():
    assert grouped(replace(GROUPS[0], learning_rate=4e-4), GROUPS[1])[0] is Verdict.VIOLATED
