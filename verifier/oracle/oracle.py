"""The independent oracle's process: transformers, which no patch of ours touches, asked through a client."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verifier.core.stage import Stage, in_stage
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess

REMEMBERED_BYTES = 64 * 2**20
"""Largest folder of weights whose content is recognised, so that what was answered of it is answered again."""
Scored = list[list[float]]
"""Per sequence its log-probabilities, nats."""


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
        temperature: float | Sequence[float] = 1.0, routes: Sequence[Any] = (),
    ) -> Sides:  # fmt: skip
        """Score in float32, and beside it in a run's dtype, or in float64 where that is float32 itself."""
        if dtype == "float32":
            tokens = [list(sequence) for sequence in sequences]
            asked = (tokens, "float64", device, temperature, routes)
            return Sides(*self.ask("logprob_hf:sides", [checkpoint], *asked)[0])
        told = (device, temperature, routes)
        exact, other = (self.score(checkpoint, sequences, each, *told) for each in ("float32", dtype))
        return Sides(exact, other, [[]] * len(exact))

    def describe(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str, device: str, temperature: float,
        routes: Sequence[Any], ends: Sequence[int],
    ) -> tuple[Sides, Sides, Sides]:  # fmt: skip
        """Log-probabilities as `score_twice` has them, probabilities of end tokens, and entropies."""
        tokens = [list(sequence) for sequence in sequences]
        other = "float64" if dtype == "float32" else dtype
        asked = (tokens, other, device, temperature, routes, ends)
        nats, shares, entropies = self.ask("logprob_hf:sides", [checkpoint], *asked)
        return Sides(*nats), Sides(*shares), Sides(*entropies)

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
