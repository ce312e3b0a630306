"""The slot's layout, read back; and what the watchdog makes of slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.launch import flight_recorder as flight
from verifier.launch.flight_recorder import FlightRecorder, group_key, read_slot, slots_for
from verifier.launch.watchdog import doing, find_stall

PAIR, ALL = group_key("tp", [2, 3]), group_key("world", range(4))
NOW = 1000.0


@pytest.fixture
def slots():
    return slots_for(4)


def test_a_rank_that_entered_nothing(slots):
    assert read_slot(slots[1]) is None
    assert doing(None, NOW) == "in no collective yet"


def test_what_is_written_is_read_back(slots):
    recorder = FlightRecorder(slots[3])
    recorder.label = "model.norm.weight"
    record = recorder.enter(PAIR, "all_reduce", "bfloat16", (2, 3))
    assert read_slot(slots[3]).since_s == 0
    recorder.wait(record)
    slot = read_slot(slots[3])
    assert (slot.num_entered, slot.count, slot.code, slot.ranks, slot.op) == (1, 1, PAIR.code, (2, 3), "all_reduce")
    assert slot.tensor == "`model.norm.weight` [2, 3] bfloat16"
    assert slot.since_s > 0
    assert slot.entered == {PAIR.code: 1, 0: 0}
    recorder.leave()
    assert read_slot(slots[3]).since_s < 0
    assert read_slot(slots[2]) is None


@pytest.mark.parametrize("num_ranks", [1, 7, 64, 513, 4096])
def test_a_group_of_any_ranks_of_a_job_is_read_back(num_ranks):
    slots = slots_for(num_ranks)
    for ranks in [(num_ranks - 1,), tuple(range(0, num_ranks, 7)), tuple(range(num_ranks))]:
        FlightRecorder(slots[0]).enter(group_key("dp", ranks), "all_reduce")
        assert read_slot(slots[0]).ranks == ranks


def test_a_process_of_no_job_may_be_in_any_group():
    """Its slot has no room for the ranks, and nobody reads it."""
    FlightRecorder(flight.slot_of(1)()).enter(group_key("dp", range(4096)), "all_reduce")


def test_waiting_for_an_older_collective_shows_that_one(slots):
    recorder = FlightRecorder(slots[0])
    first = recorder.enter(ALL, "all_reduce", "float32", (4,))
    recorder.enter(PAIR, "broadcast", "int64", (5,))
    recorder.wait(first)
    slot = read_slot(slots[0])
    assert (slot.op, slot.tensor, slot.num_entered) == ("all_reduce", "[4] float32", 1)
    assert slot.entered == {ALL.code: 1, PAIR.code: 1, 0: 0}


@given(shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple))
def test_any_shape_of_up_to_five_dims(shape):
    slots = slots_for(1)
    FlightRecorder(slots[0]).enter(ALL, "broadcast", "int8", shape)
    assert read_slot(slots[0]).tensor == f"{list(shape)} int8"


def test_no_tensor_is_not_a_scalar(slots):
    FlightRecorder(slots[0]).enter(ALL, "barrier")
    FlightRecorder(slots[1]).enter(ALL, "all_reduce", "float32", ())
    assert read_slot(slots[0]).tensor == ""
    assert read_slot(slots[1]).tensor == "[] float32"


def test_more_groups_and_dims_than_are_kept(slots):
    recorder = FlightRecorder(slots[0])
    groups = [group_key(f"g{number}", [0]) for number in range(flight.MAX_GROUPS + 2)]
    for group in groups:
        recorder.enter(group, "all_gather_into_tensor_coalesced", "float32", range(9))
    slot = read_slot(slots[0])
    assert (slot.op, slot.tensor) == ("all_gather_into_tensor_coalesced", "[0, 1, 2, 3, 4] float32")
    assert slot.entered == {group.code: 1 for group in groups[: flight.MAX_GROUPS]}


def test_groups_of_the_same_ranks_are_told_apart():
    assert group_key("a", [0, 1]).code != group_key("", [0, 1]).code
    assert group_key("a", [0, 1]).code != group_key("a", [0, 2]).code


def test_ranks_of_a_group(slots):
    FlightRecorder(slots[0]).enter(group_key("a", [3, 0, 1]), "barrier")
    assert read_slot(slots[0]).ranks == (0, 1, 3)


def test_label_nests_and_is_cut(slots, monkeypatch):
    monkeypatch.setattr(flight.RECORDER, "slot", slots[0])
    with flight.label("outer"):
        with flight.label("\u00e9" * 500):
            flight.RECORDER.enter(ALL, "barrier")
        assert read_slot(slots[0]).tensor == f"`{'\u00e9' * 100}`"
        assert flight.RECORDER.label == "outer"
    assert flight.RECORDER.label == ""


def test_what_did_not_change_is_not_written_again(slots):
    """The recorder runs around every collective: encoding the same texts each time took 20 us."""
    recorder, slot = FlightRecorder(slots[0]), slots[0]
    recorder.enter(ALL, "all_reduce", "float32", (64,))
    slot.label_text, slot.op_text, slot.num_dims, slot.code = b"kept", b"kept", 0, 7
    recorder.wait(recorder.enter(ALL, "all_reduce", "float32", (64,)))
    assert (slot.label_text, slot.op_text, slot.num_dims, slot.code) == (b"kept", b"kept", 0, 7)
    assert (slot.num_entered, slot.count, slot.entered[ALL.code]) == (2, 2, 2)
    recorder.enter(ALL, "all_reduce", "float32", (65,))
    assert (slot.label_text, slot.op_text, slot.dims[0], slot.code) == (b"", b"all_reduce", 65, ALL.code)


def test_within_the_deadline_nothing_stalls(slots):
    recorder = FlightRecorder(slots[0])
    recorder.wait(recorder.enter(ALL, "all_reduce", "float32", (1,)))
    slots[0].since_s = NOW - 5
    assert find_stall(list(map(read_slot, slots)), NOW, 5.1) is None
    assert find_stall(list(map(read_slot, slots)), NOW, 4.9).missing == (1, 2, 3)


def test_a_rank_that_has_gone_past_had_arrived(slots):
    recorders = [FlightRecorder(slots[rank]) for rank in range(4)]
    for rank in (0, 1):
        recorders[rank].wait(recorders[rank].enter(ALL, "all_reduce", "float32", (1,)))
        slots[rank].since_s = NOW - 10 - rank
    recorders[2].enter(ALL, "all_reduce", "float32", (1,))
    recorders[2].enter(PAIR, "broadcast", "float32", (9,))
    stall = find_stall(list(map(read_slot, slots)), NOW, 5)
    assert (stall.arrived, stall.missing, stall.waited_s) == ((0, 1, 2), (3,), 11)


def test_the_root_of_a_chain_is_named_not_the_oldest(slots):
    recorders = [FlightRecorder(slots[rank]) for rank in range(4)]
    recorders[0].wait(recorders[0].enter(group_key("pp", [0, 2]), "recv", "float32", (1,)))
    slots[0].since_s = NOW - 30
    recorders[2].wait(recorders[2].enter(PAIR, "all_reduce", "float32", (1,)))
    slots[2].since_s = NOW - 20
    stall = find_stall(list(map(read_slot, slots)), NOW, 5)
    assert (stall.group, stall.missing) == ((2, 3), (3,))


def test_the_root_of_a_chain_is_named_before_it_is_overdue(slots):
    recorders = [FlightRecorder(slots[rank]) for rank in range(4)]
    recorders[0].wait(recorders[0].enter(group_key("pp", [0, 2]), "recv", "float32", (1,)))
    slots[0].since_s = NOW - 30
    recorders[2].wait(recorders[2].enter(PAIR, "all_reduce", "float32", (1,)))
    slots[2].since_s = NOW - 4
    stall = find_stall(list(map(read_slot, slots)), NOW, 5)
    assert (stall.group, stall.missing) == ((2, 3), (3,))


def test_a_wait_outside_of_an_overdue_chain_is_not_its_root(slots):
    recorders = [FlightRecorder(slots[rank]) for rank in range(4)]
    for rank, name in ((0, "a"), (1, "b")):  # each waits for the other
        recorders[rank].wait(recorders[rank].enter(group_key(name, [0, 1]), "all_reduce", "float32", (1,)))
        slots[rank].since_s = NOW - 30 - rank
    recorders[2].wait(recorders[2].enter(PAIR, "all_reduce", "float32", (1,)))
    slots[2].since_s = NOW - 1
    stall = find_stall(list(map(read_slot, slots)), NOW, 5)
    assert (stall.group, stall.arrived) == ((0, 1), (1,))


def test_what_a_rank_does_in_words(slots):
    recorder = FlightRecorder(slots[0])
    record = recorder.enter(ALL, "all_gather", "float32", (7,))
    assert (
        doing(read_slot(slots[0]), NOW) == "in no collective, the last was all_gather of [7] float32 (its collective 1)"
    )
    recorder.wait(record)
    slots[0].since_s = NOW - 2
    assert doing(read_slot(slots[0]), NOW) == "waits 2.0 s in all_gather of [7] float32 (its collective 1)"
    slots[0].since_s = -(NOW - 3)
    assert doing(read_slot(slots[0]), NOW).startswith("in no collective since 3.0 s, the last was all_gather")
