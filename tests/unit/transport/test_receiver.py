"""A few chunks ahead of what is loaded, over real gloo groups; what is refused, and that the next update is whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.unit.transport.transfer_case import Ranks, Sender, plan_of, weights
from verifier.engine import sender as update
from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan, build_plan
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import AHEAD, Agreement, TransferFailed


@pytest.fixture(params=[1, 3], ids=["one-rank", "three-ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(request.param)
    yield found
    found.close()


def test_every_update_is_whole(ranks: Ranks) -> None:
    sender = Sender(ranks)
    for version in range(3):
        assert len(sender.send(version)) > 5
    sender.group.close()


def test_an_equal_plan_keeps_what_was_made_of_the_last_one_and_another_does_not() -> None:
    """With its own record, as an engine is told it, each time."""
    receiver, plan = ChunkReceiver(0), plan_of(weights(1))
    receiver._group = mock.Mock(begin=lambda plan: Agreement(messages=(plan.digest,) * 2))
    other = build_plan(list(plan.tensors)[1:], chunk_bytes=1 << 10)
    agreed = []
    for told in (plan, plan, other, plan):
        assert receiver.agree(ChunkPlan.from_json(told.to_json())).reached
        assert receiver.plan == told
        agreed.append(receiver.plan)
    assert agreed[0] is agreed[1]
    assert agreed[3] is not agreed[0]
    receiver._group.begin = lambda plan: Agreement(messages=(other.digest, plan.digest))
    assert not receiver.agree(plan).reached
    assert receiver.plan is None


def test_the_next_chunks_travel_while_one_is_loaded(ranks: Ranks) -> None:
    """Every chunk is loaded with its successors posted, the last of them said, and one drawn ahead of those."""
    sender = Sender(ranks)
    tensors = weights(1)
    plan = plan_of(tensors)
    posted, said, drawn = [], [], []
    seen_drawn = threading.Event()

    def load(rank: int, received: list[tuple[str, torch.Tensor]]) -> list[str]:
        if rank == 0:
            receiver = ranks.receivers[0]
            posted.append([chunk for chunk, _ in receiver._posted])
            said.append([receiver._next - 1] if receiver._proposed is not None else [])
            seen_drawn.wait(0.05)
        return ranks.keep(rank, received)

    ranks.load = load
    update.agree(ranks, sender.group, plan)
    for delivery in update.deliver(ranks, sender.group, plan, (drawn.append(n) or (n, t) for n, t in tensors.items())):
        behind = plan.chunks[: delivery.packed.chunk.index + AHEAD + 2]
        assert len(drawn) == sum(len(chunk.names) for chunk in behind)
    chunks = range(len(plan.chunks))
    assert said == [list(chunks[chunk + AHEAD : chunk + AHEAD + 1]) for chunk in chunks]
    assert posted == [list(chunks[chunk + 1 : chunk + AHEAD]) for chunk in chunks]
    sender.group.close()


def test_a_stream_that_departs_from_the_plan_ends_the_update(ranks: Ranks) -> None:
    """What was sent before is confirmed, nobody waits for what does not come, and the next update is whole."""
    sender = Sender(ranks)
    tensors = weights(1)
    plan = plan_of(tensors)
    for wrong in range(len(plan.chunks)):
        stream = list(tensors.items())
        at = sum(len(chunk.names) for chunk in plan.chunks[:wrong])
        stream[at] = ("another.weight", stream[at][1])
        update.agree(ranks, sender.group, plan)
        confirmed = []
        began = time.monotonic()
        with pytest.raises(ContractError, match=r"the stream brings `another\.weight` where the plan says"):  # noqa: PT012
            for delivery in update.deliver(ranks, sender.group, plan, iter(stream)):
                assert all(receipt.refused is None and receipt.received for receipt in delivery.receipts)
                confirmed.append(delivery.packed.chunk.index)
        assert confirmed == list(range(wrong))
        assert time.monotonic() - began < 5
        ranks.held = [{} for _ in ranks.held]
        sender.send(wrong + 2)
    sender.group.close()


def test_a_stream_that_goes_on_after_the_plan_is_refused(ranks: Ranks) -> None:
    sender = Sender(ranks)
    tensors = weights(1)
    with pytest.raises(ContractError, match="the stream brings `more` after the plan's end"):
        list(update_of(sender, tensors, {**tensors, "more": torch.ones(1)}))
    sender.send(2)
    sender.group.close()


def update_of(sender: Sender, planned: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]):
    return sender.deliver(plan_of(planned), sent)


def test_a_rank_at_another_chunk_stops_all_alike(ranks: Ranks) -> None:
    sender = Sender(ranks)
    tensors = weights(1)
    plan = plan_of(tensors)
    astray = len(ranks.receivers) - 1
    ranks.asked = lambda rank, chunk: chunk + (chunk == 2 and rank == astray)
    refused = []
    with pytest.raises(ContractError, match="is at another chunk than the sender"):  # noqa: PT012
        for delivery in sender.deliver(plan, tensors):
            refused += [(delivery.packed.chunk.index, receipt.rank, receipt.refused) for receipt in delivery.receipts]
    said = f"engine rank {astray} is at another chunk than the sender"
    assert [item for item in refused if item[2]] == [
        *((chunk, astray, said) for chunk in range(2, 2 + AHEAD)),
        *((2 + AHEAD, rank, said) for rank in range(len(ranks.receivers))),
    ]
    ranks.asked = lambda rank, chunk: chunk
    ranks.held = [{} for _ in ranks.held]
    sender.send(2)
    sender.group.close()


def test_a_loader_that_fails_says_so_and_the_rest_goes_on(ranks: Ranks) -> None:
    sender = Sender(ranks)
    tensors = weights(1)

    def load(rank: int, received: list[tuple[str, torch.Tensor]]) -> list[str]:
        if rank == 0 and "layers.8.weight" in dict(received):
            raise ValueError("it does not fit")
        return ranks.keep(rank, received)

    ranks.load = load
    refusals = []
    for delivery in sender.deliver(plan_of(tensors), tensors):
        assert [item.digest for item in delivery.receipts[0].received] == delivery.packed.digests()
        refusals += [(receipt.rank, receipt.refused) for receipt in delivery.receipts if receipt.refused]
    assert refusals == [(0, "ValueError while loading: it does not fit")]
    ranks.load = ranks.keep
    sender.send(2)
    sender.group.close()


@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_update_that_is_left_open_is_dropped_by_the_next(ranks: Ranks, after: int) -> None:
    sender = Sender(ranks)
    tensors = weights(1)
    stream = sender.deliver(plan_of(tensors), tensors)
    for _ in range(after):
        next(stream)
    stream.close()
    ranks.held = [{} for _ in ranks.held]
    sender.send(2)
    sender.group.close()


def test_other_plans_are_refused_before_a_byte_moves(ranks: Ranks) -> None:
    sender = Sender(ranks)
    tensors = weights(1)
    plan, turned = plan_of(tensors), plan_of(dict(reversed(tensors.items())))
    answer = ranks.begin_update(turned)
    agreement = sender.group.begin(plan)
    answer()
    assert agreement.dissenters == tuple(range(1, len(ranks.receivers) + 1))
    with pytest.raises(ContractError, match="chunk 0 was announced before a chunk plan was agreed on"):
        ranks.receive(0)()
    sender.send(2)
    sender.group.close()


def test_a_chunk_that_is_not_planned_is_refused(ranks: Ranks) -> None:
    sender = Sender(ranks)
    plan = plan_of(weights(1))
    update.agree(ranks, sender.group, plan)
    with pytest.raises(ContractError, match="chunk 99 was announced, the agreed plan has"):
        ranks.receive(99)()
    sender.group.close()


def test_a_sender_that_goes_silent_is_given_up(ranks: Ranks) -> None:
    sender = Sender(ranks, deadline_s=1)
    tensors = weights(1)
    update.agree(ranks, sender.group, plan_of(tensors))
    began = time.monotonic()
    with pytest.raises(TransferFailed, match=r"waited up to 1 s with the sender"):
        ranks.receive(0)()
    assert time.monotonic() - began < 10
    sender.group.close()
