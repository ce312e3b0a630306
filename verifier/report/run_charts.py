"""Charts of a training run, from its metrics.jsonl: learning, mismatch, time by stage, bandwidth, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.report.charts import Chart, Series

METRICS = "metrics.jsonl"
MAX_STEPS = 400
"""Steps that are drawn; of more, every n-th."""
_TIMES = ("rollout_s", "score_s", "train_s", "sync_s")
"""Stages of a step; `prepare_s` holds the first two."""
_LEARNING = {"loss": "loss", "entropy": "nats", "kl": "nats", "grad_norm": "L2 norm", "answer_tokens": "tokens"}
"""Metric that has a chart of its own -> unit."""

Row = Mapping[str, Any]


def metrics_of(run: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Lines of a run's metrics, or of another of its files of JSON lines; none where it has no such file.

    A last line that was cut off is left out.
    """
    file = run / name
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def run_charts(rows: Sequence[Row]) -> tuple[Chart, ...]:
    """All charts that the lines have numbers for."""
    rows = rows[:: max(1, -(-len(rows) // MAX_STEPS))]
    return tuple(chart for chart in _charts(rows) if any(item.points for item in chart.series))


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    yield Chart(
        title="Reward", x="step", y="reward, share",
        series=_lines(rows, {"reward": "reward", "held_out_reward": "held-out reward", "accuracy": "accuracy"}),
    )  # fmt: skip
    for key, unit in _LEARNING.items():
        name = key.replace("_", " ")
        yield Chart(title=name.capitalize(), x="step", y=unit, series=_lines(rows, {key: name}))
    floor = tuple(Series(name=item.name, points=item.points, kind="bound", colour=3)
                  for item in _lines(rows, {"mismatch_floor": "floor: p99 of the first steps"}))  # fmt: skip
    yield Chart(
        title="Mismatch of trainer and engine over the run", x="step", y="nats", log=True,
        series=(*_lines(rows, {"mismatch_p99": "p99", "mismatch_max": "greatest"}), *floor),
    )  # fmt: skip
    yield from _by_position(rows)
    stages = [name for name in _TIMES if any(_number(row, name) is not None for row in rows)]
    yield Chart(
        title="Time by stage", x="step", y="seconds",
        series=tuple(
            Series(name=name.removesuffix("_s"), points=_points(rows, name), kind="bars", colour=colour)
            for colour, name in enumerate(stages)
        ),
    )  # fmt: skip
    yield Chart(
        title="Bandwidth of the weight sync", x="step", y="GB/s",
        series=_lines(rows, {"transfer_gb_per_s": "export, transfer and load, engine's caches included"}),
    )  # fmt: skip
    yield Chart(
        title="Memory", x="step", y="GiB", series=_lines(rows, {"peak_memory_gib": "peak of rank 0 so far"}),
    )  # fmt: skip


def _by_position(rows: Sequence[Row]) -> Iterator[Chart]:
    """The last step that sampled beside the first, eighth by eighth of the longest allowed answer."""
    known = [row for row in rows if isinstance(row.get("mismatch_by_position"), list)]
    if not known:
        return
    series = []
    for colour, row in enumerate(dict.fromkeys((0, len(known) - 1))):
        values = known[row]["mismatch_by_position"]
        points = tuple((place + 1.0, value) for place, value in enumerate(values) if isinstance(value, float))
        series.append(Series(name=f"step {known[row].get('step', '?')}", points=points, colour=colour))
    yield Chart(
        title="Mismatch by position", x="eighth of the longest answer", y="nats", log=True,
        names={place + 1.0: str(place + 1) for place in range(8)}, series=tuple(series),
    )  # fmt: skip


def _lines(rows: Sequence[Row], names: Mapping[str, str]) -> tuple[Series, ...]:
    known = [(key, name) for key, name in names.items() if any(_number(row, key) is not None for row in rows)]
    return tuple(
        Series(name=name, points=_points(rows, key), colour=colour) for colour, (key, name) in enumerate(known)
    )


def _points(rows: Sequence[Row], key: str) -> tuple[tuple[float, float], ...]:
    pairs = [(_number(row, "step"), _number(row, key)) for row in rows]
    return tuple((step, value) for step, value in pairs if step is not None and value is not None)


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
