"""TRN005 and TRN002 on hand-written updates: each part of a sample, and each group of parameters, is judged alone.

Updates are those of torch, in float32.
"""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ONE_RANK, make_trace
from tests.snapshots.training_traces import ADAM, ARRAYS, AUDITED, CLIPPED, GROUPS, MOVED, training
from verifier.core.check import REGISTRY, Trace, run_check
from verifier.core.finding import Verdict
from verifier.stages.train.checks_adam_audit import rounded
from verifier.stages.train.records import AdamSample, TrainerStep


def audited(arrays=ARRAYS["update"], **values):
    fields = {"name": "update 2", "version": 2, "coordinate": "tp=0", "tensors": AUDITED, "remembered": 1, **ADAM}
    sample = AdamSample(**{**fields, "array": "sample", **values})
    outcome = run_check(REGISTRY["TRN005"], Trace(ONE_RANK, [sample], {"sample": arrays}.__getitem__))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


MASTER_ROUNDING = 3 * 2.0**-24
"""Three roundings to float32 of the first element, which is between 1 and 2."""
MOMENT_ROUNDING = 2.0**-24 * (16 * 0.1 + 1) * CLIPPED[0]


def changed(**changes):
    """Arrays of a right update, float64, with others in the first element of some; a weight follows its master."""
    arrays = {name: values.astype(np.float64) for name, values in ARRAYS["update"].items()}
    for name, value in changes.items():
        arrays[name][0] = value
    return arrays | ({"weight": rounded(arrays["master"], "float32")} if "master" in changes else {})


def grouped(*groups):
    records = [replace(item, groups=groups) if isinstance(item, TrainerStep) else item for item in training()]
    outcome = run_check(REGISTRY["TRN002"], make_trace(records))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


def test_an_update_by_the_formula_holds():
    assert audited() == (Verdict.HOLDS, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_updates_of_torch_hold_and_without_their_clip_do_not(kind, dtype):
    torch.manual_seed(3)
    weight = torch.randn(5000).requires_grad_()
    optimizer = kind([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 6):
        state = {name: values.clone() for name, values in optimizer.state[weight].items()} or {
            name: torch.zeros(5000) for name in ("exp_avg", "exp_avg_sq")
        }
        arrays = {f"{name}_before": state[name] for name in ("exp_avg", "exp_avg_sq")}
        arrays |= {"master_before": weight.detach().clone(), "gradient": torch.randn(5000)}
        weight.grad = arrays["gradient"].clone()
        norm = float(torch.nn.utils.clip_grad_norm_([weight], 1.0))
        optimizer.step()
        arrays |= {"master": weight.detach(), "weight": weight.detach().to(getattr(torch, dtype)).float()}
        arrays |= {name: optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")}
        found = {name: values.numpy() for name, values in arrays.items()}
        tensor = replace(AUDITED[0], elements=5000, dtype=dtype, learning_rate=1e-2, step=step)
        fields = {"tensors": (tensor,), "decoupled": kind is torch.optim.AdamW}
        assert audited(found, grad_norm=norm, **fields) == (Verdict.HOLDS, None)
        assert audited(found, grad_norm=norm, **fields, clip_grad=0.0)[0] is Verdict.VIOLATED
        if step > 1:
            wrong = replace(tensor, step=step - 1)
            assert audited(found, grad_norm=norm, **{**fields, "tensors": (wrong,)})[0] is Verdict.VIOLATED


def test_float32_is_rounded_to_bfloat16_as_torch_rounds_it():
    bits = np.random.default_rng(1).integers(0, 0x7F800000, 100_000, dtype=np.uint32)
    bits[::4] &= 0xFFFF8000  # halves, which go to even
    values = bits.view(np.float32)
    assert np.array_equal(rounded(values, "bfloat16"), torch.from_numpy(values).bfloat16().double().numpy())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"master": np.nan}, "update 2 leaves masters of `decoder.weight` that are not finite, unlike what Adam makes"),
        (
            {"master": MOVED[0] + 1.1e-3 * 5e-4 + MASTER_ROUNDING},
            "update 2 leaves masters of `decoder.weight` that are 0.0011 learning rates off what Adam",
        ),
        (
            {"exp_avg": 0.1 * CLIPPED[0] + 1.5 * MOMENT_ROUNDING},
            "the gap of moments of `decoder.weight` after update 2 to Adam's, in roundings of float32, is 1.5",
        ),
        (
            {"exp_avg_sq": np.nan},
            "the gap of moments of `decoder.weight` after update 2 to Adam's, in roundings of float32, is nan",
        ),
        ({"weight": 0.5}, "after update 2 weights of `decoder.weight` are not its masters"),
    ],
)
def test_each_array_of_a_tensor_is_judged(values, said):
    verdict, sentence = audited(changed(**values))
    assert verdict is Verdict.VIOLATED
    assert sentence.startswith(said)


def test_roundings_hold():
    assert audited(changed(master=MOVED[0] + 0.9e-3 * 5e-4 + MASTER_ROUNDING)) == (Verdict.HOLDS, None)
    assert audited(changed(exp_avg=0.1 * CLIPPED[0] + 0.9 * MOMENT_ROUNDING)) == (Verdict.HOLDS, None)


def test_a_gradient_before_the_first_pass_is_seen():
    verdict, sentence = audited(tensors=(replace(AUDITED[0], left=0.5),))
    assert verdict is Verdict.VIOLATED
    said = "the greatest element of the gradient of `decoder.weight` that update 2 begins with is 0.5"
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
