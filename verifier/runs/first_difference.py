"""The first module whose values differ from the oracle's, or from another run's: in the order of the data flow.

Forward first, in the pass that scores and then in the one with gradients; then gradients from the loss back to the
embedding; then the gradients of weights. Each is looked at only where what comes before it is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verifier.core.check import Tolerance, Trace
from verifier.core.record import Measurement
from verifier.stages.logprob.records import Activation, ActivationRecord, PointsLeftOut
from verifier.stages.loss.records import ActivationGradient, GradientRecord

FORWARD = Tolerance(
    absolute=3e-5, unit="of a token's greatest",
    source="fp32 on CPU: both agree to 8.7e-6 in 12 clean runs of 8 tiny models, and known bugs are of 6.4e-4 and more",
)  # fmt: skip
BACKWARD = Tolerance(
    absolute=3e-5, unit="of a point's greatest",
    source="as LSS001; gradients of both agree to 3.3e-6 in 12 clean runs of 8 tiny models",
)  # fmt: skip
NATS = ("logprob", "entropy")
"""Points behind the model, whose values are nats: what is below 1 may be off as 1 is."""
WEIGHTS = Tolerance(absolute=3e-5, unit="of a tensor's greatest", source="as LSS001")
SAME_FACTOR = 1e-3
"""Share by which the quotients of gradients may differ that are wrong by one factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element that differs."""

    rank: int
    coordinate: str
    sequence: int
    position: int
    channel: int
    value: float
    expected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PointCompared:
    """One point in one pass and direction."""

    name: str
    """Whole name of the point, or of a weight."""
    part: str
    """"score", "train", "backward" or "weight"."""
    greatest: float
    """Greatest difference; infinite if something is missing or not finite."""
    ratio: float
    """The same in units of what `Tolerance` speaks of."""
    allowed: Tolerance
    tokens: int
    off: int
    """Tokens that differ."""
    missing: int = 0
    """Tokens that no rank has."""
    place: WrongElement | None = None
    """The first token that differs, and its channel that differs most."""
    index: tuple[int, ...] = ()
    """The element of a weight that differs most."""
    rank: int | None = None
    coordinate: str = ""
    tokens_off: frozenset[tuple[int, int]] = frozenset()
    """Sequence and position of each token that differs."""
    factor: float = 1.0
    """Length of a weight's gradient along the right one, in units of that one's."""

    @property
    def differs(self) -> bool:
        """True beyond what is allowed."""
        return bool(self.missing or not self.ratio <= self.allowed.absolute)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """Everything that was compared, and what of it differs first."""

    points: tuple[PointCompared, ...]
    """Everything that was compared, in the order in which it was looked at."""
    left_out: tuple[str, ...]
    """Points that one side alone has."""
    weights_compared: bool
    experts: tuple[int, ...] = ()
    """Experts whose tokens are all those that differ, where a mixture's output differs first."""

    @property
    def first(self) -> PointCompared | None:
        """The first that differs."""
        return next((point for point in self.points if point.differs), None)

    @property
    def same_part(self) -> tuple[PointCompared, ...]:
        """Everything of the part in which the first difference lies."""
        return () if self.first is None else tuple(item for item in self.points if item.part == self.first.part)

    @property
    def same_factor(self) -> float | None:
        """Factor by which the gradients of all weights are wrong; None where they have none in common."""
        factors = [item.factor for item in self.same_part if item.ratio]
        alike = bool(factors) and max(factors) - min(factors) <= SAME_FACTOR * abs(factors[0])
        return factors[0] if alike else None

    @property
    def reader(self) -> PointCompared | None:
        """The last output whose gradient is right, if there is one: it reads the first whose is wrong."""
        same = self.same_part
        at = same.index(self.first) if self.first is not None else 0
        return same[at - 1] if at else None

    @property
    def agreed(self) -> float:
        """Greatest difference, in units of the bound's, of what comes before the first difference."""
        before = self.points if self.first is None else self.points[: self.points.index(self.first)]
        return max((item.ratio for item in before), default=0.0)


