"""Start of a local Ray, or the way into a cluster, for one run; nothing of either is left at its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # absent from its stub
from ray.exceptions import RayError

from verifier.config.cluster import LOCAL, RayOptions
from verifier.core.outputs import work_folder
from verifier.errors import InternalError, UsageError
from verifier.launch.child import kept
from verifier.platform.provenance import require_installed
from verifier.runs.cluster_ray import Cluster
from verifier.runs.node_servers import forwarded

SILENT_S = 20.0
"""Seconds that a Ray address may be silent."""
_STORE_BYTES = 80 << 20
"""Object store of a local Ray, the smallest that it takes with room: no weights pass through it."""
_MAX_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes of a socket's path that Linux takes (unix(7), sun_path), less what Ray calls its sockets."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""First bytes of a client of HTTP/2, on which gRPC is built, with empty settings (RFC 9113, 3.4)."""


@contextlib.contextmanager
def joined(options: RayOptions, run: Path, world_size: int) -> Iterator[Cluster]:
    """Start a local Ray, or join a cluster, and leave nothing at exit.

    The folder of the run gets the token of a local Ray.

    Raises:
        UsageError: nobody answers at the address, or the cluster has too few nodes.
    """
    require_installed("ray")
    if world_size % options.nodes:
        raise UsageError(
            f"ray.nodes is {options.nodes}, which does not divide the {world_size} ranks of the mesh: choose another"
        )
    with contextlib.ExitStack() as stack:
        if options.address == LOCAL:
            stack.enter_context(_local_environment(run))
            Config.initialize("")  # ray read the mode of authentication when it was imported
            AuthenticationTokenLoader.instance().reset_cache()
            folder = stack.enter_context(work_folder("ray"))
            if len(os.fsencode(folder)) > _MAX_FOLDER:
                raise UsageError(
                    f"the folder for temporary files, `{folder.parent}`, has too long a name for Ray's sockets: set "
                    "TMPDIR to another"
                )
            where: dict[str, Any] = {
                "num_cpus": os.cpu_count(), "num_gpus": 0, "object_store_memory": _STORE_BYTES,
                "include_dashboard": False, "_temp_dir": str(folder),
            }  # fmt: skip
        else:
            require_answer(options.address)
            where = {}
        stack.callback(ray.shutdown)
        _init(options.address, **where)
        if options.address == LOCAL:  # two of Ray's agents would outlive a driver that is killed, by a minute
            stack.enter_context(kept(folder))
        mark = run / f"seen-{secrets.token_hex(8)}"
        mark.touch()
        stack.callback(mark.unlink, missing_ok=True)
        adopted = (forwarded(os.environ), list(sys.path), os.getcwd(), str(mark.absolute()))
        yield Cluster(_nodes(options), adopted, stack, world_size)


def require_answer(address: str, within_s: float = SILENT_S) -> None:
    """Refuse an address at which nobody speaks gRPC."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), within_s) as wire:
            wire.sendall(_HTTP2)
            if len(wire.recv(9)) == 9:  # the header of the server's own settings
                return
            why = "it closed the connection"
    except TimeoutError:
        why = f"it was silent for {within_s:g} s"
    except OSError as problem:
        why = problem.strerror or str(problem)
    raise UsageError(f"no Ray answers at ray.address={address} ({why}): start the cluster, or leave it out")


def _init(address: str, **where: Any) -> None:
    """Call `ray.init`, and keep the handler of SIGTERM, which it replaces."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **where)
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as problem:
        text = (str(problem).strip() or repr(problem)).splitlines()[0]
        if address == LOCAL:
            raise InternalError(f"Ray did not start: {text}") from problem
        raise UsageError(f"Ray cannot be joined at ray.address={address}: {text}") from problem
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, before)


def _nodes(options: RayOptions) -> list[Mapping[str, Any]]:
    """Nodes of the run: the driver's own, the others of its host, then those of each other host, by their id."""
    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) < options.nodes:
        raise UsageError(f"ray.nodes is {options.nodes}, the cluster has {len(alive)}: make it smaller")
    host = next((node["NodeManagerAddress"] for node in alive if node["NodeID"] == own), None)
    order = [
        (node["NodeID"] != own, node["NodeManagerAddress"] != host, node["NodeManagerAddress"], node["NodeID"])
        for node in alive
    ]
    return [node for _, node in sorted(zip(order, alive, strict=True), key=lambda item: item[0])][: options.nodes]


@contextlib.contextmanager
def _local_environment(run: Path) -> Iterator[None]:
    """Set what Ray's own processes inherit: a token in the run's folder, no GPUs hidden, no word to others."""
    token = run / "ray_token"
    token.unlink(missing_ok=True)
    with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    values = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.absolute()),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        token.unlink(missing_ok=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
