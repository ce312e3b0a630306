"""Context of a session on one rank: spec, place in the mesh, recorder, source checkpoint, link to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.core.store import Recorder
from verifier.export.names import ModelLayout, layout_of
from verifier.mesh import Mesh
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.runs.engine_link_megatron import EngineLink
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One session, as one rank sees it."""

    spec: RunSpec
    context: RankContext
    probe: Recorder
    link: EngineLink

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def mesh(self) -> Mesh:
        """Parallel sizes of the trainer."""
        return self.spec.config.mesh

    @property
    def work(self) -> Path:
        """Folder for what processes hand to each other."""
        return Path(self.spec.work)

    @cached_property
    def source(self) -> Checkpoint:
        """Checkpoint of version 0."""
        return open_checkpoint(self.spec.checkpoint)

    @cached_property
    def layout(self) -> ModelLayout | None:
        """Layout of its family; None where there is no row."""
        return layout_of(self.source.config)

    def say(self, text: str) -> None:
        """Show one line of progress, from rank 0."""
        if self.rank == 0:
            self.context.progress(text)

    def folder(self, name: str) -> Path:
        """A new folder in `work`, for all ranks to write into. A collective."""
        path = self.work / name
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        return path
