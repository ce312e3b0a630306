"""Charts as inline SVG without script: dots and lines over one pair of axes, coloured by the page's style sheet.

By hand, since plotly's charts need its script to be read, and matplotlib's colours do not follow the page's scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

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
    """Bars on top of those before them; other series as they are."""
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
