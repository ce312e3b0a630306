"""The folder of a training run: its config, batches, traces of steps, metrics, and who has it open.

config.yaml            every knob, as `--config` takes it again
effective.json         settings that Megatron ran with
batches/000001.safetensors   rollouts and loss inputs of a step
steps/000001/          trace of a step, with --verify
metrics.jsonl          one line a step
hf_model/              the trained weights and the tokenizer
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.core.outputs import write_whole
from verifier.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths within the folder of a run, and what is appended to it."""

    path: Path

    def batch(self, step: int, number: int = 0) -> Path:
        """File of the rollouts and loss inputs of one of a step's mini-batches."""
        return self.path / "batches" / f"{step:06d}-{number:02d}.safetensors"

    def trace(self, step: int) -> Path:
        """Trace directory of a step."""
        return self.path / "steps" / f"{step:06d}"

    @property
    def exported(self) -> Path:
        """Folder of the trained weights."""
        return self.path / "hf_model"

    def write(self, name: str, text: str) -> None:
        """Write a file whole."""
        write_whole(self.path / name, text)

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl.

        Raises:
            UsageError: it cannot be written.
        """
        file = self.path / "metrics.jsonl"
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(values) + "\n")
        except OSError as problem:
            raise UsageError(f"`{file}` cannot be written: {problem.strerror}") from problem


@contextlib.contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    """Make the folder of a new run, and keep others out of it until exit.

    Raises:
        UsageError: it holds another run, is in use, or cannot be written.
    """
    folder = RunFolder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    except OSError as problem:
        raise UsageError(f"the run folder `{path}` cannot be written: {problem.strerror}") from problem
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise UsageError(f"the run folder `{path}` is in use by another run: choose another --run") from problem
        if (path / "config.yaml").exists():
            raise UsageError(f"the run folder `{path}` holds a run already: choose another --run")
        for name in ("batches", "steps"):
            (path / name).mkdir(exist_ok=True)
        yield folder
