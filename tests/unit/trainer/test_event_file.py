"""Events of TensorBoard as its own writer writes them, read back while their file grows.

What this does not exercise: a run that writes them (tests/faults, `events-counted-from-zero`).
"""

from __future__ import annotations

from pathlib import Path

from verifier.trainer.event_file import EventFile


def event(step: int, **numbers: float):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=f"step/{name}", simple_value=value) for name, value in numbers.items()]
    return Event(step=step, summary=Summary(value=values))


def test_the_last_event_of_a_file_that_grows(tmp_path: Path) -> None:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    events = EventFile(tmp_path)
    assert events.last() == (-1, {})
    for step in (1, 2):
        writer.add_event(event(step, loss=step / 4, reward=0.5))
        writer.flush()
        assert events.last() == (step, {"step/loss": step / 4, "step/reward": 0.5})
    writer.close()
    assert events.last() == (2, {"step/loss": 0.5, "step/reward": 0.5})
    assert (events.runs, events.restart) == (((1, 2),), -1)


def test_a_restart_is_read_before_the_first_point(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    started = [Event(step=step, session_log=SessionLog(status=SessionLog.START)) for step in (4, 9)]
    for item in (started[0], event(4), event(5), started[1], event(7)):
        writer.add_event(item)
    writer.close()
    events = EventFile(tmp_path)
    assert events.last()[0] == 7
    assert (events.runs, events.restart) == (((4, 5), (7, 7)), 4)


def test_a_record_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "whole"))
    writer.add_event(event(7, loss=1.0))
    writer.close()
    (whole,) = [file.read_bytes() for file in (tmp_path / "whole").iterdir()]
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(whole[:-5])
    events = EventFile(tmp_path)
    assert events.last() == (-1, {})
    file.write_bytes(whole)
    assert events.last() == (7, {"step/loss": 1.0})
