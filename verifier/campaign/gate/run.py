"""A gate from its config to its result: the matrix, the cells that the ledger lacks, the decision.

There are as many workers side by side as this machine has places, each with GPUs of its own. One that dies or hangs
beyond its cell's deadline makes a failed cell of it, and the next cell gets a new worker. `node_pool` alone loads Ray.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import verifier.checks  # noqa: F401  (fills the registry)
from verifier import __version__
from verifier.campaign.gate.card import write_cards
from verifier.campaign.gate.decision import (
    GateLedger,
    decided,
    identity_of,
    opened_ledger,
    require_known_waivers,
    waived,
)
from verifier.campaign.gate.matrix import FIRST_S, Matrix, estimate_s, matrix_of, ordered
from verifier.config import GateConfig, next_trace
from verifier.config.cluster import RayOptions
from verifier.config.gate import GATE_FILE
from verifier.config.load import resolved
from verifier.core.outputs import json_text, write_whole
from verifier.core.outputs import sweep as sweep_work_folders
from verifier.core.plugins import installed_plugins
from verifier.core.store import now
from verifier.errors import InternalError, UsageError
from verifier.launch.channel import ChannelClosed, DeadlinePassed, spawned
from verifier.launch.child import last_lines
from verifier.launch.failures import LaunchError
from verifier.platform import Tier, select
from verifier.platform.provenance import (
    TRAINER,
    code_digest,
    gpu_names,
    host,
    installed_versions,
    require_installed,
    this_code,
)
from verifier.report.gate_result import RESULT, Cell, CellResult, GateResult
from verifier.report.progress import Progress
from verifier.runs.node_servers import NodeServer
from verifier.runs.spec import places_of

if TYPE_CHECKING:
    from verifier.runs.cluster_ray import Actor

GRACE_S = 30.0
"""Seconds that a worker has beyond a cell's deadline, so that what hangs in it can be named first."""
_FIRST_S = 120.0
"""Seconds that its imports may take."""
_STOP_S = 15.0


