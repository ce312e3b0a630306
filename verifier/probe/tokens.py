"""Tokens of a step as a trainer holds them, brought to the columns of the evidence: all tokens, rollout after rollout.

A trainer keeps values of a response's tokens, of all tokens, or of all tokens but the first, as a shifted log-softmax
gives them. Each is told by its length.

A recorder that is open has a mark beside its evidence. A trace whose recorders have all closed is whole; one that has a
mark, or lacks a rank, is judged as it stands and never holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from verifier.core import store
from verifier.core.check import LOOP
from verifier.core.manifest import Manifest
from verifier.core.reader import read
from verifier.core.record import Role
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.model.families import served
from verifier.probe.declared import facts_of
from verifier.stages.engine.records import CheckpointView, ExpectedView, SyncedTensor
from verifier.stages.export.records import ExportedAdapterMatrix, ExportedTensor
from verifier.stages.load.records import SourceTensor, StatedConfig
from verifier.stages.transport.records import Handover, ReceivedTensor

Rows = Sequence[Any]
"""One sequence of numbers a rollout: list, numpy array or tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Rollouts of one step; arrays [N] over all tokens of all rollouts."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    tokens: np.ndarray
    mask: np.ndarray
    engine: np.ndarray
    versions: np.ndarray
    temperature: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rollout, its prompt included."""
        return tuple(len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True))

    def column(self, rows: Rows, what: str, *, fill: float = np.nan, dtype: Any = np.float32) -> np.ndarray:
        """Values of every token [N]; those that a row does not have are `fill`.

        Raises:
            UsageError: another number of rows than rollouts, or a row of a length that is none of the three.
        """
        return _column(self.prompts, self.responses, rows, what, fill=fill, dtype=dtype)


def step_tokens(
    prompts: Rows, responses: Rows, loss_mask: Rows, engine_logprobs: Rows | None, versions: int | Rows,
    rewards: Sequence[float] | None, groups: Sequence[Any] | None, ids: Sequence[Any] | None, temperature: float,
    step: int,
) -> StepTokens:  # fmt: skip
    """Tokens of a step; see `LoopRecorder.rollouts`.

    Raises:
        UsageError: lists of different lengths, or an empty prompt.
    """
    asked = tuple(tuple(row_of(row, np.int64).tolist()) for row in prompts)
    given = tuple(tuple(row_of(row, np.int64).tolist()) for row in responses)
    counts = {"prompts": len(asked), "responses": len(given)}
    counts |= {
        name: len(value)
        for name, value in (("rewards", rewards), ("groups", groups), ("ids", ids))
        if value is not None
    }
    if len(set(counts.values())) > 1:
        raise UsageError(f"step {step} has {', '.join(f'{size} {name}' for name, size in counts.items())}")
    if not all(asked):
        raise UsageError(f"step {step} has a rollout with an empty prompt, whose first token no model scores")
    drawn = [np.full(len(row), versions, np.int32) for row in given] if isinstance(versions, int) else versions
    scored = engine_logprobs if engine_logprobs is not None else [np.full(len(row), np.nan) for row in given]
    return StepTokens(
        ids=tuple(map(str, ids)) if ids is not None else tuple(f"{step}/{at}" for at in range(len(asked))),
        groups=tuple(map(str, groups if groups is not None else [f"{step}/{asked.index(prompt)}" for prompt in asked])),
        prompts=asked, responses=given,
        rewards=tuple(map(float, rewards)) if rewards is not None else (0.0,) * len(asked),
        tokens=np.array([token for both in zip(asked, given, strict=True) for row in both for token in row], np.int64),
        mask=_column(asked, given, loss_mask, "loss_mask", fill=0, dtype=bool),
        engine=_column(asked, given, scored, "engine_logprobs"),
        versions=_column(asked, given, drawn, "versions", fill=-1, dtype=np.int32), temperature=temperature,
    )  # fmt: skip


def _column(
    prompts: Rows, responses: Rows, rows: Rows, what: str, *, fill: float = np.nan, dtype: Any = np.float32
) -> np.ndarray:
    if len(rows) != len(prompts):
        raise UsageError(f"`{what}` has {len(rows)} rows for {len(prompts)} rollouts")
    parts = []
    for at, (prompt, response, row) in enumerate(zip(prompts, responses, rows, strict=True)):
        values, whole = row_of(row, dtype), len(prompt) + len(response)
        if row is not None and values.size not in (len(response), whole - 1, whole):
            raise UsageError(
                f"`{what}` has {values.size} values for rollout {at}, which has {len(response)} tokens in its response "
                f"and {whole} with its prompt"
            )
        parts.append(np.concatenate([np.full(whole - values.size, fill, dtype), values]))
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def row_of(row: Any, dtype: Any) -> np.ndarray:
    """A row of numbers as an array on the host, a copy."""
    if hasattr(row, "detach"):
        row = row.detach().cpu()
        row = row.double().numpy() if row.is_floating_point() else row.numpy()  # numpy has no bfloat16
    return np.array([] if row is None else row).astype(dtype).reshape(-1)


COMMAND = LOOP
"""Command of a recorded loop, by its manifest."""


def mark_of(path: Path, role: Role, rank: int) -> Path:
    """File that stands beside the evidence of a recorder while it is open."""
    return path / "evidence" / f"{role}-{rank:04d}.partial"


def seal(path: Path, failure: str = "") -> Manifest:
    """Declare what the trace shows, and complete it if all recorders have closed; returns the manifest.

    Args:
        path: trace directory of a recorded loop.
        failure: what ended the loop before its end, if something did.

    Raises:
        UsageError: no trace, a damaged one, or one of another command.
    """
    seen = read(path)
    if seen.manifest.command != COMMAND:
        raise UsageError(f"`{path}` is a trace of `verifier {seen.manifest.command}`, which seals its own")
    why = failure or next(_unfinished(path, seen.manifest), "")
    if not why and _expect_views(path, seen):
        seen = read(path)
    manifest = _declared(seen)
    (store.fail(path, manifest, why) if why else store.complete(path, manifest))
    return read(path).manifest


def _unfinished(path: Path, manifest: Manifest) -> Iterator[str]:
    """Sentences on recorders that did not come to their end."""
    for mark in sorted((path / "evidence").glob("*.partial")):
        yield f"the recorder {mark.stem} was not closed: its process goes on, or died"
    for rank in range(manifest.world_size):
        if not (path / "evidence" / f"trainer-{rank:04d}.jsonl").exists():
            yield f"trainer rank {rank} of {manifest.world_size} recorded nothing"


def _declared(seen: Trace) -> Manifest:
    """The manifest with what was recorded: facts, versions, engine ranks."""
    manifest = seen.manifest
    exported = next(seen.of(ExportedTensor), None)
    dtype = manifest.dtype or (exported.dtype if exported else "")
    seen.manifest = replace(manifest, dtype=dtype)
    undertaken = manifest.config.get("undertakes")
    promised = undertaken if isinstance(undertaken, list) else []
    sent = {item.version for kind in (Handover, ReceivedTensor) for item in seen.of(kind)}
    if "transfer" in promised:
        sent |= {version for version in seen.versions(ExportedTensor) if version}
    ranks = [item.rank for kind in (ReceivedTensor, CheckpointView, SyncedTensor) for item in seen.of(kind)]
    return replace(
        manifest, dtype=dtype, ended=store.now(), facts=facts_of(seen, promised), synced_versions=tuple(sorted(sent)),
        engine_ranks=max(ranks, default=0) + 1 if sent or ranks else 0,
        untouched_versions=(0,) if 0 in seen.versions(ExportedTensor) and seen.has(SourceTensor) else (),
    )  # fmt: skip


def _expect_views(path: Path, seen: Trace) -> bool:
    """Record what each engine rank should hold, if it holds whole tensors in the export's dtypes; tells whether."""
    views = list(seen.of(CheckpointView))
    if not views or seen.has(ExpectedView) or not seen.has(ExportedTensor):
        return False
    stated = next(seen.of(StatedConfig), None)
    config = {} if stated is None else {key: json.loads(value) for key, value in stated.values.items()}
    exports: dict[int, dict[str, ExportedTensor | ExportedAdapterMatrix]] = {
        version: {item.name: item for item in seen.of(ExportedAdapterMatrix, version=version)}
        | served({item.name: item for item in seen.of(ExportedTensor, version=version, rank=0)}, config)
        for version in seen.versions(CheckpointView)
    }
    for view in views:
        sent = exports[view.version].get(view.tensor)
        if sent is not None and (sent.dtype, sent.shape) != (view.dtype, view.shape):
            return False
    for rank in sorted({item.rank for item in views}):
        with closing(store.Recorder(path, "controller", rank)) as recorder:
            for version, sent_tensors in exports.items():
                own = [item for item in views if (item.rank, item.version) == (rank, version)]
                named = {item.name: item.tensor for item in own}
                named |= {name: name for name in sent_tensors if own and name not in named.values()}
                for name, tensor in named.items():
                    if (sent := sent_tensors.get(tensor)) is not None:
                        record = ExpectedView(
                            name=name, version=version, digest=sent.digest, dtype=sent.dtype, shape=sent.shape,
                            whole=sent.shape,
                        )  # fmt: skip
                        recorder.emit(record)
    return True
