"""The independent oracle's process: transformers, which no patch of ours touches, asked through a client."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verifier.core.stage import Stage, in_stage
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess
from verifier.stages.logprob.records import ROUNDINGS

REMEMBERED_BYTES = 64 * 2**20
"""Largest folder of weights whose content is recognised, so that what was answered of it is answered again."""
DRAWS = 6
"""Passes in float32 that tell the scale of rounding where it matters. Where one direction dominates, each is one
number; were they normal and independent, two right sides would differ by more than `ROUNDINGS` times the greatest with
a chance of 3e-5, of 9e-2 with one (ADR 0080). They share a part."""
NEAR = ROUNDINGS / 3
"""Scales of one pass within which a log-probability lies far inside of its bound, so that no further pass is needed."""
UNROUNDED = 1.0
"""Nats that no rounding of float32 explains: a sequence gets no further passes for what is off by more."""
Scored = list[list[float]]
"""Per sequence its log-probabilities, nats."""
Reported = Sequence[Sequence[np.ndarray]]
"""Per sequence what each of others gave its last tokens, nats; NaN where nothing."""


class Sides(NamedTuple):
    """The same sequences in two dtypes."""

    exact: Scored
    """In float32."""
    other: Scored
    scales: Scored
    """See `verifier.oracle.logprob_hf.sides`; rows are empty where the other is less than float32."""


class Oracle:
    """Computes with any checkpoint directory. The same question of the same small weights is computed once.

    Args:
        checkpoint: any directory that transformers loads; the process starts with it.
        deadline_s: for the start and for each request.
        start: starts the process.
    """

    def __init__(
        self, checkpoint: Path, deadline_s: float, start: Callable[..., EngineProcess] = EngineProcess
    ) -> None:
        config = EngineConfig(kind="hf", checkpoint=str(checkpoint), dtype="float32")
        self.answers: dict[str, str] = {}
        """Question -> answer, of those that are known again."""
        with contextlib.ExitStack() as started:
            self.process = started.enter_context(start(config, name="the fp32 oracle"))
            self._client = self.process.client(deadline_s=deadline_s)
            started.callback(self._client.close)
            self._started = started.pop_all()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()

    def score(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str = "float32", device: str = "cpu",
        temperature: float | Sequence[float] = 1.0, routes: Sequence[Any] = (),
    ) -> Scored:  # fmt: skip
        """See `verifier.oracle.logprob_hf.score`."""
        tokens = [list(sequence) for sequence in sequences]
        return self.ask("logprob_hf:score", [checkpoint], tokens, dtype, device, temperature, routes)

    def score_twice(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu",
        temperature: float | Sequence[float] = 1.0, routes: Sequence[Any] = (), reported: Reported = (),
    ) -> Sides:  # fmt: skip
        """Score in float32, and beside it in a run's dtype, or in float64 where that is float32 itself.

        With `reported`, a scale of rounding is that of one pass; of `DRAWS` in each sequence with a reported
        log-probability that is not `NEAR`. Without, of `DRAWS` everywhere.
        """
        told = (device, temperature, routes)
        if dtype == "float32":
            found = Sides(*self._sides(checkpoint, sequences, "float64", *told, draws=1 if reported else DRAWS)[0])
            return self._drawn_again(found, checkpoint, sequences, told, reported)
        exact, other = (self.score(checkpoint, sequences, each, *told) for each in ("float32", dtype))
        return Sides(exact, other, [[]] * len(exact))

    def describe(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str, device: str, temperature: float,
        routes: Sequence[Any], ends: Sequence[int], reported: Reported = (),
    ) -> tuple[Sides, Sides, Sides]:  # fmt: skip
        """Log-probabilities as `score_twice` has them with `reported`, probabilities of end tokens, and entropies."""
        other, told = "float64" if dtype == "float32" else dtype, (device, temperature, routes)
        nats, shares, entropies = self._sides(checkpoint, sequences, other, *told, ends=ends)
        found = self._drawn_again(Sides(*nats), checkpoint, sequences, told, reported)
        return found, Sides(*shares), Sides(*entropies)

    def _sides(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str, device: str,
        temperature: float | Sequence[float], routes: Sequence[Any], ends: Sequence[int] | None = None, draws: int = 1,
    ) -> Any:  # fmt: skip
        """See `verifier.oracle.logprob_hf.sides`."""
        tokens = [list(sequence) for sequence in sequences]
        return self.ask("logprob_hf:sides", [checkpoint], tokens, dtype, device, temperature, routes, ends, draws)

    def _drawn_again(
        self, found: Sides, checkpoint: Path, sequences: Sequence[Sequence[int]], told: tuple[str, Any, Sequence[Any]],
        reported: Reported,
    ) -> Sides:  # fmt: skip
        """The same, with scales of `DRAWS` passes in sequences whose reported log-probabilities are not all near."""
        if not any(found.scales) or not (places := _not_near(found, reported)):
            return found
        device, temperature, routes = told
        own = temperature if isinstance(temperature, (int, float)) else [temperature[at] for at in places]
        chosen = [routes[at] for at in places] if any(routes) else []
        asked = (checkpoint, [sequences[at] for at in places], "float64", device, own, chosen)
        again = Sides(*self._sides(*asked, draws=DRAWS)[0])
        scales = dict(zip(places, again.scales, strict=True))
        return found._replace(scales=[scales.get(at, row) for at, row in enumerate(found.scales)])

    def ask(self, function: str, paths: Sequence[Path], *arguments: Any, read: Sequence[Path] = ()) -> Any:
        """Ask, unless the same was asked before.

        Args:
            function: module of this room, colon, function.
            paths: its first arguments, folders.
            arguments: its others, JSON values.
            read: folders whose content the answer depends on; `paths` by default.
        """
        contents = [_content(folder) for folder in read or paths]
        known = None not in contents
        key = hashlib.blake2b(json.dumps([function, contents, arguments]).encode()).hexdigest() if known else ""
        if key in self.answers:
            return json.loads(self.answers[key])
        with in_stage(Stage.LOGPROB):
            found = self._client.call(f"verifier.oracle.{function}", *map(str, paths), *arguments)[0]
        if known:
            self.answers[key] = json.dumps(found)
        return found


def _content(folder: Path) -> str | None:
    """Digest of the names and contents of a folder's files; None if they are too large."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if sum(path.stat().st_size for path in files) > REMEMBERED_BYTES:
        return None
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(f"{folder.name} {path.name} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _not_near(found: Sides, reported: Reported) -> list[int]:
    """Sequences with a reported log-probability that one pass does not show to be far inside of its bound."""
    places = []
    for at, rows in enumerate(reported):
        exact, near = np.array(found.exact[at]), NEAR * max(found.scales[at], default=0.0)
        counts = (min(len(row), len(exact)) for row in rows)
        gaps = [
            np.abs(row[len(row) - count :] - exact[len(exact) - count :])
            for row, count in zip(rows, counts, strict=True)
        ]
        if any(((gap > near) & (gap < UNROUNDED)).any() for gap in gaps):
            places.append(at)
    return places