def first_difference(trace: Trace, other: Trace | None = None) -> FirstDifference:
    """Compare a run's values with the oracle's, or, if there is one, with those of another run."""
    points: list[PointCompared] = []
    left = {name for item in trace.of(PointsLeftOut) for name in item.points}
    for part, kind, allowed in (
        ("score", Activation, FORWARD), ("train", Activation, FORWARD), ("backward", ActivationGradient, BACKWARD)
    ):  # fmt: skip
        step = "score" if part == "score" else "train"
        ours = _by_name(trace.of(kind, role="trainer", step=step))
        role, known = ("oracle", "train") if other is None else ("trainer", step)
        theirs = _by_name((other or trace).of(kind, role=role, step=known))
        both = sorted(ours.keys() & theirs.keys(), key=lambda name: ours[name][0].order, reverse=part == "backward")
        moved = {} if part == "backward" else _by_name(trace.of(kind, role="oracle", step="moved"))
        points += [
            _compared(part, allowed, ours[name], trace, theirs[name], other or trace, moved.get(name, ()))
            for name in both
        ]
        if part != "score":
            left |= ours.keys() ^ theirs.keys()
    weights = [] if other else list(_weights(trace))
    found = FirstDifference(
        points=(*points, *weights), left_out=tuple(sorted(left)), weights_compared=bool(weights)
    )  # fmt: skip
    return replace(found, experts=_experts(trace, found.first))


def _experts(trace: Trace, first: PointCompared | None) -> tuple[int, ...]:
    """Experts that were chosen for every token that differs at a mixture's output, and for no other."""
    if first is None or not first.name.endswith(".mlp.experts") or first.part not in ("score", "train"):
        return ()
    router = first.name.removesuffix("experts") + "router"
    record = next((item for item in trace.of(Activation, role="oracle", name=router, step="train")), None)
    if record is None:
        return ()
    arrays = trace.arrays(record)
    tokens = zip(arrays["sequence"].tolist(), arrays["position"].tolist(), strict=True)
    off = np.array([token in first.tokens_off for token in tokens])
    chosen = arrays["values"] != 0
    return tuple(np.flatnonzero((chosen == off[:, None]).all(axis=0)).tolist())


def _by_name(records: Iterator[ActivationRecord]) -> dict[str, list[ActivationRecord]]:
    found: dict[str, list[ActivationRecord]] = {}
    for record in records:
        found.setdefault(record.name, []).append(record)
    return found


