"""Ray around trainer ranks and engines: an actor per node that owns a launcher, and one per engine.

Ranks and controller talk to the engines as without Ray; batches, checkpoints and traces are files of the run's folder,
which all nodes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verifier.engine.api import EngineConfig
from verifier.engine.replicas import node_of
from verifier.errors import InternalError, UsageError, VerifierError
from verifier.launch.failures import LaunchError
from verifier.launch.fork_launcher import ForkJob, Launcher, require_ranks
from verifier.launch.rank import LOOPBACK, JobSpec
from verifier.launch.watchdog import Vigil
from verifier.runs.node_servers import EngineNode, TrainerNode, identity, raylet_end

if TYPE_CHECKING:
    from verifier.runs.resources import Deadline

_ACTOR_S = 120.0
"""Seconds that an actor may take to start, and to answer beyond what its request takes."""
_END_S = 20.0


class Raylets:
    """The raylets of nodes, each of which a task on its node watches; Ray itself misses one after 15 s."""

    def __init__(self) -> None:
        self._watches: dict[Any, str] = {}

    def watch(self, node: Mapping[str, Any], name: str) -> None:
        """Watch the raylet of a node, which errors call `name`."""
        self._watches[_on(node, raylet_end, max_retries=0).remote()] = name

    def wait(self, reference: Any, within_s: float) -> bool:
        """Wait for an answer; False if there is none in time.

        Raises:
            LaunchError: a raylet has ended.
        """
        while ready := ray.wait([*self._watches, reference], timeout=within_s, fetch_local=False)[0]:
            if ready[0] not in self._watches:
                return True
            try:
                why = ray.get(ready[0])
            except RayError:  # the watch died, with the raylet or without
                del self._watches[ready[0]]
            else:
                raise LaunchError(f"{self._watches[ready[0]]} ended by itself: {why}")
        return False


def _on(node: Mapping[str, Any], what: Any, **options: Any) -> Any:
    """An actor's class or a task's function, to be run on a node."""
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=place, **options)(what)


@dataclass(frozen=True, slots=True)
class Actor:
    """One actor, and what errors call it."""

    handle: Any
    name: str
    raylets: Raylets
    patience_s: float = _ACTOR_S
    """Seconds that an answer may take beyond what its request does."""

    def start(self, method: str, *arguments: Any) -> Any:
        """Call a method; what `answer` takes."""
        return getattr(self.handle, method).remote(*arguments)

    def answer(self, reference: Any, within_s: float) -> Any:
        """Wait for an answer.

        Raises:
            LaunchError: the actor or a raylet died.
            InternalError: no answer in time, or an error that is not ours.
            VerifierError: what the method raised.
        """
        try:
            return ray.get(reference, timeout=within_s if self.raylets.wait(reference, within_s) else 0)
        except RayTaskError as error:
            if isinstance(error.cause, VerifierError):
                raise error.cause from None
            raise InternalError(f"{self.name} failed: {error.cause!r}") from error
        except GetTimeoutError:
            raise InternalError(f"{self.name} did not answer within {within_s:.0f} s") from None
        except RayActorError as error:
            why = next((line for line in str(error).splitlines()[::-1] if line.strip()), "")
            why = why.partition(". ")[0].removeprefix("The actor is dead because ")
            why = why.replace("its owner has died", "the raylet of its node or of this one has died")
            raise LaunchError(f"{self.name} ended by itself: {why}") from None
        except RayError as error:
            raise LaunchError(f"{self.name} cannot be reached: {str(error).splitlines()[0]}") from None

    def ask(self, method: str, *arguments: Any, within_s: float = _ACTOR_S) -> Any:
        """Call a method and wait for its answer; see `answer`."""
        return self.answer(self.start(method, *arguments), within_s)

    def end(self, method: str) -> None:
        """Call the method that ends its children, as far as it can, and kill it."""
        with contextlib.suppress(VerifierError):
            self.ask(method, within_s=_END_S)
        with contextlib.suppress(RayError):
            ray.kill(self.handle)


class ActorRanks:
    """Ranks of a job behind their node's actor, with the methods of `NodeRanks`.

    `node` is its name, for errors; empty where there is one only. `look` raises the error of a process beside the ranks
    that has died.
    """

    def __init__(self, actor: Actor, node: str, ranks: range, look: Callable[[], None]) -> None:
        self._actor, self.node, self.ranks, self._look = actor, node, ranks, look

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._actor.ask, "ask", method)

    def tell(self, message: Any) -> None:
        """See `NodeRanks.tell`."""
        with contextlib.suppress(LaunchError):  # an actor that is gone is found by `poll`
            self._actor.ask("ask", "tell", message)

    def poll(self, within_s: float) -> tuple[list[tuple[int, Any]], float]:
        """See `NodeRanks.poll`."""
        found: tuple[list[tuple[int, Any]], float] = self._actor.ask("ask", "poll", within_s)
        if not found[0]:
            self._look()
        return found

    def look(self, within_s: float) -> None:
        """See `NodeRanks.look`."""
        self._actor.ask("ask", "look", within_s)
        self._look()

    def end(self) -> None:
        """See `NodeRanks.end`."""
        with contextlib.suppress(LaunchError):  # the kernel has ended the ranks of an actor that is gone
            self._actor.ask("ask", "end")


class ClusterEngine:
    """An engine behind its actor, with what the controller asks of an `EngineProcess`.

    `started` is what `EngineNode.start` returns.
    """

    def __init__(self, actor: Actor, started: tuple[str, int]) -> None:
        self._actor, self.vigil = actor, Vigil()
        self.socket_path, self.pid = started

    def watch(self, on: bool) -> None:
        """See `EngineProcess.watch`; the cluster looks for the death of one."""

    def ended(self, within_s: float) -> bool:
        """Wait at most so many seconds for its end; True if it has ended."""
        try:
            return bool(self._actor.ask("ended", within_s))
        except LaunchError:
            return True

    def end(self) -> None:
        """End it and its actor, as far as they live."""
        self._actor.end("close")


class Cluster(Launcher):
    """Nodes that a run has, with the actor of each.

    `nodes` are as `ray.nodes` describes them, and `adopted` the arguments of `NodeServer.adopt`.

    Attributes:
        ranks_here: ranks of the trainer on the driver's host.
    """

    def __init__(
        self, nodes: Sequence[Mapping[str, Any]], adopted: tuple[Any, ...], stack: contextlib.ExitStack,
        world_size: int,
    ) -> None:  # fmt: skip
        self._nodes, self._adopted, self._stack = nodes, adopted, stack
        self.ranks_here = len(self._on_host(0, world_size))
        addresses = [str(node["NodeManagerAddress"]) for node in nodes]
        self._addresses = addresses if len(set(addresses)) > 1 else [LOOPBACK] * len(nodes)
        self._raylets = Raylets()
        self._trainers: list[Actor] = []
        self._engines: list[Actor] = []
        self._started: list[ClusterEngine] = []

    def actors(self, kind: type, role: str) -> list[Actor]:
        """Start an actor of a kind on every node; it has a method `close`."""
        return [self._actor(kind, role, node) for node in self._nodes]

    def load(self, preload: str, deadline_s: float, vigil: Vigil | None = None) -> None:
        """Start the trainer's actors and their launchers, which import while the caller goes on.

        A death of what a vigil watches on this host ends a job, and that of a raylet the wait for any actor.
        """
        self._vigil = vigil or Vigil()
        for place, node in enumerate(self._nodes):
            self._raylets.watch(node, f"the raylet on {self._name(place)}")
        self._trainers = self.actors(TrainerNode, "trainer")
        for actor in self._trainers:
            actor.ask("load", preload, deadline_s)

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """Start a job on all nodes, one of a single rank on the first; see `Launcher.submit`."""
        require_ranks(spec.world_size, len(self._nodes))
        nodes = list(zip(self._trainers, self._addresses, strict=True))[: spec.world_size]
        count, rendezvous, parts = spec.world_size // len(nodes), None, list[Any]()
        for place, (actor, address) in enumerate(nodes):
            ranks = range(place * count, (place + 1) * count)
            on_host = self._on_host(place, spec.world_size)
            rendezvous = actor.ask("submit", spec, ranks, address, rendezvous, on_host, within_s=spec.deadline_s)
            parts.append(ActorRanks(actor, self._name(place) if len(self._nodes) > 1 else "", ranks, self._look))
        return ForkJob(parts, spec, on_progress)

    def close(self) -> None:
        """See `Launcher.close`."""
        while self._trainers:
            self._trainers.pop().end("close")

    def engines(self, configs: Sequence[EngineConfig], until: Deadline, *, watched: bool) -> list[ClusterEngine]:
        """Start engines, see `node_of`, and wait until all have loaded their model.

        If they are `watched`, the death of one ends the waits for ranks.
        """
        starting, deadline_s = [], until.left("the engine was started")
        for number, config in enumerate(configs):
            place = node_of(number, len(self._nodes))
            name = "the engine" if len(configs) == 1 else f"engine {number} ({self._name(place)})"
            host = self._addresses[place] if place else ""
            actor = self._actor(EngineNode, "engine", self._nodes[place])
            starting.append((actor, actor.start("start", config, name, host, deadline_s)))
        self._started = [ClusterEngine(actor, actor.answer(ref, deadline_s + _ACTOR_S)) for actor, ref in starting]
        self._engines += [actor for actor, _ in starting] if watched else []
        return self._started

    def stop_engines(self) -> None:
        """End the engines that were started last, dead or alive."""
        for engine in self._started:
            engine.end()

    def _on_host(self, place: int, world_size: int) -> range:
        """Ranks on the host of a node: those of all nodes with its address, which follow each other."""
        hosts = [str(node["NodeManagerAddress"]) for node in self._nodes][:world_size]
        first, count = hosts.index(hosts[place]), world_size // len(hosts)
        return range(first * count, (first + hosts.count(hosts[place])) * count)

    def _look(self) -> None:
        """Raise the error of an engine that has died, or of its actor, or of another process of the run."""
        self._vigil.look()
        for actor in self._engines:
            actor.ask("look")

    def _name(self, place: int) -> str:
        node = self._nodes[place]
        return f"node {place}, {node['NodeManagerAddress']}"

    def _actor(self, kind: type, role: str, node: Mapping[str, Any]) -> Actor:
        """Start an actor on a node, and give it what the driver's children would have."""
        name = f"the {role}'s actor on {self._name(self._nodes.index(node))}"
        actor = Actor(_on(node, kind, max_restarts=0, max_task_retries=0).remote(), name, self._raylets)
        self._stack.callback(actor.end, "close")
        there, here = actor.ask("adopt", *self._adopted), identity()
        for item in here:
            if there[item] != here[item]:
                raise UsageError(
                    f"{self._name(self._nodes.index(node))} has {item} {there[item]}, this one has {here[item]}: "
                    "install the same on every node"
                )
        return actor
