"""The strategies find every planted packing bug within the CI profile's budget, and shrink it to its smallest case.

Bugs of packing, padding and replay that shipped somewhere, each re-written small. A bug is a function of a packing
problem that answers whether it shows: whether the invariant beside it is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import find, settings

from tests.left_padding import left_pad
from tests.unit.megatron.test_token_ledger import audit as misplaced
from tests.unpacking import unpack_labels, unpack_rows
from verifier.data.rollout import MISSING_ROUTE
from verifier.errors import ContractError
from verifier.megatron.pack import IGNORE_LABEL, PackedBatch, loss_rows, pack, shard_cp
from verifier.megatron.router_replay import replay_routes
from verifier.megatron.token_layout import cp_rows
from verifier.strategies import Packing, packings

pytestmark = pytest.mark.slow

Shows = Callable[[Packing], bool]


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug, where it shipped, and the smallest case on which it shows."""

    id: str
    upstream: str
    shows: Shows
    tp: int
    cp: int
    lengths: list[tuple[int, int]]


def whole(case: Packing) -> PackedBatch:
    return pack(case.rollouts, case.alignment, range(len(case.rollouts)))


def shards(case: Packing) -> list[PackedBatch]:
    return [shard_cp(whole(case), rank) for rank in range(case.alignment.cp)]


def arrives_wrong(case: Packing, batches: list[PackedBatch]) -> bool:
    """The token ledger's verdict."""
    return misplaced(case.rollouts, loss_rows(batches)) != []


def tokens_of(case: Packing) -> list[list[int]]:
    return [item.tokens.tolist() for item in case.rollouts]


def label_rolled_inside_shard(case: Packing) -> bool:
    def wrong(shard: PackedBatch) -> PackedBatch:
        rolled = shard.tokens_T.roll(-1)
        return replace(shard, labels_T=torch.where(shard.labels_T == IGNORE_LABEL, IGNORE_LABEL, rolled))

    return arrives_wrong(case, [wrong(shard) for shard in shards(case)])


def label_rolled_over_whole_pack(case: Packing) -> bool:
    packed = whole(case)
    rolled = packed.tokens_T.roll(-1)
    rolled[-1] = IGNORE_LABEL
    return arrives_wrong(case, [replace(packed, labels_T=rolled)])


def label_rolled_on_unpadded_boundaries(case: Packing) -> bool:
    packed = whole(case)
    labels = packed.tokens_T.roll(-1)
    labels[packed.cu_seqlens[1:].long() - 1] = IGNORE_LABEL
    labels[packed.segments_T < 0] = IGNORE_LABEL
    return arrives_wrong(case, [replace(packed, labels_T=labels)])


def zigzag_undone_as_contiguous(case: Packing) -> bool:
    gathered = torch.cat([shard.tokens_T for shard in shards(case)])
    return [values.tolist() for values in unpack_rows(gathered, whole(case))] != tokens_of(case)


def padded_boundaries_taken_for_real(case: Packing) -> bool:
    packed = whole(case)
    wrong = replace(packed, cu_seqlens=packed.cu_seqlens_padded)
    return torch.diff(wrong.cu_seqlens).tolist() != [len(item) for item in case.rollouts]


def collator_advances_without_padding(case: Packing) -> bool:
    packed = whole(case)
    wrong = replace(packed, cu_seqlens_padded=torch.cat([packed.cu_seqlens[:-1], packed.cu_seqlens_padded[-1:]]))
    return [values.tolist() for values in unpack_rows(packed.tokens_T, wrong)] != tokens_of(case)


