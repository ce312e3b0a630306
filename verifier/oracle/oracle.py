"""The independent oracle's process: transformers, which no patch of ours touches, asked through a client."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verifier.engine.engine import EngineConfig
from verifier.engine.process import EngineProcess

REMEMBERED_BYTES = 64 * 2**20
"""Largest folder of weights whose content is recognised, so that what was answered of it is answered again."""
Scored = list[list[float]]
"""Per sequence its log-probabilities, nats."""


class Oracle:
    """Computes with any checkpoint directory. The same question of the same small weights is computed once.

    Args:
        checkpoint: any directory that transformers loads; the process starts with it.
        deadline_s: for the start and for each request.
    """

    def __init__(self, checkpoint: Path, deadline_s: float) -> None:
        config = EngineConfig(kind="hf", checkpoint=str(checkpoint), dtype="float32")
        self._process = EngineProcess(config, name="the fp32 oracle")
        self._answers: dict[str, Any] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._process.stop)
            self._client = self._process.client(deadline_s=deadline_s)
            undo.pop_all()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._process.stop()

    def score(
        self,
        checkpoint: Path,
        sequences: Sequence[Sequence[int]],
        dtype: str = "float32",
        device: str = "cpu",
        temperature: float = 1.0,
    ) -> Scored:
        """Per sequence, entry t is log p(token t + 1 | tokens 0..t) at the temperature, nats."""
        tokens = [list(sequence) for sequence in sequences]
        return self._ask("logprob_hf", "score", [checkpoint], [tokens, dtype, device, temperature])

    def next_token(self, checkpoint: Path, tokens: Sequence[int], device: str, temperature: float) -> list[float]:
        """Log-probability of every token of the vocabulary after these, nats."""
        return self._ask("logprob_hf", "next_token", [checkpoint], [list(tokens), device, temperature])

    def shaped(
        self, checkpoint: Path, rows: Sequence[Sequence[Any]], slack: float, device: str
    ) -> list[list[tuple[float, float]]]:
        """See `verifier.oracle.logprob_hf.shaped_logprobs`."""
        return self._ask("logprob_hf", "shaped_logprobs", [checkpoint], [rows, slack, device])

    def score_routed(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], routes: Any, dtype: str, device: str
    ) -> Scored:
        """See `verifier.oracle.routes_hf.score_routed`."""
        tokens = [list(sequence) for sequence in sequences]
        return self._ask("routes_hf", "score_routed", [checkpoint], [tokens, routes, dtype, device])

    def judge_steps(self, source: Path, work: Path, *arguments: Any, adapter: bool) -> list[dict[str, Any]]:
        """See `verifier.oracle.step_hf`."""
        function = "judge_adapter_steps" if adapter else "judge_steps"
        read = [path for kind in ("live", "gradients", "matrices") for path in sorted(work.glob(f"{kind}-*"))]
        return self._ask("step_hf", function, [source, work], list(arguments), [source, *read])

    def _ask(
        self,
        module: str,
        function: str,
        paths: Sequence[Path],
        arguments: Sequence[Any],
        read: Sequence[Path] | None = None,
    ) -> Any:
        """Ask, unless it is known.

        Args:
            module: within this room.
            function: of the module.
            paths: its first arguments.
            arguments: its other arguments.
            read: folders whose content the answer depends on; `paths` by default.
        """
        contents = [_content(folder) for folder in (paths if read is None else read)]
        key = ""
        if None not in contents:
            key = hashlib.blake2b(json.dumps([function, contents, arguments]).encode()).hexdigest()
        if key not in self._answers:
            all_arguments = [*map(str, paths), *arguments]
            found = self._client.call(f"verifier.oracle.{module}", function, all_arguments)[0]
            if not key:
                return found
            self._answers[key] = found
        return json.loads(json.dumps(self._answers[key]))


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
