"""Servers that a Ray actor runs on a node: one owns the launcher of trainer ranks, one an engine. Imports no ray.

An actor has many threads, so it forks nothing: its children are interpreters of their own, which the kernel ends with
the actor's main thread, on which its methods run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import UsageError
from verifier.launch.child import described
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.node_ranks import NodeRanks
from verifier.launch.rank import JobSpec
from verifier.launch.watchdog import Vigil
from verifier.platform.provenance import PINS, code_digest, installed

FORWARDED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TMPDIR", "XDG_CACHE_HOME")
FORWARDED_PREFIXES = (
    "CUBLAS_", "GLOO_", "HF_", "MEGATRON_", "MKL_", "NCCL_", "NVTE_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRANSFORMERS_",
    "TRITON_", "VERIFIER_", "VLLM_",
)  # fmt: skip
"""Names, and beginnings of names, of variables that actors and their children take from the driver, absent ones too."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of an environment that are forwarded."""
    kept = (name for name in environment if name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
    return {name: environment[name] for name in kept}


def identity() -> dict[str, str]:
    """Versions of Python and of pinned libraries, and a digest of this package's files."""
    versions = {name: installed(name) or "absent" for name in PINS}
    return {"python": platform.python_version(), **versions, "verifier's files": code_digest()}


def raylet_end() -> str:
    """Wait on a node for the end of its raylet, which has started this process; how it ended, in words.

    Source:
        proc_pid_stat(5): field 52 has the exit status of a process that nobody has collected.
    """
    raylet = os.getppid()
    connection.wait([os.pidfd_open(raylet)])
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()
        return described(os.waitstatus_to_exitcode(int(fields[49])))
    return "without an exit status that is known"


class NodeServer:
    """Environment and identity of a node."""

    def adopt(self, environment: Mapping[str, str], path: Sequence[str], folder: str, marked: str) -> dict[str, str]:
        """Take over what the driver's children would inherit; return the node's `identity`.

        Variables that are forwarded and not among these are removed. `path` comes before this process's own modules.
        The driver has written the file `marked` into the run's folder.

        Raises:
            UsageError: this node does not see the driver's folders.
        """
        for name in forwarded(os.environ).keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = [*path, *(item for item in sys.path if item not in path)]
        if not Path(marked).is_file() or not Path(folder).is_dir():
            raise UsageError(
                f"the node {socket.gethostname()} does not see `{folder}` and `{Path(marked).parent}`: put both on "
                "storage that all nodes share"
            )
        os.chdir(folder)
        return identity()


class TrainerNode(NodeServer):
    """Launcher of a node's trainer ranks."""

    def load(self, preload: str, load_deadline_s: float) -> None:
        """Start the launcher, which imports while the caller goes on."""
        self._launcher = ForkLauncher(preload=preload, load_deadline_s=load_deadline_s)
        self._launcher.start()

    def submit(
        self, spec: JobSpec, ranks: range, address: str, rendezvous: tuple[str, int] | None, on_host: range
    ) -> tuple[str, int] | None:
        """Start this node's ranks of a job, see `NodeRanks`; of several nodes, returns host and port of the store."""
        self._ranks = NodeRanks(self._launcher, spec, ranks, address, rendezvous, on_host)
        return self._ranks.rendezvous

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `NodeRanks`."""
        return getattr(self._ranks, method)(*arguments)

    def close(self) -> None:
        """End the launcher and all ranks."""
        self._launcher.close()


class EngineNode(NodeServer):
    """Engine process."""

    def start(self, config: EngineConfig, name: str, host: str, deadline_s: float) -> tuple[str, int]:
        """Start the engine and wait until it has loaded its model.

        Args:
            config: of the engine.
            name: of the engine, for errors.
            host: address of this node, where other nodes reach the engine; empty on the node of the driver.
            deadline_s: seconds for the start.

        Returns:
            `place` of an `EngineClient` on the driver's node, and process id.
        """
        self._stack, self._vigil = contextlib.ExitStack(), Vigil()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(engine_fork_server(deadline_s, self._vigil))
            self._process = stack.enter_context(EngineProcess(config, server, name, self._vigil))
            with contextlib.closing(self._process.client(deadline_s)) as client:
                client.wait_ready(deadline_s)
                place = client.ask("listen", str, host=host) if host else str(self._process.socket_path)
            self._stack = stack.pop_all()
        return place, self._process.pid

    def ended(self, within_s: float) -> bool:
        """See `EngineProcess.ended`."""
        return self._process.ended(within_s)

    def look(self) -> None:
        """Raise the error of an engine that has died."""
        self._vigil.look()

    def close(self) -> None:
        """End the engine."""
        self._stack.close()
