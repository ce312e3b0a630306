"""Workers of a gate on the nodes of a Ray cluster, one a node; the gate's folder lies on storage that they share.

Ray is loaded by `node_pool` alone, so that a node's server does without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verifier.campaign.gate.workers import CellWorker, next_log, places_of
from verifier.config.cluster import RayOptions
from verifier.errors import InternalError, UsageError
from verifier.launch.failures import LaunchError
from verifier.platform import select
from verifier.platform.provenance import gpu_names
from verifier.report.gate_result import Cell, CellResult
from verifier.report.progress import Progress
from verifier.trainer.node_servers import NodeServer

if TYPE_CHECKING:
    from verifier.trainer.cluster_ray import Actor

_TURN_S = 0.5
"""Seconds that a node is waited for before the next is asked."""


class CellNode(NodeServer):
    """One worker on a node, made anew after it failed a cell."""

    _worker: CellWorker | None = None

    def gpus(self) -> list[str]:
        """Names of the node's GPUs."""
        return list(gpu_names(select()))

    def begin(self, cell: Mapping[str, Any], deadline_s: float, folder: str, node: int) -> None:
        """Run a cell, as `CellWorker.begin` does.

        Args:
            cell: as msgspec's builtins.
            deadline_s: of the cell.
            folder: of the gate.
            node: its number, by which its logs are called.
        """
        if self._worker is None:
            log = next_log(Path(folder), f"node-{node}")
            self._worker = CellWorker(places_of(len(self.gpus())), Path(folder), log)
        self._worker.begin(msgspec.convert(cell, Cell), deadline_s)

    def turn(self, within_s: float) -> tuple[list[str], Any]:
        """Wait at most so many seconds; lines of progress, and the result of the cell as builtins, if it has ended."""
        assert self._worker is not None
        lines: list[str] = []
        watched: list[Any] = [self._worker]
        connection.wait(watched, max(0.0, min(within_s, self._worker.left_s)))
        result = self._worker.turn(lines.append)
        if result is not None and result.status == "failed":
            self.close()
        return lines, None if result is None else msgspec.to_builtins(result)

    def close(self) -> None:
        """End the worker, with all that it started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


@dataclass(slots=True)
class _Node:
    """A node with its actor, and the cell that it runs."""

    number: int
    actor: Actor
    cell: Cell | None = None
    began: float = 0.0


class NodePool:
    """One worker a node; see `WorkerPool`.

    Args:
        actors: of the nodes, each a `CellNode`.
        folder: of the gate.
    """

    def __init__(self, actors: Sequence[Actor], folder: Path) -> None:
        self._nodes, self._folder = [_Node(number, actor) for number, actor in enumerate(actors)], folder
        self._lost = ""

    @property
    def busy(self) -> list[_Node]:
        """Nodes that run a cell."""
        return [node for node in self._nodes if node.cell is not None]

    def begin(self, cell: Cell, deadline_s: float) -> bool:
        """Begin a cell on a free node, if there is one.

        Raises:
            InternalError: no node is left.
        """
        for node in [item for item in self._nodes if item.cell is None]:
            try:
                node.actor.ask("begin", msgspec.to_builtins(cell), deadline_s, str(self._folder), node.number)
            except LaunchError as problem:
                self._lose(node, problem)
                continue
            node.cell, node.began = cell, time.monotonic()
            return True
        if not self._nodes:
            raise InternalError(f"no node of the gate is left: {self._lost}")
        return False

    def wait(self, progress: Progress) -> list[CellResult]:
        """Wait until a node says something, or a moment; results of the cells that have ended."""
        results = []
        asked = [(node, node.actor.start("turn", _TURN_S)) for node in self.busy]
        for node, reference in asked:
            assert node.cell is not None
            try:
                lines, found = node.actor.answer(reference, node.actor.patience_s)
            except (LaunchError, InternalError) as problem:
                self._lose(node, problem)
                seconds = round(time.monotonic() - node.began, 1)
                results.append(CellResult(cell=node.cell, status="failed", reason=str(problem), seconds=seconds))
                continue
            for line in lines:
                progress(line)
            if found is not None:
                node.cell = None
                results.append(msgspec.convert(found, CellResult))
        return results

    def _lose(self, node: _Node, problem: Exception) -> None:
        self._nodes.remove(node)
        self._lost = str(problem)


@contextlib.contextmanager
def node_pool(options: RayOptions, folder: Path, gpus: Sequence[str]) -> Iterator[NodePool]:
    """Join the cluster and start an actor on each of its nodes; to leave ends all of them.

    Args:
        options: with the address and the number of nodes.
        folder: of the gate.
        gpus: names of this machine's, by which the cells were planned.

    Raises:
        UsageError: nobody answers, too few nodes, or one with other files, versions or GPUs.
    """
    from verifier.trainer.join_ray import joined

    with joined(options, folder, options.nodes) as cluster:
        actors = cluster.actors(CellNode, "gate")
        for actor in actors:
            theirs = actor.ask("gpus")
            if theirs != list(gpus):
                raise UsageError(
                    f"{actor.name} has the GPUs {theirs}, the gate was planned for {list(gpus)}: start it where the "
                    "machines are alike"
                )
        yield NodePool(actors, folder)
