"""When a ring's chunks are digested, and who sees what a slot does not hold; the GPU is that of `test_cuda_ipc.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.transport.ring_case import Follower, TrainerRounds, send
from tests.unit.transport.transfer_case import Ranks, Sender, plan_of, weights
from verifier.engine import sender as update
from verifier.errors import ContractError
from verifier.plan.digest import Pieces, digest_tensor
from verifier.stages.engine.probe_engine_state import TransferProbe
from verifier.transport import cuda_ipc
from verifier.transport.cuda_ipc import SLOTS


class Deaf:
    """A recorder that keeps nothing."""

    def emit(self, record: Any) -> None:
        pass


def test_a_slot_that_is_being_read_is_not_filled(host: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that miscounts is refused, as a follower that hears its count; what is in the slots is delivered."""
    ring = cuda_ipc.Ring(plan_of(weights(1)))
    for _ in range(SLOTS):
        ring.place(16)
    with pytest.raises(ContractError, match="chunk 5 must not be packed yet: its slot holds chunk 0, and 0 chunks are"):
        ring.place(16)
    ring.num_confirmed = 1
    assert ring.place(16).data_ptr() == ring._memory.data_ptr()
    ranks, rounds = Ranks(2), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    monkeypatch.setattr(sender.group, "confirmed", lambda: None)
    rounds.begin()
    follower = Follower(1)
    confirmed = []
    with pytest.raises(ContractError, match="its slot holds chunk 0"):  # noqa: PT012
        for delivery in sender.deliver(plan_of(weights(1)), weights(1)):
            confirmed.append(delivery.packed.chunk.index)
    rounds.stop()
    follower.join()
    assert confirmed == list(range(SLOTS))
    sender.group.close()
    ranks.close()


def test_a_chunk_is_digested_once_the_chunk_before_is_loaded(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is asked for, while the receipt of the chunk before travels; the first one has none before it."""
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    started: list[int] = []
    asked: list[int] = []
    loaded: list[int] = []
    start = Pieces.start
    monkeypatch.setattr(Pieces, "start", lambda self, buffer: started.append(buffer.numel()) or start(self, buffer))

    def ask(rank: int, chunk: int) -> int:
        asked.append(len(started))
        return chunk

    def load(rank: int, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        loaded.append(len(started))
        return ranks.keep(rank, tensors)

    ranks.asked, ranks.load = ask, load
    send(sender, rounds, 1)
    chunks = plan_of(weights(1)).chunks
    assert asked == [0, *range(2, len(chunks) + 1)]
    assert loaded == list(range(1, len(chunks) + 1))
    assert started == [chunk.num_bytes for chunk in chunks]
    sender.group.close()
    ranks.close()


@pytest.mark.parametrize(
    ("when", "seen_by"),
    [
        ("half of it is never written", {"receipt", "engine"}),
        ("it changes while the chunk before is loaded", {"receipt", "engine"}),
        ("it changes after its digest", {"engine"}),
    ],
)
def test_what_a_slot_does_not_hold_is_seen(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch, when: str, seen_by: set[str]
) -> None:
    """By the digests of a receipt (TPT001), or of what the engine holds (ENG001); one chunk is wrong, no other.

    What the probe keeps to compare the engine with is what was drawn, whatever lay in the slot.
    """
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    plan, wrong = plan_of(weights(1)), 3
    before = plan.chunks[wrong - 1].names[0]

    def overwrite() -> None:
        ring = sender.group._ring
        ring._memory[wrong * ring._slot_bytes :][: plan.chunks[wrong].num_bytes].fill_(7)

    def ask(rank: int, chunk: int) -> int:
        if chunk == wrong and when == "it changes after its digest":
            overwrite()
        return chunk

    def load(rank: int, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        if tensors[0][0] == before and when == "it changes while the chunk before is loaded":
            overwrite()
        return ranks.keep(rank, tensors)

    def pack_half(chunk: Any, tensors: dict[str, torch.Tensor], into: torch.Tensor) -> Any:
        held = into.clone()
        packed = pack(chunk, tensors, into)
        if chunk.index == wrong and when == "half of it is never written":
            into[chunk.num_bytes // 2 :] = held[chunk.num_bytes // 2 :]
        return packed

    pack = update.pack
    monkeypatch.setattr(update, "pack", pack_half)
    ranks.asked, ranks.load = ask, load
    rounds.begin()
    follower = Follower(1)
    differs = set()
    probe, unjudged = TransferProbe([Deaf()], version=1), TransferProbe([Deaf()], version=1, keeps=False)
    update.agree(ranks, sender.group, plan)
    stream = update._shown(update._shown(iter(weights(1).items()), probe), unjudged)
    for delivery in update.deliver(ranks, sender.group, plan, stream):
        unjudged.delivered(delivery)
        probe.delivered(delivery)
        for item in delivery.receipts[0].received:
            exported, held = digest_tensor(weights(1)[item.name]), digest_tensor(ranks.held[0][item.name])
            found = {"receipt": item.digest, "engine": held}
            differs |= {(delivery.packed.chunk.index, who) for who, digest in found.items() if digest != exported}
    rounds.end()
    follower.join()
    assert differs == {(wrong, who) for who in seen_by}
    assert unjudged.sent == unjudged._drawn == {}
    assert {name: digest_tensor(tensor) for name, tensor in probe.sent.items()} == {
        name: digest_tensor(tensor) for name, tensor in weights(1).items()
    }
    sender.group.close()
    ranks.close()


def test_digests_of_an_update_that_was_left_open_are_dropped(host: dict[str, Any]) -> None:
    ranks, rounds = Ranks(1), TrainerRounds(0)
    sender = Sender(ranks, "ipc", rounds)
    rounds.begin()
    follower = Follower(1)
    stream = sender.deliver(plan_of(weights(1)), weights(1))
    next(stream)
    stream.close()
    rounds.stop()
    follower.join()
    assert ranks.receivers[0]._early is not None
    ranks.held = [{}]
    send(sender, rounds, 2)
    sender.group.close()
    ranks.close()
