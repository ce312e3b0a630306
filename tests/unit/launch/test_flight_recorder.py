"""The slot's layout, read back; and what the watchdog makes of slots."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.launch import flight_recorder as flight
from verifier.launch.flight_recorder import FlightRecorder, group_key, memory_for, read_slot, waiting_since
from verifier.launch.watchdog import doing, find_stall

PAIR, ALL = group_key("tp", [2, 3]), group_key("world", range(4))
NOW = 1000.0


@pytest.fixture
def memory():
    return memory_for(4)


def slots_of(memory, num_ranks=4):
    return [read_slot(memory, rank) for rank in range(num_ranks)]


def set_since(memory, rank, since_s):
    flight._STATE.pack_into(memory, rank * flight.SLOT_BYTES + flight._STATE_AT, since_s)


def test_a_rank_that_entered_nothing(memory):
    assert read_slot(memory, 1) is None
    assert waiting_since(memory, 1) is None
    assert doing(None, NOW) == "in no collective yet"


def test_what_is_written_is_read_back(memory):
    recorder = FlightRecorder(memory, 3)
    recorder.label_text = b"model.norm.weight"
    record = recorder.enter(PAIR, b"all_reduce", b"bfloat16", (2, 3))
    assert waiting_since(memory, 3) is None
    recorder.wait(record)
    slot = read_slot(memory, 3)
    assert (slot.rank, slot.num_entered, slot.count, slot.group, slot.op) == (3, 1, 1, PAIR, "all_reduce")
    assert slot.tensor == "`model.norm.weight` [2, 3] bfloat16"
    assert slot.waiting
    assert slot.since_s == waiting_since(memory, 3)
    assert slot.counts == {PAIR.code: 1}
    recorder.leave()
    assert not read_slot(memory, 3).waiting
    assert waiting_since(memory, 3) is None
    assert read_slot(memory, 2) is None


def test_waiting_for_an_older_collective_shows_that_one(memory):
    recorder = FlightRecorder(memory, 0)
    first = recorder.enter(ALL, b"all_reduce", b"float32", (4,))
    recorder.enter(PAIR, b"broadcast", b"int64", (5,))
    recorder.wait(first)
    slot = read_slot(memory, 0)
    assert (slot.op, slot.shape, slot.num_entered) == ("all_reduce", (4,), 1)
    assert slot.counts == {ALL.code: 1, PAIR.code: 1}


@given(shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple))
def test_any_shape_of_up_to_five_dims(shape):
    memory = memory_for(1)
    FlightRecorder(memory, 0).enter(ALL, b"broadcast", b"int8", shape)
    assert read_slot(memory, 0).shape == shape


def test_no_tensor_is_not_a_scalar(memory):
    FlightRecorder(memory, 0).enter(ALL, b"barrier", b"", None)
    FlightRecorder(memory, 1).enter(ALL, b"all_reduce", b"float32", ())
    assert read_slot(memory, 0).tensor == ""
    assert read_slot(memory, 1).tensor == "[] float32"


def test_more_shapes_and_groups_than_are_kept(memory):
    recorder = FlightRecorder(memory, 0)
    for number in range(flight._MAX_SHAPES + 2):
        recorder.enter(group_key(f"g{number}", [0]), b"all_reduce", b"float32", (number,))
    slot = read_slot(memory, 0)
    assert slot.shape == (flight._MAX_SHAPES + 1,)
    assert len(slot.counts) == flight.MAX_GROUPS


def test_groups_of_the_same_ranks_are_told_apart():
    assert group_key("a", [0, 1]).code != group_key("b", [0, 1]).code
    assert group_key("a", [0, 1]).code != group_key("a", [0, 2]).code
    assert group_key("a", [5, 0, 127]).ranks == (0, 5, 127)


def test_label_nests_and_does_nothing_outside_of_a_rank(memory):
    with flight.label("ignored"):
        assert flight.active() is None
    recorder = FlightRecorder(memory, 0)
    flight.activate(recorder)
    try:
        with flight.label("outer"):
            with flight.label("x" * 500):
                assert recorder.label_text == b"x" * 200
            assert recorder.label_text == b"outer"
        assert recorder.label_text == b""
    finally:
        flight._Active.recorder = None


def test_recording_is_quick(memory):
    recorder = FlightRecorder(memory, 0)
    begin = time.perf_counter()
    for _ in range(2000):
        recorder.wait(recorder.enter(ALL, b"all_reduce", b"float32", (64,)))
        recorder.leave()
    assert time.perf_counter() - begin < 0.2


def test_within_the_deadline_nothing_stalls(memory):
    recorder = FlightRecorder(memory, 0)
    recorder.wait(recorder.enter(ALL, b"all_reduce", b"float32", (1,)))
    set_since(memory, 0, NOW - 5)
    assert find_stall(slots_of(memory), NOW, 5.1) is None
    assert find_stall(slots_of(memory), NOW, 4.9).missing == (1, 2, 3)


def test_a_rank_that_has_gone_past_had_arrived(memory):
    recorders = [FlightRecorder(memory, rank) for rank in range(4)]
    for rank in (0, 1):
        recorders[rank].wait(recorders[rank].enter(ALL, b"all_reduce", b"float32", (1,)))
        set_since(memory, rank, NOW - 10 - rank)
    recorders[2].enter(ALL, b"all_reduce", b"float32", (1,))
    recorders[2].enter(PAIR, b"broadcast", b"float32", (9,))
    stall = find_stall(slots_of(memory), NOW, 5)
    assert (stall.arrived, stall.missing, stall.slot.rank, stall.waited_s) == ((0, 1, 2), (3,), 1, 11)


def test_the_root_of_a_chain_is_named_not_the_oldest(memory):
    recorders = [FlightRecorder(memory, rank) for rank in range(4)]
    recorders[0].wait(recorders[0].enter(group_key("pp", [0, 2]), b"recv", b"float32", (1,)))
    set_since(memory, 0, NOW - 30)
    recorders[2].wait(recorders[2].enter(PAIR, b"all_reduce", b"float32", (1,)))
    set_since(memory, 2, NOW - 20)
    stall = find_stall(slots_of(memory), NOW, 5)
    assert (stall.slot.group, stall.missing) == (PAIR, (3,))


def test_what_a_rank_does_in_words(memory):
    recorder = FlightRecorder(memory, 0)
    record = recorder.enter(ALL, b"all_gather", b"float32", (7,))
    assert (
        doing(read_slot(memory, 0), NOW)
        == "in no collective, the last was all_gather of [7] float32 (its collective 1)"
    )
    recorder.wait(record)
    set_since(memory, 0, NOW - 2)
    assert doing(read_slot(memory, 0), NOW) == "waits 2.0 s in all_gather of [7] float32 (its collective 1)"
    set_since(memory, 0, -(NOW - 3))
    assert doing(read_slot(memory, 0), NOW).startswith("in no collective since 3.0 s, the last was all_gather")
