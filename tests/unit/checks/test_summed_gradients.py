"""TRN006 and TRN005 on hand-written sums: what is not added up, counted twice, or not gathered, is seen anywhere."""

from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from tests.snapshots.training_traces import SUMMED, training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.stages.train.records import AdamSample, GradientSums, TrainerStep


def judged(change=lambda item: item):
    records = [change(item) if isinstance(item, GradientSums) else item for item in training()]
    kept = [item for item in records if isinstance(item, GradientSums | TrainerStep)]
    outcome = run_check(REGISTRY["TRN006"], make_trace(kept))
    return outcome.verdict, outcome.num_compared, outcome.finding and outcome.finding.first.sentence


def test_sums_of_both_ranks_hold():
    assert judged() == (Verdict.HOLDS, 7, None)


def test_a_gradient_of_one_rank_is_seen():
    verdict, _, sentence = judged(lambda item: replace(item, array="sums of one rank") if item.rank == 0 else item)
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "the gradient of element 4 of `decoder.weight` that update 1 gives the optimizer is 0.333333, it should "
        "be 1 (what "
        "micro-batches of 2 ranks gave, divided by 3)"
    )


def test_an_element_beside_those_that_are_compared_is_seen_in_the_sum_of_all():
    verdict, _, sentence = judged(lambda item: replace(item, array="sums without the last") if item.rank else item)
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "update 1 gives optimizers other elements of the gradient of `decoder.weight` than its passes gave: they add "
        "up to 2.75, not to 3"
    )


def test_an_element_that_no_optimizer_is_given_is_seen():
    def without(item):
        return replace(item, tensors=(replace(item.tensors[0], owned_size=3 if item.rank else 6),))

    verdict, _, sentence = judged(without)
    assert verdict is Verdict.VIOLATED
    assert sentence.startswith("update 1 gives optimizers not all elements of the gradient of `decoder.weight`")


def test_sums_in_the_weights_type_are_seen_where_the_config_asks_for_float32():
    def added(asked):
        records = [item for item in training() if isinstance(item, GradientSums | TrainerStep)]
        rounded = [
            replace(item, tensors=(replace(item.tensors[0], dtype="bfloat16"),))
            if isinstance(item, GradientSums)
            else item
            for item in records
        ]
        trace = make_trace(rounded)
        trace.manifest = replace(trace.manifest, config={"megatron": {"grad_reduce_in_fp32": asked}})
        return run_check(REGISTRY["TRN006"], trace)

    assert added(asked=False).verdict is Verdict.HOLDS
    assert added(asked=True).finding.first.sentence == (
        "tensors whose gradients update 1 adds up in less than float32: 1 of 1 (`decoder.weight`), there should be none"
    )


def test_a_norm_that_leaves_squares_out_is_seen():
    verdict, _, sentence = judged(lambda item: replace(item, squares=3.0))
    assert (verdict, sentence) == (
        Verdict.VIOLATED,
        "the gradient norm of update 1 on rank 0 is 2 (the optimizer clips by it), it should be 2.44949 (all ranks' "
        "gradients, each counted once, float64)",
    )  # fmt: skip


def test_a_loops_norm_has_the_rounding_of_what_computed_it():
    """Torch adds squares in few sums on CPUs; weights in bf16 have gradients, and a norm, in bf16."""

    def is_right(norm, **manifest):
        records = [item for item in training() if isinstance(item, GradientSums | TrainerStep)]
        changed = [
            replace(item, squares=32.0) if isinstance(item, GradientSums) else replace(item, grad_norm=norm)
            for item in records
        ]
        trace = make_trace(changed)
        trace.manifest = replace(trace.manifest, **manifest)
        return run_check(REGISTRY["TRN006"], trace).verdict is Verdict.HOLDS

    for tier, command, right in (("cpu", "probe", True), ("cuda", "probe", False), ("cpu", "roundtrip", False)):
        assert is_right(8.0001, tier=tier, command=command) is right
        assert is_right(8.0625, tier=tier, command=command) is (command == "probe")
        assert not is_right(8.03, tier=tier, command=command)
        assert is_right(7.7, tier=tier, command=command) is right  # of 2^28 elements
        assert not is_right(7.5, tier=tier, command=command)


def test_a_divided_tensor_that_is_marked_whole_is_seen_however_small_its_gradient_is():
    verdict, _, sentence = judged(lambda item: replace(item, miscounted=("sinks",)) if item.rank else item)
    assert verdict is Verdict.VIOLATED
    assert sentence == (
        "tensors that the norm of update 1 counts never or twice, as rank 1 is marked otherwise: 1 (`sinks`), "
        "there should "
        "be none"
    )


def test_where_a_rank_does_not_know_its_squares_the_norm_is_not_judged():
    assert judged(lambda item: replace(item, squares=None)) == (Verdict.HOLDS, 3, None)


def test_a_tensor_that_not_all_ranks_recorded_is_not_judged():
    tensor = replace(SUMMED[0], copies=3)
    verdict, compared, _ = judged(lambda item: replace(item, tensors=(replace(tensor, owned=item.tensors[0].owned),)))
    assert (verdict, compared) == (Verdict.HOLDS, 4)


def test_rounding_of_bf16_sums_holds_and_that_of_fp32_does_not():
    def rounded(dtype):
        return lambda item: replace(
            item, array=f"rounded {item.array}", tensors=tuple(replace(own, dtype=dtype) for own in item.tensors)
        )

    assert judged(rounded("bfloat16"))[0] is Verdict.HOLDS
    assert judged(rounded("float32"))[0] is Verdict.VIOLATED


def used(change):
    """Verdict of TRN005 on the weights of both ranks' passes, with others on the second one."""
    audits = [item for item in training() if isinstance(item, AdamSample)]
    records = [item for item in training() if isinstance(item, GradientSums)]
    trace = make_trace([*audits, *(replace(item, array=change) if item.rank else item for item in records)])
    outcome = run_check(REGISTRY["TRN005"], trace)
    return outcome.verdict, [item.sentence for item in outcome.finding.bad] if outcome.finding else []


def test_passes_use_what_the_rank_that_steps_it_left():
    assert used("sums 1") == (Verdict.HOLDS, [])
    verdict, said = used("sums of stale weights")
    assert verdict is Verdict.VIOLATED
    assert said == [
        "`decoder.weight` in the passes of update 1 at element 4 is 1, it should be 2 (the rank whose optimizer "
        "holds it)"
    ]
