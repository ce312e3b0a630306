"""Charts as inline SVG without script: dots and lines over one pair of axes, coloured by the page's style sheet.

By hand, since charts of plotly need a script to be read, and colours of matplotlib do not follow the page's scheme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

import numpy as np

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core import ragged
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.logprob.checks_logprobs import bounds_of
from verifier.stages.logprob.records import DtypeNoise, OracleLogprobs, StoredFloor, TrainerLogprobs
from verifier.stages.loss.checks_gradients import gradient_differs_from_oracle
from verifier.stages.loss.records import GradientRecord
from verifier.stages.rollout.records import EngineLogprobs

WIDTH, HEIGHT = 420, 250
"""Units of the drawing; text is 11 of them high, so that a phone of 390 pixels shows it at 10."""
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 38
MAX_DOTS = 1500
"""Dots of one series; those that are farthest from the diagonal or highest stay, as the chart's note says."""
_TICKS = 5
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points that belong together."""

    name: str
    points: tuple[Point, ...]
    kind: Literal["dots", "line", "bound", "bars"] = "line"
    """"bound": dashed, what is allowed or a noise floor; "bars" stand on each other, series by series."""
    colour: int = 0
    """Colour of the style sheet, 0 to 4; 4 is that of a violation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart; points that are not finite, or not above 0 on a logarithmic axis, are left out and counted."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    note: str = ""
    log: bool = False
    """The y axis is logarithmic."""
    names: dict[float, str] | None = None
    """Names of places on the x axis, instead of numbers."""

    @property
    def num_left_out(self) -> int:
        """Points that the chart cannot show."""
        return sum(not _shown(point, self.log) for series in self.series for point in series.points)

    @property
    def legend(self) -> tuple[Series, ...]:
        """Series with points."""
        return tuple(item for item in self.series if any(_shown(point, self.log) for point in item.points))


