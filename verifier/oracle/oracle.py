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
from verifier.errors import UsageError, VerifierError
from verifier.megatron.memory import is_out_of_memory
from verifier.stages.logprob.records import ROUNDINGS

REMEMBERED_BYTES = 64 * 2**20
"""Largest folder of weights whose content is recognised, so that what was answered of it is answered again."""
DRAWS = 6
"""Passes in float32 that tell the scale of rounding where it matters. Where one direction dominates, each is one
number; were they normal and independent, two right sides would differ by more than `ROUNDINGS` times the greatest with
a chance of 3e-5, of 9e-2 with one (ADR 0080). They share a part."""
NEAR = ROUNDINGS / 3
"""Times the greatest scale so far within which a log-probability lies far inside of its bound: no further pass is
needed."""
UNROUNDED = 1.0
"""Nats that no rounding of float32 explains: a sequence gets no further passes for what is off by more."""
Scored = list[list[float]]
"""Per sequence its log-probabilities, nats."""
Reported = Sequence[Sequence[Any]]
"""Per sequence what each of others gave its last tokens, [N] nats; NaN where nothing."""


class Sides(NamedTuple):
    """The same sequences in two dtypes."""

    exact: Scored
    """In float32."""
    other: Scored
    scales: Scored
    """See `verifier.oracle.logprob_hf.sides`; rows are empty where the other is less than float32."""


class OracleMemoryError(UsageError):
    """The oracle has too little memory for what it is asked."""


class Oracle(contextlib.AbstractContextManager["Oracle"]):
    """Computes with any checkpoint directory. The same question of the same small weights is computed once.

    The process starts with `checkpoint`; `deadline_s` is for the start and for each request.
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

    def __exit__(self, *error: object) -> None:
        self._started.close()

    def score(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str = "float32", device: str = "cpu",
        temperature: float | Sequence[float] = 1.0, routes: Sequence[Any] = (),
    ) -> Scored:  # fmt: skip
        """See `verifier.oracle.logprob_hf.score`."""
        tokens = [list(sequence) for sequence in sequences]
        return self.ask("logprob_hf:score", [checkpoint], tokens, dtype, device, temperature, routes)

    def sides(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu", *,
        temperature: float | Sequence[float] = 1.0, routes: Sequence[Any] = (), ends: Sequence[int] | None = None,
        reported: Reported | None = None, sampled: Sequence[int] = (), margin: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Score in float32, and beside it in a run's dtype, or in float64 where that is float32 itself.

        Returns:
            What `verifier.oracle.logprob_hf.sides` does, all but the columns of `OracleOfPlaces` as `Sides`.
        """
        tokens, other = [list(sequence) for sequence in sequences], "float64" if dtype == "float32" else dtype
        rows = None if reported is None else [[np.asarray(row).tolist() for row in rows] for rows in reported]
        told = (tokens, other, device, temperature, routes, ends, rows, [*sampled], margin)
        found = self.ask("logprob_hf:sides", [checkpoint], *told)
        count = 1 if ends is None else 3
        return [*(Sides(*item) for item in found[:count]), *found[count:]]

    def ask(self, function: str, paths: Sequence[Path], *arguments: Any, read: Sequence[Path] = ()) -> Any:
        """Ask, unless the same was asked before.

        `function` is a module of this room, a colon and a function; its first arguments are the folders `paths`, the
        others JSON values. The answer depends on the content of the folders `read`, by default `paths`.

        Raises:
            OracleMemoryError: the oracle has too little memory for it.
        """
        contents = [_content(folder) for folder in read or paths]
        known = None not in contents
        key = hashlib.blake2b(json.dumps([function, contents, arguments]).encode()).hexdigest() if known else ""
        if key in self.answers:
            return json.loads(self.answers[key])
        try:
            with in_stage(Stage.LOGPROB):
                found = self._client.call(f"verifier.oracle.{function}", *map(str, paths), *arguments)[0]
        except VerifierError as error:
            if not is_out_of_memory(str(error)):
                raise
            raise OracleMemoryError(
                f"the fp32 oracle ran out of memory in `{function}`: give it fewer or shorter sequences "
                f"(verify.rollouts=1 in training), or none (verify.every=0); {error}"
            ) from error
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
