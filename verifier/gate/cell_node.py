"""The server of a Ray actor that owns a gate's worker, which has all GPUs of the actor's node. Imports no ray."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec

from verifier.gate.gate_result import Cell
from verifier.gate.workers import CellWorker, next_log, places_of
from verifier.platform import select
from verifier.platform.provenance import gpu_names
from verifier.trainer.node_servers import NodeServer


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
