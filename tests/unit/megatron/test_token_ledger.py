"""The ledger names what is misplaced, where, and what it should have been."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from verifier.data.rollout import Rollout, make_rollout
from verifier.megatron.pack import PackedBatch, loss_rows, pack
from verifier.megatron.token_layout import Alignment
from verifier.stages.pack import checks_packing as packing
from verifier.stages.pack.checks_packing import Misplacement
from verifier.stages.pack.probe_tokens import record_of_rollouts

ROLLOUTS = [
    make_rollout("a", [11, 12], [13, 14], logprobs=[-1, -2], versions=[4, 5]),
    make_rollout("b", [21], [22], logprobs=[-9], versions=7),
]


LOGPROB_OF_A3 = Misplacement(rollout="a", rank=0, position=3, field="engine_logprob", expected=-2, actual=0)


def audit(rollouts: Sequence[Rollout], rows: dict[str, np.ndarray]) -> list[Misplacement]:
    return packing.audit(*record_of_rollouts("trained", 0, rollouts), packing.joined([rows], [0]))


def packed() -> PackedBatch:
    return pack(ROLLOUTS, Alignment(cp=2), range(len(ROLLOUTS)))


def test_in_place() -> None:
    assert audit(ROLLOUTS, loss_rows([packed()])) == []
    assert audit(ROLLOUTS, loss_rows([packed(), pack([], Alignment(), [])])) == []


@pytest.mark.parametrize(
    ("name", "row", "value", "expected"),
    [
        ("tokens_T", 1, 99, Misplacement(rollout="a", rank=0, position=2, field="input", expected=12, actual=99)),
        ("positions_T", 2, 0, Misplacement(rollout="a", rank=0, position=3, field="position", expected=2, actual=0)),
        ("roles_T", 1, 2, Misplacement(rollout="a", rank=0, position=2, field="role", expected=0, actual=2)),
        ("labels_T", 4, 11, Misplacement(rollout="b", rank=0, position=1, field="label", expected=22, actual=11)),
        ("loss_mask_T", 0, True, Misplacement(rollout="a", rank=0, position=1, field="mask", expected=0, actual=1)),
        ("sampled_T", 4, False, Misplacement(rollout="b", rank=0, position=1, field="sampled", expected=1, actual=0)),
        ("versions_T", 2, 4, Misplacement(rollout="a", rank=0, position=3, field="version", expected=5, actual=4)),
        ("engine_logprobs_T", 2, 0, LOGPROB_OF_A3),
        ("loss_mask_T", 3, True, Misplacement(rollout="", rank=0, position=-1, field="mask", expected=0, actual=1)),
    ],
)  # fmt: skip
def test_one_wrong_value_is_named(name: str, row: int, value: float, expected: Misplacement) -> None:
    values = getattr(packed(), name).clone()
    values[row] = value
    assert audit(ROLLOUTS, loss_rows([replace(packed(), **{name: values})])) == [expected]


def test_lost_and_repeated_tokens_are_counted() -> None:
    marks = packed().ledger_T.clone()
    marks[2] = marks[1]
    found = audit(ROLLOUTS, loss_rows([replace(packed(), ledger_T=marks)]))
    assert Misplacement(rollout="a", rank=0, position=2, field="row", expected=1, actual=2) in found
    assert Misplacement(rollout="a", position=3, field="row", expected=1, actual=0) in found
    assert Misplacement(rollout="a", rank=0, position=2, field="label", expected=13, actual=14) in found


def test_swapped_fields_of_two_rollouts_of_one_shape() -> None:
    batch = [make_rollout(name, [1], [2, 3], logprobs=[-at, -at - 0.5]) for at, name in enumerate("xy")]
    swapped = [replace(batch[0], logprobs=batch[1].logprobs), replace(batch[1], logprobs=batch[0].logprobs)]
    rows = loss_rows([pack(swapped, Alignment(), range(len(swapped)))])
    assert {(item.rollout, item.field) for item in audit(batch, rows)} == {
        ("x", "engine_logprob"),
        ("y", "engine_logprob"),
    }


def test_not_a_number_equals_itself_only() -> None:
    values = torch.full_like(packed().engine_logprobs_T, np.nan)
    found = audit(ROLLOUTS, loss_rows([replace(packed(), engine_logprobs_T=values)]))
    assert [(item.rollout, item.position) for item in found] == [("a", 2), ("a", 3), ("b", 1)]


def test_a_field_of_another_rollout_is_named() -> None:
    batch = [replace(rollout, reward=float(at), group=f"g{at}") for at, rollout in enumerate(ROLLOUTS)]
    right = pack(batch, Alignment(cp=2), range(len(batch)))
    assert audit(batch, loss_rows([right])) == []
    for field, wrong in (
        ("reward", {"rewards": (0.0, 0.0)}),
        ("group", {"groups": ("g0", "g0")}),
        ("id", {"ids": ("a", "a")}),
        ("prompt", {"prompt_lengths": (2, 2)}),
    ):
        found = audit(batch, loss_rows([replace(right, **wrong)]))
        assert [(item.rollout, item.position, item.field) for item in found] == [("b", 1, field)]


def test_tokens_of_no_rollout_are_named_too() -> None:
    rows = loss_rows([packed()])
    shorter = [make_rollout("a", [11, 12], [13], logprobs=[-1], versions=4)]
    stray = [item.actual for item in audit(shorter, rows) if (item.rollout, item.field) == ("", "row")]
    assert stray == [float((1 << 32) + 3), float((2 << 32) + 1)]
