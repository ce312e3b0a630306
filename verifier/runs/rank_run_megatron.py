"""Context of a session on one rank: spec, place in the mesh, recorder, source checkpoint, link to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.core.record import Role
from verifier.core.store import Recorder
from verifier.engine.link_megatron import EngineLink
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


@dataclass(kw_only=True)
class RankRun:
    """One session, as one rank sees it."""

    spec: RunSpec
    context: RankContext
    probe: Recorder
    link: EngineLink
    engines: Sequence[Recorder]
    """A recorder for each engine rank; rank 0's only."""

    def __post_init__(self) -> None:
        self.rank, self.mesh, self.work = self.context.rank, self.spec.config.mesh, Path(self.spec.work)

    @cached_property
    def source(self) -> Checkpoint:
        """Checkpoint of version 0."""
        return open_checkpoint(self.spec.checkpoint)

    @cached_property
    def layout(self) -> ModelLayout | DerivedLayout | None:
        """See `RankSpec.layout_for`."""
        return self.spec.layout_for(self.source)

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


@contextlib.contextmanager
def rank_run(spec: RunSpec, context: RankContext) -> Iterator[RankRun]:
    """A session's context, open until the session ends; a collective with the engine's ranks."""
    trace, link = Path(spec.trace), EngineLink()
    engines: Sequence[Recorder] = ()
    with contextlib.ExitStack() as stack:

        def recorder(role: Role, rank: int) -> Recorder:
            return stack.enter_context(contextlib.closing(Recorder(trace, role, rank)))

        probe = recorder("trainer", context.rank)
        if spec.engine_socket is not None:
            options = spec.roundtrip.engine
            link = EngineLink.of(spec.transport, options.sleep_level)
            if context.rank == 0:
                engines = [recorder("engine", rank) for rank in range(options.ranks)]
                link.connect(stack, [spec.engine_socket], options.ranks, spec.transport, spec.deadline_s)
        yield RankRun(spec=spec, context=context, probe=probe, link=link, engines=engines)
