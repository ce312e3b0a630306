"""Steps of lines of metrics, read back while their file grows, is cut, or is written anew.

What this does not exercise: a run that writes them (tests/faults, `lines-overwritten-by-a-resume`).
"""

from __future__ import annotations

import json
from pathlib import Path

from verifier.trainer.metric_lines import MetricLines


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 1.5}) + "\n"


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = MetricLines(file)
    assert lines.runs() == ()
    for step in (1, 2, 3):
        with file.open("a") as stream:
            stream.write(line(step))
        assert lines.runs() == ((1, step),)
    with file.open("a") as stream:
        stream.write(line(3) + line(4) + "{" + "\n" + line(7)[:9])
    assert lines.runs() == ((1, 3), (3, 4))
    with file.open("a") as stream:
        stream.write(line(7)[9:])
    assert lines.runs() == ((1, 3), (3, 4), (7, 7))


def test_a_file_that_is_cut_or_written_anew_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = MetricLines(file)
    file.write_text("".join(map(line, (1, 2, 3))))
    assert lines.runs() == ((1, 3),)
    file.write_text("".join(map(line, (1, 2))))
    assert lines.runs() == ((1, 2),)
    file.write_text("".join(map(line, (3, 4, 5, 6))))  # longer than what was read
    assert lines.runs() == ((3, 6),)
    file.unlink()
    assert lines.runs() == ()
