"""A pack, spelled out; fillers; and what is refused."""

import numpy as np
import pytest

from tests.unpacking import unpack
from verifier.data.rollout import make_rollout
from verifier.errors import ContractError
from verifier.megatron.pack import IGNORE_LABEL as X
from verifier.megatron.pack import pack, shard_cp
from verifier.megatron.token_layout import Alignment

A = make_rollout("a", [11, 12], [13, 14, 15], sampled=[True, False, True], logprobs=[-1, -2, -3], versions=[4, 4, 5])
B = make_rollout("b", [21], [22], logprobs=[-9], versions=7, reward=1.0)
NAN = float("nan")


def test_two_rollouts_over_two_context_parallel_ranks() -> None:
    packed = pack([A, B], Alignment(cp=2), [3, 1])
    assert packed.ids == ("a", "b")
    assert packed.cu_seqlens.tolist() == [0, 5, 7]
    assert packed.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert packed.max_seqlen == 8
    assert packed.tokens_T.tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 0, 0]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 0, 0]
    assert packed.segments_T.tolist() == [0, 0, 0, 0, 0, -1, -1, -1, 1, 1, -1, -1]
    assert packed.roles_T.tolist() == [0, 0, 1, 2, 1, 0, 0, 0, 0, 1, 0, 0]
    assert packed.labels_T.tolist() == [12, 13, 14, 15, X, X, X, X, 22, X, X, X]
    assert packed.loss_mask_T.tolist() == [False, True, False, True] + 4 * [False] + [True] + 3 * [False]
    assert packed.versions_T.tolist() == [-1, 4, -1, 5, -1, -1, -1, -1, 7, -1, -1, -1]
    a, b = 4 << 32, 2 << 32
    assert packed.ledger_T.tolist() == [a + 1, a + 2, a + 3, a + 4, 0, 0, 0, 0, b + 1, 0, 0, 0]
    assert packed.engine_logprobs_T.nan_to_num(0).tolist() == [0, -1, 0, -3, 0, 0, 0, 0, -9, 0, 0, 0]

    second = shard_cp(packed, 1)
    assert second.rows_T.tolist() == [2, 3, 4, 5, 9, 10]
    assert second.labels_T.tolist() == [14, 15, X, X, X, X]
    assert second.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert second.ledger_T.tolist() == [a + 3, a + 4, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rollouts", "alignment", "between"),
    [
        ([B, A], Alignment(tp=2), False),
        ([A, B], Alignment(tp=2), True),
        ([make_rollout("c", [1, 2], [3, 4]), B], Alignment(cp=2), True),  # padding after the last sequence alone
        ([make_rollout("c", [1, 2], [3, 4])], Alignment(cp=2), False),
    ],
)
def test_padding_between_what_attention_sees_by_itself(rollouts, alignment, between) -> None:
    packed = pack(rollouts, alignment)
    assert packed.has_padding_between == between
    assert shard_cp(packed, 0).has_padding_between == between


def test_a_filler_predicts_nothing_and_unpacks_to_nothing() -> None:
    packed = pack([], Alignment(tp=2, cp=2), [])
    assert packed.num_rows == 8
    assert packed.tokens_T.tolist() == [0] * 8
    assert not packed.loss_mask_T.any()
    assert (packed.labels_T == X).all()
    assert (packed.segments_T == -1).all()
    assert packed.engine_logprobs_T.isnan().all()
    assert not packed.ledger_T.any()
    assert unpack(packed) == []
    assert shard_cp(packed, 1).num_rows == 4


def test_routes_must_fit() -> None:
    routed = make_rollout("r", [1], [2], routes=np.zeros((2, 3, 2), np.int16))
    with pytest.raises(
        ContractError, match=r"rollout `b` has routes of .* = None, others of the same pack have \[3, 2\]"
    ):
        pack([routed, B], Alignment())
