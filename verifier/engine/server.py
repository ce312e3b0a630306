"""The engine's own process. It listens before the model is loaded, so requests may be sent early and wait.

One thread accepts, reads and answers: one request at a time touches the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing import AuthenticationError, active_children, connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from verifier.core.outputs import share_as
from verifier.engine.api import CARRIED, Engine, EngineConfig, Sampling, refuse_unsupported, reply_of
from verifier.engine.client import HELLO_S
from verifier.engine.process import DEATH, VLLM_ENVIRONMENT
from verifier.engine.worker_failures import WorkerFailures
from verifier.errors import InternalError, UsageError, VerifierError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed, wrapped
from verifier.launch.child import described
from verifier.launch.failures import StackFailed
from verifier.model.checkpoint import open_checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.platform import CONVOLUTIONS, FLA, FLASHINFER, leave_out
from verifier.platform.upstream_fixes import ENGINE_VARIABLE
from verifier.transport.wire import Address

ONE_THREAD_BYTES = 16 << 20
"""Greatest checkpoint that a CPU runs on one thread: to wake another takes longer than what it would do."""
KEPT_MEMORY_BYTES = 64 << 20
"""Greatest checkpoint whose process keeps what it frees: with a larger one it grows by a third, and wins no time."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MAX_FOLDER = 107 - len("/01234567-0123-0123-0123-0123456789ab")
"""Bytes of a socket's path that Linux takes (unix(7), sun_path), less what vLLM calls its sockets."""
_MAX_WAITING = 128
"""Clients that may connect before the engine is loaded."""
_LOOK_S = 0.5
"""Seconds between two looks for workers that have started; the end of one is seen at once."""
_REQUEST_S = 60.0
"""Seconds that a client may stop in the middle of a request."""
_REQUESTS = frozenset(name for name in vars(Engine) if not name.startswith("_")) - {"shutdown"}
_READ = {
    "sampling": lambda found: msgspec.convert(found, Sampling),
    "address": lambda found: msgspec.convert(found, Address),
    "plan": ChunkPlan.from_json,
}
"""Arguments of requests that are no JSON values -> function of their JSON form."""


def preload() -> None:
    """Import all that vLLM's engine servers need, in the fork server. Without vLLM nothing: each server says so itself.

    Raises:
        InternalError: an import has started CUDA, so that nothing could be forked.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    import torch

    from verifier.platform.cuda import require_not_started

    _vllm().preload()
    if torch.cuda.device_count():
        require_not_started()


def _vllm() -> ModuleType:
    """The module of vLLM's engine. vLLM looks for flashinfer once, while it is imported, so that is left out before."""
    leave_out(FLASHINFER)
    from verifier.engine.vllm import engine_vllm

    return engine_vllm


def load(config: EngineConfig, failures: WorkerFailures) -> Engine:
    """Start the engine cold from its checkpoint; `failures` listens to its workers.

    Raises:
        UsageError: a damaged checkpoint, an architecture that this engine cannot run here, or vLLM not installed.
    """
    checkpoint = open_checkpoint(config.checkpoint)
    os.environ.update({**VLLM_ENVIRONMENT, **environment(config, checkpoint.num_bytes)})
    if config.kind == "hf":
        leave_out(FLA, CONVOLUTIONS)  # transformers would compute by a GPU's kernels what lies on the host
        if checkpoint.num_bytes <= KEPT_MEMORY_BYTES:
            keep_freed_memory()
        import torch

        from verifier.engine.engine_hf import HfEngine

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it may have been imported before the fork
        return HfEngine(config)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vLLM is not installed; install it, or use --engine hf")
    import torch

    on_cpu = not torch.cuda.is_available()
    refuse_unsupported(checkpoint.config, on_cpu=on_cpu, tp=config.tp, pp=config.pp, ep=config.ep)
    engine_vllm = _vllm()
    if not on_cpu:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine_vllm.preload()
    failures.listen()
    return engine_vllm.VllmEngine(config)


def environment(config: EngineConfig, checkpoint_bytes: int) -> dict[str, str]:
    """Environment variables of this engine: threads of each rank, its share of the cores, and its GPUs."""
    share = max(1, len(os.sched_getaffinity(0)) // config.ranks)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        ENGINE_VARIABLE: ",".join(config.fixes),
        "OMP_NUM_THREADS": "1" if checkpoint_bytes <= ONE_THREAD_BYTES else str(share),
        **({"CUDA_VISIBLE_DEVICES": config.gpus} if config.gpus else {}),
    }