class CellWorker:
    """One worker; use it on the main thread, with whose end it ends. A log under its name has what it prints.

    `places` are the names of its GPUs, or one empty name on a machine without.
    """

    def __init__(self, places: Sequence[str], folder: Path, name: str) -> None:
        self.places, self._log = tuple(places), next_trace(name, folder / "logs", ".log")
        gpus = [place for place in places if place]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as file:
            self._process, self._channel = spawned(
                "verifier.campaign.gate.cell_runs:serve", [str(folder)], file, death_signal=signal.SIGKILL,
                environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
            )  # fmt: skip
        self.cell: Cell | None = None
        self._until, self._began, self._fresh = 0.0, 0.0, True

    def fileno(self) -> int:
        """Descriptor that becomes readable when it has something to say, or has ended."""
        return self._channel.fileno()

    def begin(self, cell: Cell, deadline_s: float) -> None:
        """Give it a cell to run."""
        self.cell, self._began = cell, time.monotonic()
        self._deadline_s = deadline_s
        self._until = self._began + deadline_s + GRACE_S + (_FIRST_S if self._fresh else 0.0)
        self._fresh = False
        with contextlib.suppress(ChannelClosed):  # it has ended, which the next turn sees
            self._channel.send({"cell": msgspec.to_builtins(cell), "deadline_s": deadline_s})

    @property
    def left_s(self) -> float:
        """Seconds until its cell counts as hung."""
        return self._until - time.monotonic()

    def turn(self, progress: Progress) -> CellResult | None:
        """Take what it says; the result of its cell, once it has one or can have none any more."""
        if not connection.wait([self._channel.wire], 0):
            return self._failed(f"it did not end within {self._deadline_s:g} s") if self.left_s <= 0 else None
        try:
            said: dict[str, Any] = self._channel.receive(GRACE_S)
        except DeadlinePassed:
            return self._failed("its process stopped in the middle of a message")
        except ChannelClosed:
            cause = self._process.cause_of_death() if self._process.ended(_STOP_S) else None
            return self._failed(f"its process ended: {cause or 'for a reason that nobody knows'}")
        if "progress" in said:
            progress(f"{self.cell.id if self.cell else ''}: {said['progress']}")
            return None
        self.cell = None
        return msgspec.convert(said["result"], CellResult)

    def close(self) -> None:
        """End it, with all that it started."""
        self._channel.close()
        if self.cell is None:  # it waits for an order, and ends by itself
            self._process.ended(_STOP_S)
        self._process.stop(_STOP_S)

    def _failed(self, cause: str) -> CellResult:
        assert self.cell is not None
        seconds = round(time.monotonic() - self._began, 1)
        self._process.stop()
        reason = f"{cause}{last_lines(self._log)}"
        return CellResult(cell=self.cell, status="failed", reason=reason, seconds=seconds)


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Workers over the places of this machine; to leave ends all of them."""

    def __init__(self, places: Sequence[str], folder: Path) -> None:
        self._free, self._folder = list(places), folder
        self._idle: list[CellWorker] = []
        self.busy: list[CellWorker] = []
        """Workers that run a cell."""

    def __exit__(self, *_: object) -> None:
        for worker in [*self.busy, *self._idle]:
            worker.close()

    def begin(self, cell: Cell, deadline_s: float) -> bool:
        """Begin a cell if there is room for it now."""
        worker = next((item for item in self._idle if len(item.places) == cell.num_gpus), None)
        if worker is not None:
            self._idle.remove(worker)
        else:
            if len(self._free) + sum(len(item.places) for item in self._idle) < cell.num_gpus:
                return False
            while len(self._free) < cell.num_gpus:
                self._end(self._idle.pop())
            own, self._free = self._free[: cell.num_gpus], self._free[cell.num_gpus :]
            worker = CellWorker(own, self._folder, "worker")
        worker.begin(cell, deadline_s)
        self.busy.append(worker)
        return True

    def wait(self, progress: Progress) -> list[CellResult]:
        """Wait until a worker says something; results of the cells that have ended."""
        watched: list[Any] = [*self.busy]
        connection.wait(watched, max(0.0, min(worker.left_s for worker in self.busy)))
        results = []
        for worker in list(self.busy):
            result = worker.turn(progress)
            if result is None:
                continue
            self.busy.remove(worker)
            if result.status == "failed":
                self._end(worker)
            else:
                self._idle.append(worker)
            results.append(result)
        return results

    def _end(self, worker: CellWorker) -> None:
        worker.close()
        self._free += worker.places


def planned(config: GateConfig, tier: Tier, num_gpus: int) -> Matrix:
    """Return the matrix in the order in which it is run.

    Raises:
        UsageError: something that the config names is unknown, or no cell is left.
    """
    matrix = matrix_of(config, tier, num_gpus)
    require_known_waivers(config.waivers, matrix.families)
    if not matrix.cells:
        why = f"; the first that is left out: {matrix.left_out[0].what}: {matrix.left_out[0].reason}"
        raise UsageError(f"the gate has no cell{why if matrix.left_out else ''}")
    matrix.cells[:] = ordered(matrix.cells)
    return matrix


def gate(config: GateConfig, progress: Progress) -> GateResult:
    """Run every cell that the folder does not hold yet, and decide; the folder holds the result too.

    Raises:
        UsageError: what the user can mend, before anything is started.
    """
    require_installed(*TRAINER)
    tier = select()
    gpus = gpu_names(tier)
    matrix = planned(config, tier, len(gpus))
    began = now()
    versions = installed_versions() | installed_plugins()
    machine = {"code": code_digest(), "versions": versions, "tier": tier, "gpus": gpus}
    identify = partial(identity_of, machine=machine)
    sweep_work_folders()
    with opened_ledger(config.folder) as ledger:

        def result_at(ended: str) -> GateResult:
            results = [ledger.rows.get(identify(cell)) or _not_run(config, cell) for cell in matrix.cells]
            cells, uses = waived(results, config.waivers, datetime.now(timezone.utc).date())
            decision, reasons, stage = decided(cells, uses, config.models if {*config.kinds} - {"faults"} else ())
            return GateResult(
                decision=decision, reasons=tuple(reasons), first_bad_stage=stage, began=began, ended=ended,
                host=host(), tier=tier, gpus=gpus, verifier=__version__, commit=this_code().commit,
                versions=installed_versions(), fixes=config.fixes, models=config.models,
                budget_minutes=config.budget_minutes, seconds=round(sum(item.seconds for item in cells), 1),
                folder=str(config.folder), cells=tuple(cells), left_out=tuple(matrix.left_out), waivers=tuple(uses),
            )  # fmt: skip

        write_whole(config.folder / GATE_FILE, resolved(config, {"folder": "the folder itself"}))
        write_cards(result_at(""), config.folder)  # so that none of an earlier gate is left if this one is killed
        folder = config.folder.absolute()
        workers: AbstractContextManager[WorkerPool | NodePool] = WorkerPool(places_of(len(gpus)), folder)
        with node_pool(config.ray, folder, gpus) if config.ray.use else workers as pool:
            _run(config, matrix.cells, ledger, identify, pool, progress)
        sweep_work_folders()  # of workers that died
        result = result_at(now())
        write_whole(config.folder / RESULT, json_text(result))
        write_cards(result, config.folder)
    return result


def _run(
    config: GateConfig, cells: list[Cell], ledger: GateLedger, identify: Callable[[Cell], str],
    pool: WorkerPool | NodePool, progress: Progress,
) -> None:  # fmt: skip
    begun_at = time.monotonic()
    spent_before = sum(found.seconds for cell in cells if (found := ledger.rows.get(identify(cell))) is not None)
    done = ledger.done
    left = [cell for cell in cells if identify(cell) not in done]
    last_engine, cold = "", FIRST_S
    while left or pool.busy:
        passed_s = time.monotonic() - begun_at
        for cell in list(left):
            needed_s = estimate_s(cell, last_engine) + cold
            if not _fits(config, passed_s, spent_before, needed_s):
                left.remove(cell)
            elif pool.begin(cell, min(config.cell_timeout_s, max(1.0, config.timeout_s - passed_s))):
                left.remove(cell)
                last_engine, cold = cell.engine or last_engine, 0.0
                progress(f"{len(cells) - len(left)} of {len(cells)}, {cell.id}")
        if not pool.busy:
            break
        for result in pool.wait(progress):
            if result.status != "not run":  # the machine, or the gate's owner, may mend it
                ledger.add(identify(result.cell), result)
            else:
                ledger.rows[identify(result.cell)] = result
            progress(f"{result.cell.id}: {result.status}, {result.seconds:.0f} s")


def _fits(config: GateConfig, passed_s: float, spent_before: float, needed_s: float) -> bool:
    """True if a cell that takes so long is within the deadline and the budget, which earlier attempts have used too."""
    budget = config.budget_minutes
    fits = budget is None or spent_before + passed_s + needed_s <= 60 * budget
    return fits and passed_s < config.timeout_s


def _not_run(config: GateConfig, cell: Cell) -> CellResult:
    reason = f"the deadline of {config.timeout_s:g} s had passed"
    if config.budget_minutes is not None:
        reason = f"it does not fit into the budget of {config.budget_minutes:g} minutes"
    return CellResult(cell=cell, status="not run", reason=reason)


_TURN_S = 0.5
"""Seconds that a node is waited for before the next is asked."""


class CellNode(NodeServer):
    """One worker on a node, made anew after it failed a cell."""

    _worker: CellWorker | None = None

    def gpus(self) -> list[str]:
        """Names of the node's GPUs."""
        return list(gpu_names(select()))

    def begin(self, cell: Mapping[str, Any], deadline_s: float, folder: str, node: int) -> None:
        """Run a cell, as `CellWorker.begin` does."""
        if self._worker is None:
            self._worker = CellWorker(places_of(len(self.gpus())), Path(folder), f"node-{node}")
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
    """One worker a node; see `WorkerPool`."""

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

    Raises:
        UsageError: nobody answers, too few nodes, or one with other files, versions or GPUs.
    """
    from verifier.runs.join_ray import joined

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
