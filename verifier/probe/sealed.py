"""The end of a recorded loop: what it declares, and whether all of its processes came to their end.

A recorder that is open has a mark beside its evidence. A trace whose recorders have all closed is whole; one that has a
mark, or lacks a rank, is judged as it stands and never holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

from msgspec.structs import replace

from verifier.core import store
from verifier.core.check import LOOP
from verifier.core.manifest import Manifest
from verifier.core.reader import read
from verifier.core.record import Role
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.probe.declared import facts_of
from verifier.stages.engine.records import CheckpointView, ExpectedView, SyncedTensor
from verifier.stages.export.records import ExportedTensor
from verifier.stages.load.records import SourceTensor
from verifier.stages.transport.records import Handover, ReceivedTensor

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
        manifest, dtype=dtype, ended=now(), facts=facts_of(seen, promised), synced_versions=tuple(sorted(sent)),
        engine_ranks=max(ranks, default=0) + 1 if sent or ranks else 0,
        untouched_versions=(0,) if 0 in seen.versions(ExportedTensor) and seen.has(SourceTensor) else (),
    )  # fmt: skip


def _expect_views(path: Path, seen: Trace) -> bool:
    """Record what each engine rank should hold, if it holds whole tensors in the export's dtypes; tells whether."""
    views = list(seen.of(CheckpointView))
    if not views or seen.has(ExpectedView) or not seen.has(ExportedTensor):
        return False
    exports: dict[int, Mapping[str, ExportedTensor]] = {
        version: {item.name: item for item in seen.of(ExportedTensor, version=version, rank=0)}
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


def now() -> str:
    """Time in UTC, as in ISO 8601."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