def _shown(point: Point, log: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and (not log or point[1] > 0)


def thinned(points: Sequence[Point], weight: Callable[[Point], float]) -> tuple[Point, ...]:
    """At most MAX_DOTS points: the half with the greatest weights, and every n-th of the others."""
    if len(points) <= MAX_DOTS:
        return tuple(points)
    order = sorted(points, key=weight, reverse=True)
    kept, others = order[: MAX_DOTS // 2], order[MAX_DOTS // 2 :]
    return (*kept, *others[:: math.ceil(len(others) / (MAX_DOTS // 2))])


def svg(chart: Chart) -> str:
    """The drawing; empty where there is nothing to draw. Every text in it is escaped."""
    series = [(item, [point for point in item.points if _shown(point, chart.log)]) for item in chart.series]
    series = _stacked([(item, points) for item, points in series if points])
    if not series:
        return ""
    root = ElementTree.Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    root.set("aria-label", chart.title)
    heights = [point[1] for _, points in series for point in points]
    if any(item.kind == "bars" for item, _ in series):
        heights.append(0.0)
    along = [point[0] for _, points in series for point in points] + list(chart.names or ())
    across = _Axis.over(along, LEFT, WIDTH - RIGHT)
    up = _Axis.over(heights, HEIGHT - BOTTOM, TOP, log=chart.log)
    _draw_axes(root, chart, across, up)
    for item, points in reversed(series):  # so that the first of several bars, the lowest, lies on top
        places = [(across.at(x), up.at(y)) for x, y in points]
        named = {"class": f"{item.kind} c{item.colour}", "d": _path(item, places, up)}
        if item.kind == "bars":
            named["stroke-width"] = f"{min(24.0, 0.6 * (WIDTH - LEFT - RIGHT) / len(places)):.1f}"
        marks = ElementTree.SubElement(root, "path", named)
        ElementTree.SubElement(marks, "title").text = item.name
    return ElementTree.tostring(root, encoding="unicode")


def _stacked(series: list[tuple[Series, list[Point]]]) -> list[tuple[Series, list[Point]]]:
    ground: dict[float, float] = {}
    found = []
    for item, points in series:
        if item.kind == "bars":
            for x, y in points:
                ground[x] = ground.get(x, 0.0) + y
            points = [(x, ground[x]) for x, _ in points]
        found.append((item, points))
    return found


def _path(item: Series, places: Sequence[Point], up: _Axis) -> str:
    if item.kind == "dots":  # lines of no length with round ends are dots
        return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    if item.kind == "bars":
        return "".join(f"M{x:.1f} {up.start}V{y:.1f}" for x, y in places)
    if len(places) == 1:
        return f"M{places[0][0] - 4:.1f} {places[0][1]:.1f}h8"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Values to units of the drawing."""

    least: float
    most: float
    start: float
    end: float
    log: bool
    whole: bool
    """All values are whole numbers, so the ticks are."""

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> _Axis:
        scaled = [math.log10(value) for value in values] if log else list(values)
        least, most = min(scaled), max(scaled)
        if log:
            least, most = math.floor(least), max(math.ceil(most), math.floor(least) + 1)
        else:
            gap = (most - least) * 0.04 or abs(most) * 0.1 or 1.0
            least, most = (0.0 if least == 0 else least - gap), most + gap
        return cls(
            least=least, most=most, start=start, end=end, log=log, whole=all(value == int(value) for value in values)
        )

    def at(self, value: float) -> float:
        scaled = math.log10(value) if self.log else value
        return self.start + (scaled - self.least) / (self.most - self.least) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            every = max(1, math.ceil((self.most - self.least) / _TICKS))
            return [10.0**power for power in range(int(self.least), int(self.most) + 1, every)]
        rough = (self.most - self.least) / _TICKS
        size = 10.0 ** math.floor(math.log10(rough))
        step = next((size * times for times in (1, 2, 5) if size * times >= rough), size * 10)
        if self.whole:
            step = max(1, math.ceil(step))
        return [step * number for number in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def _draw_axes(root: ElementTree.Element, chart: Chart, across: _Axis, up: _Axis) -> None:
    for value in up.ticks():
        y = f"{up.at(value):.1f}"
        ElementTree.SubElement(root, "path", {"class": "grid", "d": f"M{LEFT} {y}H{WIDTH - RIGHT}"})
        _text(root, LEFT - 5, y, _number(value), "end", dy="3.5")
    named = chart.names
    places = across.ticks() if named is None else sorted(named)
    every = max(1, math.ceil(len(places) / 12))
    for value in places[::every]:
        name = _number(value) if named is None else named[value]
        _text(root, f"{across.at(value):.1f}", HEIGHT - BOTTOM + 14, name, "middle")
    _text(root, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.x, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    _text(root, 11, middle, chart.y, "middle", transform=f"rotate(-90 11 {middle})")


def _text(root: ElementTree.Element, x: object, y: object, text: str, anchor: str, **more: str) -> None:
    given = {"x": str(x), "y": str(y), "text-anchor": anchor} | more
    element = ElementTree.SubElement(root, "text", given)
    element.text = text


def _number(value: float) -> str:
    return "0" if abs(value) < 1e-12 else f"{value:.6g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.0e}"


EIGHTHS = 8
"""Parts of the longest sequence in the chart of positions."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens that trainer and engine scored by the same weights."""

    name: str
    version: int
    lengths: tuple[int, ...]
    trainer: np.ndarray
    """[tokens] float64, nats."""
    engine: np.ndarray
    """[tokens] float64, nats."""
    allowed: np.ndarray
    """[tokens] float64, nats: what the bounds of both sides against the oracle come to; infinite without any."""
    noise: float | None
    """Mean noise of the dtype on such tokens, nats, where it was measured."""

    @property
    def gaps(self) -> np.ndarray:
        """Magnitudes of the differences, [tokens] float64, nats."""
        return np.abs(self.trainer - self.engine)


def scored(trace: Trace) -> list[Scored]:
    """Every scoring that both sides made, by version."""
    found = []
    for left in trace.of(TrainerLogprobs):
        right = next(trace.of(EngineLogprobs, name=left.name, version=left.version), None)
        if right is None or right.lengths != left.lengths or left.temperature != 1.0:
            continue
        sides = [trace.array(item).astype(np.float64) for item in (left, right)]
        if any(side.size != sum(left.lengths) for side in sides):
            continue
        found.append(
            Scored(
                name=left.name, version=left.version, lengths=left.lengths, trainer=sides[0], engine=sides[1],
                allowed=_allowed(trace, (left, right)), noise=_noise(trace, left),
            )
        )  # fmt: skip
    return sorted(found, key=lambda item: item.version)


def _allowed(trace: Trace, sides: Sequence[TrainerLogprobs | EngineLogprobs]) -> np.ndarray:
    lengths = sides[0].lengths
    total = np.zeros(sum(lengths))
    for side in sides:
        oracle = next(trace.of(OracleLogprobs, name=side.name, version=side.version), None)
        whole = () if oracle is None else oracle.whole
        try:
            bounds = bounds_of(trace, side.stage, side.name, side.version, lengths, whole)
        except LookupError:  # no noise was measured, so nothing is known to be allowed
            return np.full(sum(lengths), math.inf)
        total += np.repeat([bound.absolute for bound in bounds.greatest], lengths)
    return total


def _noise(trace: Trace, side: Record) -> float | None:
    floors = sorted(trace.of(StoredFloor), key=lambda item: item.longest)
    measured = [*trace.of(DtypeNoise, name=side.name, version=side.version), *trace.of(DtypeNoise, version=0)]
    found = floors[-1:] or measured[:1]
    return float(found[0].mean) if found else None


def charts_of(trace: Trace) -> tuple[Chart, ...]:
    """All charts that the trace has evidence for."""
    found = scored(trace)
    return (*_of_scored(found), *_of_gradients(trace)) if found else tuple(_of_gradients(trace))


def measures_of(trace: Trace) -> dict[str, float]:
    """Numbers of a trace that two runs can be compared by, by their names with units."""
    found = {}
    for item in scored(trace):
        if item.gaps.size:
            of = f"trainer against engine, `{item.name}`, version {item.version}"
            found[f"{of}: mean, nats"] = float(item.gaps.mean())
            found[f"{of}: greatest, nats"] = float(item.gaps.max())
    for _, version, ratio in _gradient_ratios(trace):
        gap = f"greatest gradient gap of version {version}, times the bound"
        found[gap] = max(found.get(gap, 0.0), ratio)
    return found


def _of_scored(found: Sequence[Scored]) -> Iterator[Chart]:
    left, right = (np.concatenate([getattr(item, name) for item in found]) for name in ("engine", "trainer"))
    allowed = np.concatenate([item.allowed for item in found])
    finite = np.isfinite(left) & np.isfinite(right)
    beyond = ~(np.abs(left - right) <= allowed)
    pairs = [
        [(float(x), float(y)) for x, y in zip(left[mask], right[mask], strict=True)]
        for mask in (finite & ~beyond, finite & beyond)
    ]
    dots = [thinned(points, lambda point: abs(point[0] - point[1])) for points in pairs]
    if not any(dots):
        return
    ends = (float(left[finite].min()), float(left[finite].max()))
    bounded = bool(np.isfinite(allowed).any())
    note = f"{left.size:,} tokens of {len(found):,} scorings" + ("" if bounded else "; no bound was recorded")
    if left.size > sum(map(len, dots)):
        note += f"; {sum(map(len, dots)):,} are drawn, those that differ most among them"
    yield Chart(
        title="Log-probabilities of trainer and engine", x="engine, nats", y="trainer, nats", note=note,
        series=(
            Series(name="tokens", points=dots[0], kind="dots"),
            Series(name="beyond what both sides may differ by", points=dots[1], kind="dots", colour=4),
            Series(name="equal", points=tuple((end, end) for end in ends), kind="bound", colour=3),
        ),
    )  # fmt: skip
    yield _by_position(found)
    yield _by_version(found)


def _by_position(found: Sequence[Scored]) -> Chart:
    longest = max((length for item in found for length in item.lengths), default=1) or 1
    bins: list[list[float]] = [[] for _ in range(EIGHTHS)]
    for item in found:
        for row in ragged.split(item.gaps, item.lengths):
            for position, gap in enumerate(row):
                bins[position * EIGHTHS // longest].append(float(gap))
    places = [(number + 0.5) * longest / EIGHTHS for number in range(EIGHTHS)]
    kept = [(place, [gap for gap in gaps if math.isfinite(gap)]) for place, gaps in zip(places, bins, strict=True)]
    known = [(place, gaps) for place, gaps in kept if gaps]
    mean = tuple((place, sum(gaps) / len(gaps)) for place, gaps in known)
    greatest = tuple((place, max(gaps)) for place, gaps in known)
    return Chart(
        title="Mismatch by position", x="position in the sequence", y="nats", log=True,
        note="each point is an eighth of the longest sequence, all versions together",
        series=(
            Series(name="mean", points=mean), Series(name="greatest", points=greatest, colour=1),
            *_floors(found, (0.0, float(longest))),
        ),
    )  # fmt: skip


def _by_version(found: Sequence[Scored]) -> Chart:
    versions = sorted({item.version for item in found})
    gaps = {version: np.concatenate([item.gaps for item in found if item.version == version]) for version in versions}
    known = [(float(version), values[np.isfinite(values)]) for version, values in gaps.items()]
    known = [(version, values) for version, values in known if values.size]
    ends = (versions[0] - 0.3, versions[-1] + 0.3)
    return Chart(
        title="Mismatch by weight version", x="version", y="nats", log=True,
        names={float(version): str(version) for version in versions},
        series=(
            Series(name="mean", points=tuple((version, float(values.mean())) for version, values in known)),
            Series(name="greatest", points=tuple((version, values.max()) for version, values in known), colour=1),
            *_floors(found, ends),
        ),
    )  # fmt: skip


def _floors(found: Sequence[Scored], ends: Point) -> Iterator[Series]:
    noises = [item.noise for item in found if item.noise is not None]
    allowed = [float(value) for item in found for value in item.allowed if math.isfinite(value)]
    for name, values, colour in (("noise floor, mean", noises, 2), ("allowed of one token", allowed, 3)):
        if values:
            yield Series(name=name, points=tuple((end, max(values)) for end in ends), kind="bound", colour=colour)


def _gradient_ratios(trace: Trace) -> Iterator[tuple[str, int, float]]:
    """Name, version, and gap in units of what LSS001 allows, of every tensor's gradient."""
    if trace.has(GradientRecord):
        for item in gradient_differs_from_oracle(trace):
            if not item.what.endswith("(length)"):
                yield item.what, item.version, item.severity


def _of_gradients(trace: Trace) -> Iterator[Chart]:
    rows = list(_gradient_ratios(trace))
    if not rows:
        return
    layers = sorted({int(layer[1]) for name, _, _ in rows if (layer := _LAYER.search(name))})
    rest = float(layers[-1] + 1 if layers else 0)
    names = {**{float(layer): str(layer) for layer in layers}, rest: "others"}
    inside: list[Point] = []
    beyond: list[Point] = []
    for name, _, ratio in rows:
        layer = _LAYER.search(name)
        (beyond if ratio > 1 else inside).append((float(layer[1]) if layer else rest, ratio))
    dots = [thinned(points, lambda point: point[1]) for points in (inside, beyond)]
    note = f"{len(rows):,} gradients of {len({version for _, version, _ in rows}):,} versions"
    yield Chart(
        title="Gradients by layer", x="layer", y="gap / allowed", log=True, names=names, note=note,
        series=(
            Series(name="tensors", points=dots[0], kind="dots"),
            Series(name="beyond what is allowed", points=dots[1], kind="dots", colour=4),
            Series(name="allowed", points=((min(names) - 0.3, 1.0), (rest + 0.3, 1.0)), kind="bound", colour=3),
        ),
    )  # fmt: skip
