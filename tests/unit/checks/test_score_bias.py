"""TRN004 on hand-written biases: one that moves between two updates is seen before the second."""

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from tests.snapshots.training_traces import training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.stages.train.records import RouterBalance


def judged(array):
    first, *others = [item for item in training() if isinstance(item, RouterBalance)]
    return run_check(REGISTRY["TRN004"], make_trace([replace(first, array=array), *others]))


@pytest.mark.parametrize(("array", "compared"), [("balance", 3), ("balance of a bias that stayed", 4)])
def test_a_bias_that_stayed_holds_and_the_first_update_has_none_before_it(array, compared):
    outcome = judged(array)
    assert (outcome.verdict, outcome.num_compared) == (Verdict.HOLDS, compared)


def test_a_bias_that_moved_between_two_updates_is_seen():
    outcome = judged("balance of a bias that moved")
    assert outcome.verdict is Verdict.VIOLATED
    assert outcome.finding.first.sentence == (
        "the score bias of layer 2 before update 1 at expert 0 is 0.5 (the live router), it should be "
        "0.500244141 (what the "
        "update before left)"
    )
