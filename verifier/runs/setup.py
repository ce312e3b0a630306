"""What golden and roundtrip share on the parent's side: the model, the trace, the deadline, the ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes, Scope
from verifier.errors import InternalError, Stopped, UsageError, VerifierError
from verifier.export.names import layout_of
from verifier.knob import flat
from verifier.launch.fork_launcher import ForkLauncher, require_ranks
from verifier.mesh import Mesh
from verifier.model.checkpoint import Checkpoint, open_checkpoint, require_described
from verifier.model.named import resolve_model
from verifier.model.provider_megatron import validate
from verifier.platform import select
from verifier.platform.pins import PINS, TRAINER, installed, require_pins
from verifier.platform.stand_ins import stand_ins_of
from verifier.platform.upstream_fixes import bugs_of, refuse_impossible
from verifier.runs.spec import RunSpec

Progress = Callable[[str], None]
ENGINE_FIRST_S = 20.0
"""Ranks wait so much longer for rank 0 than rank 0 for the engine, so that it can say first who does not answer."""
ON_THE_HOST_BYTES = 256 * 2**20
"""Of the greatest checkpoint that transformers computes with on the host on the GPU tier: a wide one takes minutes."""
SAVED_BYTES = 2**30
"""Of the greatest checkpoint that megatron-bridge writes to files as well: the same code writes larger ones."""
PRELOADS = {
    "cpu": "verifier.runs.session_megatron:preload_cpu",
    "cuda": "verifier.runs.session_megatron:preload_cuda",
}


class Deadline:
    """The end of a run; each step asks it for the time that is left.

    Args:
        timeout_s: seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._at = timeout_s, time.monotonic() + timeout_s

    def left(self, step: str) -> float:
        """Seconds that a step may take.

        Raises:
            InternalError: none are left; names the step.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise InternalError(f"--timeout is {self._timeout_s:g} s, which had passed before {step}")
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The checked checkpoint that a run is about, and the tier it runs on."""

    checkpoint: Checkpoint
    dtype: str
    mesh: Mesh
    tier: str

    @property
    def layout_scopes(self) -> list[Scope]:
        """Scopes of the checks that need a layout: shards, and replicas where the mesh has any."""
        layout = layout_of(self.checkpoint.config)
        if layout is None:
            return []
        copies = self.mesh.dense_size > 1 or (layout.tied and self.mesh.pp > 1)
        return ["layout", "replicas"] if copies else ["layout"]

    @property
    def judges_gradients(self) -> bool:
        """Whether the gradients of each step go to the oracle, through files, to be judged in float64 on the host."""
        return bool(self.layout_scopes) and self.oracle_device == "cpu"

    @property
    def oracle_device(self) -> str:
        """Where transformers computes: on the host, which shares no kernel with trainer and engine, if it can."""
        return "cpu" if self.tier == "cpu" or self.checkpoint.num_bytes <= ON_THE_HOST_BYTES else "cuda"

    @property
    def is_saved(self) -> bool:
        """Whether megatron-bridge writes the last export to files too."""
        return self.checkpoint.num_bytes <= SAVED_BYTES


def cache_folder() -> Path:
    """Where generated checkpoints are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verifier"


def open_subject(model: str, dtype: str, mesh: Mesh) -> Subject:
    """Resolve and check a model before anything is started.

    Raises:
        UsageError: unknown model, damaged checkpoint, a mesh that does not divide it, or a dtype that is not the
            checkpoint's; an upstream version that is not supported.
    """
    require_pins(*TRAINER)
    require_ranks(mesh.world_size)
    checkpoint = open_checkpoint(resolve_model(model, cache_folder(), dtype))
    validate(checkpoint.config, mesh)
    dtypes = [checkpoint.meta(name).dtype for name in checkpoint.names()]
    stored = max(sorted(set(dtypes)), key=dtypes.count)
    if stored != dtype:
        raise UsageError(
            f"the checkpoint is stored in {stored} and the run asks for {dtype}: rounding it would hide what is to be "
            f"shown; choose the checkpoint's own dtype, or convert it first"
        )
    require_described(checkpoint, dtype)
    return Subject(checkpoint=checkpoint, dtype=dtype, mesh=mesh, tier=select())


def mesh_sizes(mesh: Mesh) -> MeshSizes:
    """Parallel sizes as a manifest holds them."""
    sizes: dict[str, Any] = mesh.to_dict()
    return MeshSizes(**sizes)


def identity(subject: Subject, command: str, model: str, config: Mapping[str, Any], num_gpus: int = 0) -> Manifest:
    """The part of a manifest that says which run this was, its ranks' GPUs, and what was replaced upstream.

    Raises:
        UsageError: an upstream bug would end the run, and its fix is not asked for.
    """
    sizes = subject.checkpoint.config
    run = {**flat(config), "command": command, "tier": subject.tier, "dtype": subject.dtype}
    refuse_impossible(sizes, run)
    return Manifest(
        command=command, model=model, dtype=subject.dtype, mesh=mesh_sizes(subject.mesh),
        world_size=subject.mesh.world_size, num_gpus=num_gpus, tier=subject.tier,
        versions={name: found for name in PINS if (found := installed(name)) is not None}, config=dict(config),
        stand_ins=tuple(stand_ins_of(sizes, run)), upstream_bugs=tuple(bugs_of(sizes, run)),
    )  # fmt: skip


@contextlib.contextmanager
def trace_folder(path: Path, manifest: Manifest) -> Iterator[Path]:
    """A trace directory; removed again if the run ends in a usage error, kept and marked if it ends otherwise."""
    store.create(path, manifest)
    try:
        yield path
    except UsageError:
        store.discard(path)
        raise
    except (VerifierError, Stopped) as problem:
        store.fail(path, manifest, str(problem))
        raise


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for what processes hand to each other, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="verifier-run-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_ranks(launcher: ForkLauncher, function: str, spec: RunSpec, deadline_s: float, progress: Progress) -> list[Any]:
    """Run one rank function on all ranks of the spec's mesh."""
    return launcher.run(
        f"verifier.runs.session_megatron:{function}",
        world_size=spec.mesh.world_size,
        run_dir=Path(spec.work) / "ranks",
        args=spec.to_json(),
        deadline_s=deadline_s,
        collective_deadline_s=spec.deadline_s + ENGINE_FIRST_S,
        mesh=spec.mesh,
        num_gpus=spec.num_gpus,
        on_progress=lambda rank, text: progress(text),
    )
