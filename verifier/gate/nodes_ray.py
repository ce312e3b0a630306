"""Workers of a gate on the nodes of a Ray cluster, one a node; the gate's folder lies on storage that they share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verifier.config.cluster import RayOptions
from verifier.errors import InternalError, UsageError
from verifier.gate.cell_node import CellNode
from verifier.gate.gate_result import Cell, CellResult
from verifier.gate.workers import Progress
from verifier.launch.failures import LaunchError
from verifier.trainer.cluster_ray import Actor
from verifier.trainer.join_ray import joined

_TURN_S = 0.5
"""Seconds that a node is waited for before the next is asked."""


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
