"""The engine's own process: ``python -m verifier.engine.server SOCKET CONFIG PARENT``.

One thread accepts, one per connection reads; the main thread alone touches the engine, one request at a time. The
socket listens before the model is loaded, so requests may be sent early and wait.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from msgspec import convert, to_builtins

from verifier.engine import channel
from verifier.engine.api import Engine, EngineConfig, Sampling, refuse_unsupported
from verifier.engine.errors import CARRIED, to_record
from verifier.engine.process import die_with_parent, keep_freed_memory
from verifier.errors import InternalError, UsageError, VerifierError
from verifier.model.checkpoint import open_checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.platform.upstream_fixes import ENGINE_VARIABLE
from verifier.transport.wire import Address

_MAX_FOLDER = 107 - len("/01234567-0123-0123-0123-0123456789ab")
"""Bytes of a socket's path that Linux takes (unix(7), sun_path), less what vLLM calls its sockets."""
Request = tuple[socket.socket, str, dict[str, Any]]
VLLM_ENVIRONMENT = {
    # No separate engine core: the driver is this process, and its workers are forked from it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""What must stand before torch and vLLM are imported: nothing is compiled, idle threads sleep, nothing is fetched."""

ONE_THREAD_BYTES = 16 << 20
"""Greatest checkpoint that transformers runs on one thread: to wake another takes longer than what it would do."""
KEPT_MEMORY_BYTES = 64 << 20
"""Greatest checkpoint whose process keeps what it frees: with a larger one it grows by a third, and wins no time."""


def load(config: EngineConfig) -> Engine:
    """Start the engine cold from its checkpoint.

    Raises:
        UsageError: a damaged checkpoint, an architecture that this engine cannot run here, or vLLM not installed.
    """
    checkpoint = open_checkpoint(config.checkpoint)
    os.environ.update({**VLLM_ENVIRONMENT, **environment(config, checkpoint.num_bytes)})
    if config.kind == "hf":
        if checkpoint.num_bytes <= KEPT_MEMORY_BYTES:
            keep_freed_memory()
        from verifier.engine.engine_hf import HfEngine

        return HfEngine(config)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vLLM is not installed; install it, or use --engine hf")
    import torch

    refuse_unsupported(checkpoint.config, on_cpu=not torch.cuda.is_available())
    from verifier.engine.vllm import engine_vllm

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine_vllm.preload()
    return engine_vllm.VllmEngine(config)


def environment(config: EngineConfig, checkpoint_bytes: int) -> dict[str, str]:
    """Environment variables of this engine: its share of the cores for each rank, and its GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // config.tp)
    bound = "|".join(
        ",".join(str(cores[(rank * share + item) % len(cores)]) for item in range(share)) for rank in range(config.tp)
    )
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        ENGINE_VARIABLE: ",".join(config.fixes),
        "OMP_NUM_THREADS": "1" if config.kind == "hf" and checkpoint_bytes <= ONE_THREAD_BYTES else str(share),
        **({"CUDA_VISIBLE_DEVICES": config.gpus} if config.gpus else {}),
    }


def answers(engine: Engine) -> dict[str, Callable[..., Any]]:
    """Request name -> what answers it with a JSON value."""
    return {
        "num_ranks": lambda: engine.num_ranks,
        "logprobs": engine.logprobs,
        "generate": lambda prompts, sampling: to_builtins(engine.generate(prompts, convert(sampling, Sampling))),
        "state": lambda: to_builtins(engine.state()),
        "checkpoint_view": lambda: to_builtins(engine.checkpoint_view()),
        "poison": lambda: to_builtins(engine.poison()),
        "connect": lambda address: engine.connect(Address(**address)),
        "begin_update": lambda plan: to_builtins(engine.begin_update(ChunkPlan.from_json(plan))),
        "receive": lambda chunk: to_builtins(engine.receive(chunk)),
        "finish_update": engine.finish_update,
        "reset_prefix_cache": engine.reset_prefix_cache,
        "load_adapter": engine.load_adapter,
        "sleep": engine.sleep,
        "wake_up": engine.wake_up,
        "call": engine.call,
        "call_driver": lambda module, function, arguments: getattr(importlib.import_module(module), function)(
            engine, *arguments
        ),
    }


def serve(socket_path: str, config: EngineConfig) -> None:
    """Listen, load, answer until terminated."""
    requests: queue.Queue[Request] = queue.Queue()
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(f"{socket_path}.opening")
    door.listen()
    os.rename(f"{socket_path}.opening", socket_path)  # who sees the path can connect
    threading.Thread(target=_accept, args=(door, requests), daemon=True).start()
    if len(os.fsencode(folder := os.path.dirname(socket_path))) <= _MAX_FOLDER:
        os.environ["VLLM_RPC_BASE_PATH"] = folder  # vLLM leaves its sockets there; they go with the folder
    try:
        engine = load(config)
    except VerifierError as error:
        _refuse_all(requests, error)
    table = answers(engine)
    try:
        while True:
            sock, name, arguments = requests.get()
            _reply(sock, _answer(table, name, arguments))
    finally:
        engine.shutdown()


def _answer(table: dict[str, Callable[..., Any]], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name not in table:
        return to_record(InternalError(f"the engine knows no request `{name}`"))
    try:
        return {"value": table[name](**arguments)}
    except CARRIED as error:
        traceback.print_exc()
        return to_record(error)


def _refuse_all(requests: queue.Queue[Request], error: VerifierError) -> NoReturn:
    while True:
        sock, _, _ = requests.get()
        _reply(sock, to_record(error))


def _reply(sock: socket.socket, reply: dict[str, Any]) -> None:
    try:
        channel.send(sock, reply)
    except channel.ChannelClosed:
        sock.close()  # the client gave up waiting


def _accept(door: socket.socket, requests: queue.Queue[Request]) -> None:
    while True:
        sock, _ = door.accept()
        threading.Thread(target=_read, args=(sock, requests), daemon=True).start()


def _read(sock: socket.socket, requests: queue.Queue[Request]) -> None:
    while True:
        try:
            message = channel.receive(sock, None)
        except channel.ChannelClosed:
            sock.close()
            return
        requests.put((sock, message["request"], message["arguments"]))


def main(socket_path: str, config: str, parent: str) -> None:
    """Entry of the process."""
    die_with_parent()
    if os.getppid() != int(parent):  # it died before the line above
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(socket_path, EngineConfig(**json.loads(config)))


if __name__ == "__main__":
    main(*sys.argv[1:])