def keep_freed_memory() -> None:
    """Have this process reuse the memory of large tensors. Given back, the pages of every next one are faulted in anew.

    In a scan of state-space layers on a CPU that takes longer than the arithmetic does.

    Source:
        mallopt(3): no allocation is a mapping of its own, and the heap's top is not trimmed (glibc; elsewhere nothing
        changes).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


class EngineServer:
    """Clients' connections, and what answers their requests: first nothing, then the engine, or why there is none."""

    def __init__(self, socket_path: str) -> None:
        self._death, self._ending = Path(socket_path).with_name(DEATH), threading.Event()
        self._failures = WorkerFailures(Path(socket_path).with_name("failures"))
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(socket_path)
        self._door.listen(_MAX_WAITING)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._engine: Engine | VerifierError

    def run(self, config: EngineConfig) -> NoReturn:
        """Load the engine, and answer until terminated; an engine that could not be loaded answers with the reason."""
        try:
            if config.kind == "vllm":
                threading.Thread(target=self._end_with_a_worker, daemon=True).start()
            self._engine = load(config, self._failures)
        except VerifierError as error:
            self._engine = error
        except Exception as error:
            failure = self._failures.of(error)
            if failure is None:
                raise
            traceback.print_exc()
            self._engine = StackFailed(failure)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        client = Channel(connection.Connection(self._door.accept()[0].detach()))
                        self._selector.register(client, selectors.EVENT_READ, client)
                    else:
                        self._serve(key.data)
        finally:
            self._ending.set()
            if not isinstance(self._engine, VerifierError):
                self._engine.shutdown()

    def end(self) -> NoReturn:
        """Leave `run`."""
        self._ending.set()
        sys.exit(0)

    def _listen(self, host: str) -> str:
        """Listen at an address of this host too, for clients who know a key; the `place` of an `EngineClient`."""
        door, key = socket.create_server((host, 0), backlog=_MAX_WAITING), secrets.token_hex(32)
        threading.Thread(target=self._admit, args=(door, key.encode()), daemon=True).start()
        return f"{key}@{host}:{door.getsockname()[1]}"

    def _admit(self, door: socket.socket, key: bytes) -> NoReturn:
        """Let in who proves that he knows the key; a silent stranger keeps others waiting for `HELLO_S`."""
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                guest = wrapped(door.accept()[0], HELLO_S)
                connection.deliver_challenge(guest, key)
                connection.answer_challenge(guest, key)
                self._selector.register(client := Channel(guest), selectors.EVENT_READ, client)

    def _end_with_a_worker(self) -> None:
        """End this process when a signal has killed a worker, and leave the reason in a file.

        vLLM notices, and says neither the signal nor that there was one. Workers that vLLM ends itself, after one that
        failed to start or at the end, are not meant.
        """
        workers: set[Any] = set()
        while not (codes := {item.name: item.exitcode for item in workers if item.exitcode is not None}):
            workers.update(active_children())
            connection.wait([item.sentinel for item in workers], _LOOK_S) if workers else time.sleep(_LOOK_S)
        name, code = next(iter(codes.items()))
        if max(codes.values()) < 0 and -signal.SIGTERM not in codes.values() and not self._ending.is_set():
            self._death.write_text(f"its worker {name} was {described(code)}")
            os._exit(1)

    def _serve(self, client: Channel) -> None:
        try:
            client.send(reply_of(self._answer, **client.receive(_REQUEST_S)))
        except (ChannelClosed, DeadlinePassed):  # it went away, or gave up waiting
            self._selector.unregister(client)
            client.close()

    def _answer(self, request: str, arguments: dict[str, Any]) -> Any:
        if isinstance(self._engine, VerifierError):
            raise self._engine.with_traceback(None)  # else it grows by each request
        if request == "listen":
            return self._listen(**arguments)
        if request not in _REQUESTS:
            raise InternalError(f"the engine knows no request `{request}`")
        given = {name: _READ[name](value) if name in _READ else value for name, value in arguments.items()}
        self._failures.clear()
        try:
            return getattr(self._engine, request)(**given)
        except VerifierError:
            raise
        except CARRIED as error:  # of a worker's failure vLLM says that there was one
            if (failure := self._failures.of(error)) is not None:
                raise StackFailed(failure) from error
            if self._failures.heard:
                raise InternalError(f"{type(error).__name__}: {error}") from error
            raise


def forked(channel: Channel, socket_path: str, config: str) -> NoReturn:
    """Be an engine server that a fork server forked; clients connect to its socket instead of the channel."""
    channel.close()
    main(socket_path, config)


def main(socket_path: str, config: str) -> NoReturn:
    """Be an engine server that listens at a socket; its config is JSON."""
    server = EngineServer(socket_path)
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    folder = os.path.dirname(socket_path)
    share_as(Path(folder))
    if len(os.fsencode(folder)) <= _MAX_FOLDER:
        os.environ["VLLM_RPC_BASE_PATH"] = folder  # vLLM leaves its sockets there; they go with the folder
    server.run(msgspec.json.decode(config, type=EngineConfig))
