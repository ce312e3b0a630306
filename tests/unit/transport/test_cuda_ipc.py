"""The rings of CUDA IPC without CUDA: whose memory is read, when a slot is filled again, and what is refused.

What this does not exercise: handles and events of CUDA itself, and two processes; tests/h100 does. Here a GPU is a
name, its memory is the host's, and an event is the moment at which it was recorded.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.unit.transport.ring_case import Follower, TrainerRounds, send
from tests.unit.transport.transfer_case import Ranks, Sender, plan_of, weights
from verifier.errors import ContractError
from verifier.transport import cuda_ipc
from verifier.transport.cuda_ipc import SLOTS


def test_every_rank_reads_the_ring_on_its_own_gpu(host: dict[str, Any]) -> None:
    ranks, rounds = Ranks(2), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    for version in range(3):
        send(sender, rounds, version)
    assert host["released"] == []
    sender.group.close()
    ranks.close()


def test_a_ring_that_no_engine_rank_reads_is_given_up(host: dict[str, Any]) -> None:
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    for version in range(2):
        send(sender, rounds, version)
    assert host["released"] == ["GPU-1", "GPU-1"]
    sender.group.close()
    ranks.close()


def test_a_rank_without_a_ring_is_refused_before_a_byte_is_loaded(host: dict[str, Any]) -> None:
    """All ranks say the same sentence; the next update, of a rank that has moved, is whole."""
    ranks, rounds = Ranks(3), TrainerRounds(0)
    host["gpu_of"]["engine rank 2_0"] = "GPU-7"
    sender = Sender(ranks, "ipc", rounds)
    rounds.begin()
    follower = Follower(1)
    sentence = (
        "engine rank 2 runs on GPU GPU-7 and was given no buffer there: the trainer shares buffers on GPU-0, GPU-1"
    )
    answers = []
    begin_update = ranks.begin_update

    def asked(plan: Any) -> Any:
        answers.append(begin_update(plan))
        return answers[-1]

    ranks.begin_update = asked
    with pytest.raises(ContractError) as caught:
        sender.deliver(plan_of(weights(1)), weights(1))
    rounds.stop()
    follower.join()
    assert str(caught.value) == sentence
    assert [str(future.exception()) for future in answers[0]._futures] == [sentence] * 3
    assert ranks.held == [{}, {}, {}]
    assert sorted(host["released"]) == ["GPU-0", "GPU-1"]
    with pytest.raises(ContractError, match="before a chunk plan was agreed on"):
        ranks.receive(0)()
    host["gpu_of"]["engine rank 2_0"] = "GPU-1"
    send(sender, rounds, 2)
    sender.group.close()
    ranks.close()


def test_of_two_rings_on_one_gpu_the_first_is_read(host: dict[str, Any]) -> None:
    """Trainer ranks rounds a GPU; both rings have the same key."""
    host["gpu_of"]["trainer rank 1"] = "GPU-0"
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    for version in range(2):
        send(sender, rounds, version)
    assert host["released_by"] == ["trainer rank 1"] * 2
    sender.group.close()
    ranks.close()


def test_what_a_loader_keeps_is_copied_or_refused(host: dict[str, Any]) -> None:
    """A loader that keeps views, as a reload by layers does, gets copies; one that is not asked is found out."""
    kept: list[dict[str, torch.Tensor]] = [{}, {}]

    def keep_views(rank: int, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        kept[rank] |= dict(tensors)
        return [name for name, _ in tensors]

    def copy_views(buffer: torch.Tensor) -> None:
        memory = buffer.untyped_storage().data_ptr()
        held = kept[int(threading.current_thread().name.split("_")[0][-1])]  # to look at the other's would hold them
        for name, tensor in held.items():
            if tensor.untyped_storage().data_ptr() == memory:
                held[name] = tensor.clone()

    ranks, rounds = Ranks(2, copy_views), TrainerRounds(0)
    ranks.load, ranks.held = keep_views, kept
    sender = Sender(ranks, "ipc", rounds)
    send(sender, rounds, 1)
    for receiver in ranks.receivers:
        receiver._copy_views = None
    rounds.begin()
    follower = Follower(2)
    refused = set()
    for delivery in sender.deliver(plan_of(weights(2)), weights(2)):
        refused |= {receipt.refused for receipt in delivery.receipts}
    rounds.end()
    follower.join()
    assert refused == {"the loader keeps views of a buffer that the sender will overwrite"}
    sender.group.close()
    ranks.close()


def test_a_trainer_rank_that_stops_ends_the_update_for_all(host: dict[str, Any]) -> None:
    """Rank 0 hears of it in their next round and tells the engine, and no one waits."""
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    tensors = weights(1)
    plan = plan_of(tensors)

    def stop_at_chunk_3(rounds: TrainerRounds) -> None:
        rounds.exchange(cuda_ipc.Ring(plan).describe())
        rounds.exchange({})
        for _ in range(3):
            rounds.exchange({})
        rounds.stop()

    rounds.begin()
    other = threading.Thread(target=stop_at_chunk_3, args=[TrainerRounds(1)], name="trainer rank 1", daemon=True)
    other.start()
    confirmed = 0
    stream = sender.deliver(plan, tensors)
    with pytest.raises(ContractError, match="a trainer rank stopped before the transfer was complete"):  # noqa: PT012
        for _ in stream:
            confirmed += 1
    rounds.stop()
    other.join(20)
    assert confirmed == 3
    send(sender, rounds, 2)
    sender.group.close()
    ranks.close()


def test_a_plan_that_is_refused_tells_the_other_trainer_ranks(host: dict[str, Any]) -> None:
    ranks, rounds = Ranks(2), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    tensors = weights(1)
    turned = dict(reversed(tensors.items()))
    rounds.begin()
    follower = Follower(1)
    answer = ranks.begin_update(plan_of(turned))
    assert not sender.group.begin(plan_of(tensors)).reached
    answer()
    rounds.stop()
    follower.join()
    assert follower.drawn == len(tensors)
    send(sender, rounds, 2)
    sender.group.close()
    ranks.close()


def test_a_slot_is_filled_again_only_when_it_was_confirmed(host: dict[str, Any]) -> None:
    """While a rank loads chunk k at its leisure, no trainer rank packs past chunk k + 2."""
    ranks, rounds = Ranks(2), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    furthest: list[int] = []
    follower_of: list[Follower] = []
    plan = plan_of(weights(1))
    chunk_of = {name: chunk.index for chunk in plan.chunks for name in chunk.names}

    def slow(rank: int, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        threading.Event().wait(0.03)
        drawn = follower_of[0].drawn
        packed = sum(1 for chunk in plan.chunks if sum(len(c.names) for c in plan.chunks[: chunk.index + 1]) <= drawn)
        furthest.append(packed - 1 - chunk_of[tensors[0][0]])
        return ranks.keep(rank, tensors)

    ranks.load = slow
    rounds.begin()
    follower_of.append(Follower(1))
    sender.send(1)
    rounds.end()
    follower_of[0].join()
    assert max(furthest) == SLOTS - 1
    sender.group.close()
    ranks.close()
