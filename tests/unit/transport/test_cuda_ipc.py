"""The rings of CUDA IPC without CUDA: whose memory is read, when a slot is filled again, and what is refused.

What this does not exercise: handles and events of CUDA itself, and two processes; tests/h100 does. Here a GPU is a
name, its memory is the host's, and an event is the moment at which it was recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from tests.unit.transport.transfer_case import Ranks, Sender, plan_of, weights
from verifier.engine import sender as update
from verifier.errors import ContractError
from verifier.plan.digest import Pieces, digest_tensor
from verifier.transport import cuda_ipc
from verifier.transport.cuda_ipc import SLOTS, follow

TRAINER_RANKS = 2


class Event:
    """Recorded when its slot was packed; whoever waits for one that was not has come too early."""

    known: ClassVar[dict[str, Event]] = {}

    def __init__(self, interprocess: bool) -> None:
        assert interprocess
        self.num_records = 0
        self.known[f"{id(self):016x}"] = self

    def record(self) -> None:
        self.num_records += 1

    def ipc_handle(self) -> bytes:
        return bytes.fromhex(f"{id(self):016x}")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:
        return cls.known[handle.hex()]


class Stream:
    def wait_event(self, event: Event) -> None:
        assert event.num_records > 0


class TrainerRounds:
    """The rounds of `TRAINER_RANKS` threads."""

    rows: ClassVar[list[Any]] = [None] * TRAINER_RANKS
    barrier = threading.Barrier(TRAINER_RANKS, timeout=20)

    def __init__(self, rank: int) -> None:
        self.rank, self.ended = rank, False

    def begin(self) -> None:
        self.ended = False

    def exchange(self, record: Any) -> list[Any]:
        found = self._round(record)
        if any(row is None for row in found):
            self.ended = True
            raise ContractError("a trainer rank stopped before the transfer was complete: its log says why")
        return found

    def stop(self) -> None:
        if not self.ended:
            self._round(None)

    def end(self) -> None:
        self._round({})

    def _round(self, record: Any) -> list[Any]:
        self.rows[self.rank] = record
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """GPUs that are names of threads; `released` lists whose rings were given up unread."""
    found: dict[str, Any] = {"memory": {}, "released": [], "released_by": [], "gpu_of": {}}

    def gpu() -> str:
        name = threading.current_thread().name
        return found["gpu_of"].get(name, "GPU-" + ("0" if name == "MainThread" else name.split("_")[0][-1]))

    def describe(memory: torch.Tensor) -> dict[str, Any]:
        found["memory"][memory.data_ptr()] = memory
        return {"gpu": gpu(), "num_bytes": memory.numel(), "values": memory.data_ptr()}

    def release(record: dict[str, Any]) -> None:
        found["released"].append(record["gpu"])
        found["released_by"].append(threading.current_thread().name)

    monkeypatch.setattr(cuda_ipc, "gpu_uuid", gpu)
    monkeypatch.setattr(cuda_ipc, "allocate", lambda n: torch.full((n + 16,), 255, dtype=torch.uint8)[:n])
    monkeypatch.setattr(cuda_ipc, "describe", describe)
    monkeypatch.setattr(
        cuda_ipc, "open_buffer", lambda record: torch.from_numpy(found["memory"][record["values"]].numpy())
    )
    monkeypatch.setattr(cuda_ipc, "release", release)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield found
    Event.known.clear()


class Follower:
    """Trainer rank 1: draws the same stream and packs it beside rank 0."""

    def __init__(self, version: int, planned: int | None = None) -> None:
        self.rounds = TrainerRounds(1)
        self.drawn = 0
        tensors = weights(version)
        plan = plan_of(weights(version if planned is None else planned))
        self.thread = threading.Thread(
            target=lambda: follow(self.rounds, plan, self._counted(tensors)), name="trainer rank 1", daemon=True
        )
        self.thread.start()

    def _counted(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors.items():
            self.drawn += 1
            yield item

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


def send(sender: Sender, rounds: TrainerRounds, version: int) -> None:
    rounds.begin()
    follower = Follower(version)
    sender.send(version)
    rounds.end()
    follower.join()
    assert follower.drawn == len(weights(version))


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
    """By the digests of a receipt (TPT001), or of what the engine holds (ENG001); one chunk is wrong, no other."""
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
    for delivery in sender.deliver(plan, weights(1)):
        for item in delivery.receipts[0].received:
            exported, held = digest_tensor(weights(1)[item.name]), digest_tensor(ranks.held[0][item.name])
            found = {"receipt": item.digest, "engine": held}
            differs |= {(delivery.packed.chunk.index, who) for who, digest in found.items() if digest != exported}
    rounds.end()
    follower.join()
    assert differs == {(wrong, who) for who in seen_by}
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
