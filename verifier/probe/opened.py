"""A trace that several processes of a trainer record into: rank 0 makes it, the others join it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.reader import MANIFEST
from verifier.core.record import Role
from verifier.errors import UsageError
from verifier.platform.provenance import origin_of
from verifier.probe.declared import UNDERTAKINGS, Undertaking
from verifier.probe.recorder import LoopRecorder
from verifier.probe.tokens import now

JOIN_S = 60.0
"""Seconds that a process waits for the one that makes the trace."""


def open(  # noqa: A001 - `probe.open` is what a loop calls
    path: Path | str, *, model: Path | str = "", dtype: str = "", mesh: Mapping[str, int] | None = None,
    engine: str = "vllm", rank: int | None = None, world_size: int | None = None, keep_every: int = 0,
    undertakes: Sequence[Undertaking] = (), config: Mapping[str, bool | int | float | str] | None = None,
) -> LoopRecorder:  # fmt: skip
    """A recorder of one trainer process; rank 0 makes the trace, others wait for it.

    Args:
        path: directory of the trace, absent or empty.
        model: HF directory of the weights that the loop begins with, with which an export of version 0 is compared.
        dtype: of the weights that are trained, such as "bfloat16"; by default that of the first export.
        mesh: parallel sizes by the names of `verifier.mesh.Mesh`, for the report.
        engine: what samples, for the report.
        rank: of this process among those that record; by default of torch.distributed, of the variable RANK, or 0.
        world_size: number of them, by default of torch.distributed or WORLD_SIZE. With 1 only this process records.
        keep_every: copy weights and gradients of every n-th step, the first among them, for `verifier judge --oracle`;
            0 copies none.
        undertakes: what the loop says that it records: a check without this evidence is inconclusive.
        config: settings of the loop, for the report.

    Raises:
        UsageError: the trace exists, is another run's or cannot be written; no checkpoint; an unknown name or rank.
    """
    unknown = [name for name in undertakes if name not in UNDERTAKINGS]
    if unknown:
        raise UsageError(f"a loop cannot undertake `{unknown[0]}`: choose of {', '.join(UNDERTAKINGS)}")
    if keep_every < 0:
        raise UsageError(f"keep_every is {keep_every}: 0 keeps nothing, 1 every step")
    path, (own, size) = Path(path), _place(rank, world_size)
    if not 0 <= own < size:
        raise UsageError(f"rank {own} is none of {size} ranks")
    if model and not (Path(model) / "config.json").is_file():
        raise UsageError(f"`{model}` is no checkpoint directory: it has no config.json")
    if model and importlib.util.find_spec("torch") is None:
        raise UsageError(f"the checkpoint `{model}` is read with torch, which is not installed: leave `model` out")
    if own == 0:
        try:
            sizes = None if mesh is None else msgspec.convert(dict(mesh), MeshSizes)
        except msgspec.ValidationError as problem:
            raise UsageError(f"the mesh {dict(mesh or {})} has no such sizes: {problem}") from problem
        known: dict[str, Any] = dict(config or {})
        store.create(
            path,
            Manifest(
                **origin_of(shlex.join(map(str, sys.argv)), _tier()), command="probe", began=now(), model=str(model),
                dtype=dtype, mesh=sizes, world_size=size, engine=engine,
                config={**known, "model": str(model), "undertakes": [*undertakes]},
            ),
        )  # fmt: skip
    return _joined(path, "trainer", own, str(model), keep_every)


def attach(path: Path | str, *, role: Role = "engine", rank: int = 0) -> LoopRecorder:
    """A recorder of another process than a trainer's, such as an engine's; it may attach again after it closed.

    Raises:
        UsageError: no process made the trace within a minute, or it is sealed.
    """
    return _joined(Path(path), role, rank, "", 0)


def _joined(path: Path, role: Role, rank: int, model: str, keep_every: int) -> LoopRecorder:
    until = time.monotonic() + JOIN_S
    while not (path / MANIFEST).exists():
        if time.monotonic() > until:
            raise UsageError(f"no process has made the trace `{path}` in {JOIN_S:g} s: rank 0 of the trainer opens it")
        time.sleep(0.05)
    return LoopRecorder(path, role, rank, model=model, keep_every=keep_every)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, or as the launcher of this process says."""
    if rank is None and world_size is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank or 0, 1 if world_size is None else world_size


def _tier() -> str:
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