def boundaries_floored_by_cp(case: Packing) -> bool:
    packed = whole(case)
    cp = case.alignment.cp
    local = [len(cp_rows(np.array([0, size]), cp, 0)) for size in torch.diff(packed.cu_seqlens_padded).tolist()]
    return torch.diff(packed.cu_seqlens // cp).tolist() != local


def boundaries_from_local_positions(case: Packing) -> bool:
    return any(
        int((shard.positions_T[shard.segments_T >= 0] == 0).sum()) != len(case.rollouts) for shard in shards(case)
    )


def alignment_without_the_factor_two(case: Packing) -> bool:
    multiple = case.alignment.layout_multiple // (2 if case.alignment.cp > 1 else 1)
    padded = [-(-len(item) // multiple) * multiple for item in case.rollouts]
    try:
        rows = [cp_rows(np.cumsum([0, *padded]), case.alignment.cp, rank) for rank in range(case.alignment.cp)]
    except ContractError:
        return True
    return sorted(np.concatenate(rows).tolist()) != list(range(sum(padded)))


def positions_over_the_pack(case: Packing) -> bool:
    packed = whole(case)
    return arrives_wrong(case, [replace(packed, positions_T=packed.rows_T)])


def state_leaks_into_next_sequence(case: Packing) -> bool:
    """A toy state-space layer whose state is never reset; the neighbour is perturbed."""

    def last_states(tokens: torch.Tensor, packed: PackedBatch) -> list[float]:
        state, states = 0.0, []
        for token in tokens.tolist():
            state = state / 2 + token
            states.append(state)
        return [float(values[-1]) for values in unpack_rows(torch.tensor(states), packed)]

    packed = whole(case)
    disturbed = torch.where(packed.segments_T == 0, packed.tokens_T + 1000, packed.tokens_T)
    return last_states(packed.tokens_T, packed)[1:] != last_states(disturbed, packed)[1:]


def mask_not_shifted(case: Packing) -> bool:
    masks = torch.zeros(whole(case).num_rows, dtype=torch.bool)
    for values, item in zip(unpack_rows(masks, whole(case)), case.rollouts, strict=True):
        values[:] = torch.from_numpy(item.mask)
    return arrives_wrong(case, [replace(whole(case), loss_mask_T=masks)])


def mask_shifted_twice(case: Packing) -> bool:
    packed = whole(case)
    return arrives_wrong(case, [replace(packed, loss_mask_T=packed.loss_mask_T.roll(-1))])


def logprob_left_at_its_row(case: Packing) -> bool:
    packed = whole(case)
    landed = unpack_rows(packed.labels_T, packed)
    return any(
        values[1:].tolist() != item.tokens[1:].tolist() for values, item in zip(landed, case.rollouts, strict=True)
    )


def logprob_shifted_over_whole_pack(case: Packing) -> bool:
    packed = whole(case)
    landed = unpack_rows(packed.labels_T.roll(1), packed)
    right = unpack_labels(packed.labels_T.float(), packed)
    return any(
        not torch.equal(values[:1].float().isnan(), want[:1].isnan()) or values[1:].tolist() != want[1:].tolist()
        for values, want in zip(landed, right, strict=True)
    )


def field_of_another_rollout(case: Packing) -> bool:
    """A filter replaced rollouts but left one of their fields behind."""
    packed = whole(case)
    values = list(reversed([item.logprobs for item in case.rollouts]))
    if [len(item) for item in values] != [len(item) for item in case.rollouts]:
        return False
    wrong = [replace(item, logprobs=logprobs) for item, logprobs in zip(case.rollouts, values, strict=True)]
    stale = pack(wrong, case.alignment).engine_logprobs_T
    return arrives_wrong(case, [replace(packed, engine_logprobs_T=stale)])


def response_sliced_from_the_front(case: Packing) -> bool:
    padded = left_pad(case.rollouts)
    responses = padded.tokens_BL[:, padded.tokens_BL.shape[1] - padded.response_BR.shape[1] :]
    return any(
        responses[at, : item.response_length].tolist() != item.tokens[item.prompt_length :].tolist()
        for at, item in enumerate(case.rollouts)
    )


def mask_of_unpadded_tokens_on_left_padded_ids(case: Packing) -> bool:
    padded = left_pad(case.rollouts)
    kept = []
    for at, item in enumerate(case.rollouts):
        mask = np.zeros(padded.tokens_BL.shape[1], bool)
        mask[: len(item)] = item.mask
        kept.append(padded.tokens_BL[at, mask & padded.attention_BL[at]].tolist())
    return kept != [item.tokens[item.mask].tolist() for item in case.rollouts]


def positions_count_left_padding(case: Packing) -> bool:
    padded = left_pad(case.rollouts)
    positions = np.broadcast_to(np.arange(padded.tokens_BL.shape[1]), padded.tokens_BL.shape)
    return any(
        positions[at, padded.attention_BL[at]].tolist() != list(range(len(item)))
        for at, item in enumerate(case.rollouts)
    )


def padded_to_longest_prompt_plus_longest_response(case: Packing) -> bool:
    longest = max(item.prompt_length for item in case.rollouts) + max(item.response_length for item in case.rollouts)
    return longest != left_pad(case.rollouts).tokens_BL.shape[1]


def remainder_dropped(case: Packing) -> bool:
    """Micro-batches of two; what does not fill one is left out."""
    full = len(case.rollouts) // 2 * 2
    return arrives_wrong(case, [pack(case.rollouts[:full], case.alignment, range(full))])


def _routes_differ(case: Packing, routes_TMK: torch.Tensor) -> bool:
    packed = whole(case)
    real = packed.segments_T >= 0
    expected = torch.from_numpy(np.concatenate([item.routes for item in case.rollouts]).astype(np.int32))
    return not torch.equal(routes_TMK[real], expected)


def routes_without_the_padding_between(case: Packing) -> bool:
    packed = whole(case)
    routes = torch.full_like(packed.routes_TMK, MISSING_ROUTE)
    flat = torch.from_numpy(np.concatenate([item.routes for item in case.rollouts]).astype(np.int32))
    routes[: len(flat)] = flat
    return _routes_differ(case, routes)


def routes_sliced_contiguously(case: Packing) -> bool:
    packed = whole(case)
    contiguous = packed.routes_TMK.chunk(case.alignment.cp)
    return any(not torch.equal(part, shard.routes_TMK) for part, shard in zip(contiguous, shards(case), strict=True))


def missing_routes_filled_with_zeros(case: Packing) -> bool:
    filled = [replace(item, routes=np.where(item.routes == MISSING_ROUTE, 0, item.routes)) for item in case.rollouts]
    packed = pack(filled, case.alignment)
    try:
        replay_routes(shard_cp(packed, 0), tp=0, layers=range(1), moe_layers=[0], num_experts=8, topk=2)
    except ContractError:
        return True
    return False


def counts_include_padding(case: Packing) -> bool:
    """Expert counts over all rows instead of live ones."""
    replay = replay_routes(whole(case), tp=0, layers=range(1), moe_layers=[0], num_experts=8, topk=2)
    live = sum(len(item) - 1 for item in case.rollouts)
    return replay.experts[0].numel() != live * 2


PACKING = (
    Planted("label-rolled-inside-shard", "verl#4250, ChatLearn#343", label_rolled_inside_shard, 1, 2, [(1, 1)]),
    Planted("label-rolled-over-whole-pack", "synthetic", label_rolled_over_whole_pack, 1, 2, [(1, 0)]),
    Planted(
        "label-rolled-on-unpadded-boundaries",
        "Megatron-LM#4495",
        label_rolled_on_unpadded_boundaries,
        1,
        2,
        [(1, 0), (1, 0)],
    ),
    Planted("zigzag-undone-as-contiguous", "ms-swift#10071", zigzag_undone_as_contiguous, 1, 2, [(1, 1)]),
    Planted(
        "padded-boundaries-taken-for-real",
        "Megatron-LM#5541, NeMo-RL#4070",
        padded_boundaries_taken_for_real,
        1,
        2,
        [(1, 0)],
    ),
    Planted(
        "collator-advances-without-padding",
        "SkyRL, comment in PackedDataCollator",
        collator_advances_without_padding,
        1,
        2,
        [(1, 0), (1, 0)],
    ),
    Planted("boundaries-floored-by-cp", "ISEEKYAN/Megatron-LM#111", boundaries_floored_by_cp, 1, 2, [(1, 0)]),
    Planted("boundaries-from-local-positions", "prime-rl#2392", boundaries_from_local_positions, 1, 2, [(1, 0)]),
    Planted("alignment-without-the-factor-two", "synthetic", alignment_without_the_factor_two, 1, 2, [(1, 0)]),
    Planted("positions-over-the-pack", "Megatron-Bridge#1868", positions_over_the_pack, 1, 1, [(1, 0), (1, 1)]),
    Planted(
        "state-leaks-into-next-sequence",
        "SkyRL#2056, NeMo-RL#2529",
        state_leaks_into_next_sequence,
        1,
        1,
        [(1, 0), (1, 0)],
    ),
    Planted("mask-not-shifted", "verl#3287", mask_not_shifted, 1, 1, [(1, 1)]),
    Planted("mask-shifted-twice", "ms-swift#8427", mask_shifted_twice, 1, 1, [(1, 1)]),
    Planted("logprob-left-at-its-row", "prime-rl#1525", logprob_left_at_its_row, 1, 1, [(1, 1)]),
    Planted("logprob-shifted-over-whole-pack", "synthetic", logprob_shifted_over_whole_pack, 1, 1, [(1, 0)]),
    Planted("field-of-another-rollout", "SkyRL#1908", field_of_another_rollout, 1, 1, [(1, 1), (1, 1)]),
    Planted("response-sliced-from-the-front", "SkyRL#1367", response_sliced_from_the_front, 1, 1, [(1, 1), (1, 2)]),
    Planted(
        "mask-of-unpadded-tokens", "Automodel#2314", mask_of_unpadded_tokens_on_left_padded_ids, 1, 1, [(1, 1), (1, 2)]
    ),
    Planted(
        "positions-count-left-padding", "OpenRLHF#217, trl#6800", positions_count_left_padding, 1, 1, [(1, 0), (1, 1)]
    ),
    Planted(
        "padded-to-prompt-plus-response",
        "synthetic",
        padded_to_longest_prompt_plus_longest_response,
        1,
        1,
        [(1, 1), (2, 0)],
    ),
    Planted("remainder-dropped", "synthetic", remainder_dropped, 1, 1, [(1, 1)]),
    Planted(
        "routes-without-the-padding-between", "verl#7106", routes_without_the_padding_between, 1, 2, [(1, 0), (1, 1)]
    ),
    Planted("routes-sliced-contiguously", "slime#2175", routes_sliced_contiguously, 1, 2, [(1, 2)]),
    Planted(
        "missing-routes-filled-with-zeros", "SkyRL#1908, slime#1052", missing_routes_filled_with_zeros, 1, 1, [(1, 0)]
    ),
    Planted("counts-include-padding", "SkyRL#1908", counts_include_padding, 1, 1, [(1, 0)]),
)


@pytest.mark.parametrize("bug", PACKING, ids=lambda bug: bug.id)
def test_found_and_shrunk_to_the_smallest_case(bug: Planted) -> None:
    case = find(packings(num_moe_layers=1), bug.shows, settings=settings.get_profile("ci"))
    assert (case.alignment.tp, case.alignment.cp, case.lengths) == (bug.tp, bug.cp, bug.lengths)


def test_at_least_fifteen_of_them_shipped() -> None:
    assert sum(bug.upstream != "synthetic" for bug in PACKING) >= 15
