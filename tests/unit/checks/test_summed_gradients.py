"""TRN006 on hand-written sums: what is not added up, and what the norm counts twice, is seen on any rank."""

from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from tests.snapshots.training_traces import SUMMED, training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.records_trainer import GradientSums, TrainerStep


def judged(change=lambda item: item):
    records = [change(item) if isinstance(item, GradientSums) else item for item in training()]
    kept = [item for item in records if isinstance(item, GradientSums | TrainerStep)]
    outcome = run_check(REGISTRY["TRN006"], make_trace(kept))
    return outcome.verdict, outcome.num_compared, outcome.finding and outcome.finding.first.sentence


def test_sums_of_both_ranks_hold():
    assert judged() == (Verdict.HOLDS, 4, None)


def test_a_gradient_of_one_rank_is_seen():
    verdict, _, sentence = judged(lambda item: replace(item, array="sums of one rank") if item.rank == 0 else item)
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "update 1 gives the optimizer 0.333333 as the gradient of element 4 of `decoder.weight`, its passes gave 1"
    )


def test_a_norm_that_leaves_squares_out_is_seen():
    verdict, _, sentence = judged(lambda item: replace(item, squares=3.0))
    assert (verdict, sentence) == (
        Verdict.VIOLATED, "update 1 clips by a gradient norm of 2, its gradients have 2.44949"
    )  # fmt: skip


def test_where_a_rank_does_not_know_its_squares_the_norm_is_not_judged():
    assert judged(lambda item: replace(item, squares=None)) == (Verdict.HOLDS, 2, None)


def test_a_tensor_that_not_all_ranks_recorded_is_not_judged():
    tensor = replace(SUMMED[0], copies=3)
    verdict, compared, _ = judged(lambda item: replace(item, tensors=(replace(tensor, owned=item.tensors[0].owned),)))
    assert (verdict, compared) == (Verdict.HOLDS, 2)


def test_rounding_of_bf16_sums_holds_and_that_of_fp32_does_not():
    def rounded(dtype):
        return lambda item: replace(
            item, array=f"rounded {item.array}", tensors=tuple(replace(own, dtype=dtype) for own in item.tensors)
        )

    assert judged(rounded("bfloat16"))[0] is Verdict.HOLDS
    assert judged(rounded("float32"))[0] is Verdict.VIOLATED