def _joined(records: Sequence[ActivationRecord], trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """[sequences, positions] index of each token's row, -1 where there is none; [N, W] values, NaN where nobody has."""
    parts = [trace.arrays(record) for record in records]
    sequence = max((int(part["sequence"].max(initial=-1)) for part in parts), default=-1) + 1
    position = max((int(part["position"].max(initial=-1)) for part in parts), default=-1) + 1
    width = max(int(part["columns"].max(initial=-1)) for part in parts) + 1
    rows = np.full((sequence, position), -1)
    for part in parts:
        rows[part["sequence"], part["position"]] = 0
    rows[rows == 0] = np.arange(int((rows == 0).sum()))
    values = np.full((int((rows >= 0).sum()), width), np.nan, np.float64)
    for _, part in sorted(zip(records, parts, strict=True), key=lambda pair: -pair[0].rank):
        values[np.ix_(rows[part["sequence"], part["position"]], part["columns"])] = part["values"]
    return rows, values


def _compared(
    part: str, allowed: Tolerance, ours: Sequence[ActivationRecord], trace: Trace,
    theirs: Sequence[ActivationRecord], other: Trace, moved: Sequence[ActivationRecord] = (),
) -> PointCompared:  # fmt: skip
    """One point: each rank's own part against the whole of the other side, a row that is `moved` by more within that.

    The norm of a gated delta net divides by the length of a state that may be nearly empty, and so enlarges rounding.
    """
    rows, expected = _joined(theirs, other)
    if part == "backward":
        scale = np.full(len(expected), np.nanmax(np.abs(expected), initial=0.0))
    else:
        scale = np.nanmax(np.abs(expected), axis=1, initial=0.0)
    scale = np.maximum(scale, 1.0) if ours[0].name in NATS and part != "backward" else np.where(scale > 0, scale, 1.0)
    if moved:
        tokens, by = _joined(moved, trace)
        scale = np.maximum(scale, by[:, 0] / allowed.absolute) if np.array_equal(tokens, rows) else scale
    seen, off = np.zeros(len(expected), bool), np.zeros(len(expected), bool)
    greatest = ratio = 0.0
    first: tuple[int, int, WrongElement] | None = None
    for record in sorted(ours, key=lambda item: item.rank):
        arrays = trace.arrays(record)
        sequence, position = arrays["sequence"], arrays["position"]
        known = (sequence >= 0) & (sequence < rows.shape[0]) & (position < rows.shape[1])
        known[known] = rows[sequence[known], position[known]] >= 0
        columns = arrays["columns"] < expected.shape[1]
        at = rows[sequence[known], position[known]]
        seen[at] = True
        actual = arrays["values"][known][:, columns].astype(np.float64)
        right = expected[np.ix_(at, arrays["columns"][columns])]
        if not actual.size:
            continue
        gap = np.abs(actual - right)
        gap[~np.isfinite(gap)] = np.inf
        shares = gap.max(axis=1) / scale[at]
        greatest, ratio = max(greatest, float(gap.max())), max(ratio, float(shares.max()))
        wrong = np.flatnonzero(shares > allowed.absolute)
        off[at[wrong]] = True
        if len(wrong):
            row = min(wrong, key=lambda one: (sequence[known][one], position[known][one]))
            channel = int(gap[row].argmax())
            place = WrongElement(
                rank=record.rank, coordinate=record.coordinate, sequence=int(sequence[known][row]),
                position=int(position[known][row]), channel=int(arrays["columns"][columns][channel]),
                value=float(actual[row, channel]), expected=float(right[row, channel]),
            )  # fmt: skip
            if first is None or (place.sequence, place.position) < first[:2]:
                first = (place.sequence, place.position, place)
    missing = int((~seen).sum())
    tokens_off = {(int(one), int(two)) for one, two in np.argwhere(rows >= 0) if off[rows[one, two]]}
    return PointCompared(
        name=ours[0].name, part=part, greatest=greatest, ratio=ratio, allowed=allowed, tokens=len(expected),
        off=int(off.sum()), missing=missing, place=None if first is None else first[2],
        tokens_off=frozenset(tokens_off),
    )  # fmt: skip


def _weights(trace: Trace) -> Iterator[PointCompared]:
    for record in sorted(trace.of(GradientRecord), key=lambda item: _flow(item.name)):
        gap: Measurement | None = record.gradient
        scale = float(record.gradient_scale)
        value = float(gap.value) if gap is not None else float("inf")
        yield PointCompared(
            name=record.name, part="weight", greatest=value, ratio=value / (scale or 1.0), allowed=WEIGHTS, tokens=0,
            off=0, index=() if gap is None else gap.index, rank=None if gap is None else gap.rank,
            coordinate="" if gap is None else gap.coordinate, factor=float(record.group_length),
        )  # fmt: skip


def _flow(name: str) -> tuple[int, int, str]:
    """Place of a checkpoint's tensor in the data flow: embedding, layers by number, the rest."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return (0 if "embed" in name else 1 << 30), int(name.startswith("lm_head")), name
    within = name[layer.end() :]
    order = ("input_layernorm", "norm", "self_attn", "mixer", "post_attention_layernorm", "mlp")
    return int(layer[1]) + 1, next((at for at, one in enumerate(order) if within.startswith(one)), 9), name
