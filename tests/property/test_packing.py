"""Packing is right by construction: identity, alignment, tiling shards, labels one step ahead, lossless schedules.

What this does not exercise: the model in between (tests/dist/test_tokens_megatron.py).
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.left_padding import left_pad, remove_left_padding, response_of
from tests.unit.megatron.test_token_ledger import audit as misplaced
from tests.unpacking import unpack, unpack_labels, unshard_cp
from verifier.data.recorded import RolloutRow, check_steps
from verifier.data.rollout import Rollout
from verifier.errors import ContractError, UsageError
from verifier.megatron.microbatch import split_by_count, split_by_tokens
from verifier.megatron.pack import IGNORE_LABEL, PADDING, loss_rows, pack, shard_cp
from verifier.megatron.token_layout import cp_rows, sp_slice
from verifier.strategies import Packing, packings, rollouts, shards

FIELDS = ("tokens", "sampled", "mask", "roles", "logprobs", "versions")


def assert_same_rollouts(actual: list[Rollout], expected: list[Rollout], *, routes: bool = True) -> None:
    assert [item.id for item in actual] == [item.id for item in expected]
    for got, want in zip(actual, expected, strict=True):
        assert (got.group, got.prompt_length, got.reward) == (want.group, want.prompt_length, want.reward)
        for name in FIELDS:
            assert getattr(got, name).dtype == getattr(want, name).dtype
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        if routes and want.routes is not None:
            np.testing.assert_array_equal(got.routes, want.routes)


@given(case=packings(without_sp=True, fp8=True, num_moe_layers=2))
def test_unpack_gives_back_what_was_packed(case: Packing) -> None:
    assert_same_rollouts(unpack(pack(case.rollouts, case.alignment)), case.rollouts)


@given(case=packings(without_sp=True, fp8=True))
def test_every_subsequence_and_every_shard_is_aligned(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    starts = packed.cu_seqlens_padded.long()
    padded = torch.diff(starts)
    lengths = torch.tensor([len(rollout) for rollout in case.rollouts])
    assert torch.equal(torch.diff(packed.cu_seqlens).long(), lengths)
    assert (padded >= lengths).all()
    assert (padded % case.alignment.sequence_multiple == 0).all()
    assert (padded[:-1] - lengths[:-1] < case.alignment.sequence_multiple).all()
    assert packed.num_rows % case.alignment.total_multiple == 0
    if case.alignment.sp:
        assert packed.num_rows % (case.alignment.tp * case.alignment.cp) == 0
    assert packed.max_seqlen == int(padded.max())


@given(case=packings(without_sp=True))
def test_context_and_sequence_shards_hold_every_row_once(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    held = []
    for cp_rank in range(case.alignment.cp):
        shard = shard_cp(packed, cp_rank)
        for tp_rank in range(case.alignment.tp if case.alignment.sp else 1):
            rows = sp_slice(shard.num_rows, case.alignment.tp if case.alignment.sp else 1, tp_rank)
            held.append(shard.rows_T[rows])
    assert torch.equal(torch.cat(held).sort().values, torch.arange(packed.num_rows))


@given(case=packings(without_sp=True))
def test_unshard_is_the_inverse_of_shard(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    parts = [shard_cp(packed, cp_rank) for cp_rank in range(case.alignment.cp)]
    for name in ("tokens_T", "labels_T", "loss_mask_T", "positions_T", "segments_T"):
        whole = unshard_cp([getattr(part, name) for part in parts], packed.cu_seqlens_padded)
        assert torch.equal(whole, getattr(packed, name))


@given(case=packings(without_sp=True))
def test_every_rank_holds_a_front_chunk_and_its_mirror_of_every_subsequence(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    cp, starts = case.alignment.cp, packed.cu_seqlens_padded.tolist()
    assume(cp > 1)
    for cp_rank in range(cp):
        expected: list[int] = []
        for begin, end in pairwise(starts):
            chunks = torch.arange(begin, end).chunk(2 * cp)
            expected += chunks[cp_rank].tolist() + chunks[2 * cp - 1 - cp_rank].tolist()
        assert cp_rows(np.array(starts), cp, cp_rank).tolist() == expected


@given(case=packings(without_sp=True))
def test_a_row_predicts_the_next_token_of_its_own_rollout(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    pairs = [
        (int(token), int(label))
        for token, label in zip(packed.tokens_T, packed.labels_T, strict=True)
        if label != IGNORE_LABEL
    ]
    expected = [
        pair for item in case.rollouts for pair in zip(item.tokens[:-1].tolist(), item.tokens[1:].tolist(), strict=True)
    ]
    assert pairs == expected
    assert not packed.loss_mask_T[packed.labels_T == IGNORE_LABEL].any()
    assert (packed.labels_T[packed.segments_T == PADDING] == IGNORE_LABEL).all()
    assert int(packed.loss_mask_T.sum()) == sum(int(item.mask.sum()) for item in case.rollouts)


@given(case=packings(without_sp=True))
def test_label_aligned_values_come_back_at_their_token(case: Packing) -> None:
    packed = pack(case.rollouts, case.alignment)
    for values, item in zip(unpack_labels(packed.labels_T.float(), packed), case.rollouts, strict=True):
        assert torch.isnan(values[0])
        assert values[1:].tolist() == item.tokens[1:].tolist()


@given(
    case=packings(without_sp=True, max_rollouts=12),
    dp=st.integers(1, 6),
    multiple=st.integers(1, 3),
    room=st.integers(1, 4),
)
def test_schedules_lose_nothing_and_give_every_rank_as_many_micro_batches(
    case: Packing, dp: int, multiple: int, room: int
) -> None:
    budget = int(case.alignment.padded(np.array([40])).item()) * room
    by_count = split_by_count(len(case.rollouts), dp=dp, micro_batch_size=room, multiple=multiple)
    by_tokens = split_by_tokens(case.rollouts, dp=dp, max_tokens=budget, alignment=case.alignment, multiple=multiple)
    for ranks in (by_count, by_tokens):
        assert len(ranks) == dp
        assert {len(batches) % multiple for batches in ranks} == {0}
        assert len({len(batches) for batches in ranks}) == 1
        dealt = sorted(index for batches in ranks for batch in batches for index in batch)
        assert dealt == list(range(len(case.rollouts)))
    assert all(len(batch) <= room for batches in by_count for batch in batches)
    for batch in (batch for batches in by_tokens for batch in batches):
        assert pack([case.rollouts[index] for index in batch], case.alignment).num_rows <= budget


@given(case=packings(without_sp=True, max_rollouts=12), dp=st.integers(1, 4))
def test_the_ledger_is_clean_through_split_pack_and_shard(case: Packing, dp: int) -> None:
    parts = []
    for batches in split_by_count(len(case.rollouts), dp=dp, micro_batch_size=2):
        for batch in batches:
            packed = pack([case.rollouts[index] for index in batch], case.alignment, batch)
            parts += [shard_cp(packed, cp_rank) for cp_rank in range(case.alignment.cp)]
    assert misplaced(case.rollouts, loss_rows(parts)) == []


@given(batch=rollouts())
def test_left_padding_comes_off_again(batch: list[Rollout]) -> None:
    padded = left_pad(batch, pad_token=9)
    assert padded.tokens_BL.shape[1] == max(len(item) for item in batch)
    assert padded.response_BR.shape[1] == max(item.response_length for item in batch)
    assert_same_rollouts(remove_left_padding(padded), batch, routes=False)
    for at, item in enumerate(batch):
        real = padded.attention_BL[at]
        assert padded.positions_BL[at, real].tolist() == list(range(len(item)))
        assert (padded.tokens_BL[at, ~real] == 9).all()


@given(batch=rollouts())
def test_predictions_of_a_left_padded_batch_land_on_their_response_token(batch: list[Rollout]) -> None:
    padded = left_pad(batch)
    predicted = np.concatenate([padded.tokens_BL[:, 1:], -np.ones((len(batch), 1))], axis=1).astype(float)
    landed = response_of(predicted, padded)
    for at, item in enumerate(batch):
        assert landed[at, padded.response_BR[at]].tolist() == item.tokens[item.prompt_length :].tolist()
        assert np.isnan(landed[at, ~padded.response_BR[at]]).all()


@st.composite
def step_lists(draw: st.DrawFn, *, max_trajectories: int = 3, max_steps: int = 4) -> list[RolloutRow]:
    """Steps of whole, contiguous trajectories with cumulative inputs; shrinks to one trajectory of one step."""
    steps = []
    for number in range(draw(st.integers(1, max_trajectories), label="trajectories")):
        name, tokens = f"t{number}", ()
        pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
        turns = draw(st.lists(pairs, min_size=1, max_size=max_steps), label=name)
        for index, (asked, answered) in enumerate(turns):
            first, drawn = 1000 * (number + 1) + len(tokens), (True,) * answered
            prompt, response = (
                (*tokens, *range(first, first + asked)),
                tuple(range(first + asked, first + asked + answered)),
            )
            steps.append(
                RolloutRow(
                    id=f"{name}/{index}", group=name, prompt=prompt, response=response, sampled=drawn, mask=drawn,
                    logprobs=tuple(-token / 256 for token in response), versions=(index,) * answered, reward=0.0,
                    trajectory=name, index=index, is_last_step=index == len(turns) - 1,
                )
            )  # fmt: skip
            tokens = (*prompt, *response)
    return steps


@given(steps=step_lists())
def test_whole_trajectories_pass(steps: list) -> None:
    check_steps(steps)


@given(steps=step_lists(max_trajectories=2), data=st.data())
def test_no_step_can_be_dropped_or_moved_unseen(steps: list, data: st.DataObject) -> None:
    assume(len(steps) > 1)
    at = data.draw(st.integers(0, len(steps) - 1))
    alone = steps[at].index == 0 and steps[at].is_last_step
    if not alone:
        with pytest.raises(UsageError, match=f"trajectory `{steps[at].trajectory}`"):
            check_steps(steps[:at] + steps[at + 1 :])
    other = data.draw(st.integers(0, len(steps) - 1))
    swapped = list(steps)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    lone = all(step.index == 0 and step.is_last_step for step in steps)
    if at != other and not lone and not (alone and steps[other].index == 0 and steps[other].is_last_step):
        with pytest.raises(UsageError, match="trajectory `t"):
            check_steps(swapped)


@given(case=packings(without_sp=True, max_cp=4))
def test_a_shard_is_not_sharded_again(case: Packing) -> None:
    assume(case.alignment.cp > 1)
    shard = shard_cp(pack(case.rollouts, case.alignment), 0)
    with pytest.raises(ContractError, match="cannot be sharded again"):
        shard_cp(shard, 0)


@given(drawn=shards())
def test_drawn_shards_tile_the_tensor(drawn: tuple) -> None:
    num_rows, boxes = drawn
    held = sorted(row for own in boxes for box in own for row in range(box.begin, box.end))
    assert held == list(range(num_rows))
