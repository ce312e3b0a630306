"""What a forked rank does, from the fork to its last breath."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from verifier import errors
from verifier.errors import UsageError
from verifier.launch import flight_recorder as flight

JSON = Any
_PR_SET_PDEATHSIG = 1
_STORE_GRACE_S = 30.0
"""How much longer than the watchdog gloo itself waits, so that the watchdog, which can say more, speaks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank function gets: who it is, where it may write, and its arguments."""

    rank: int
    world_size: int
    run_dir: Path
    args: Mapping[str, JSON]
    report: Callable[[dict[str, JSON]], None]
    """Send one JSON message to the process that watches; rank functions use `progress`."""

    def progress(self, text: str) -> None:
        """Show a line to the user while the job runs."""
        self.report({"progress": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What the forking process decided about one rank."""

    rank: int
    world_size: int
    run_dir: Path
    function: Callable[[RankContext], JSON]
    args: Mapping[str, JSON]
    collective_deadline_s: float
    num_gpus: int
    """How many of the host's GPUs the ranks take, in turn; 0: all."""
    memory: mmap.mmap
    store_port: int
    store_fd: int | None
    """The listening socket of the store, on rank 0."""
    report_fd: int
    watcher_pid: int


class Capture:
    """A `with` block that ends normally whatever was raised inside, and keeps what it was as JSON."""

    def __init__(self) -> None:
        self.failure: dict[str, JSON] | None = None

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None and error is not None:
            message = str(error)
            ours = next((item.__name__ for item in kind.__mro__ if item.__module__ == errors.__name__), "")
            self.failure = {
                "error": ours or kind.__name__,
                "message": message,
                "cause": f"{kind.__name__}: {message}".rstrip(": "),
                "traceback": "".join(traceback.format_exception(kind, error, trace)),
            }
        return True


def resolve(name: str) -> Callable:
    """The function that "package.module:function" names.

    Raises:
        UsageError: it is not spelled like that, or there is no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"`{name}` does not name a function: write package.module:function")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise UsageError(f"`{module_name}` has no function `{function_name}`")
    return function


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Have the kernel send this process `signum` when its parent dies, also if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's stdout and stderr go."""
    return run_dir / f"rank{rank:03d}.log"


def stack_path(run_dir: Path, rank: int) -> Path:
    """Where a rank writes its Python stack when it gets SIGUSR1."""
    return run_dir / f"rank{rank:03d}.stack"


def run_rank(setup: RankSetup) -> NoReturn:
    """Be a rank: join the process group, call the function, report its result or its failure, wait to be ended.

    A rank that is done stays until all are, since others may still use its connections; the watcher then kills all.
    """
    die_with_parent(setup.watcher_pid, signal.SIGKILL)
    with Capture() as capture:
        _redirect_output(setup)
        _join(setup)
        context = RankContext(
            rank=setup.rank,
            world_size=setup.world_size,
            run_dir=setup.run_dir,
            args=setup.args,
            report=lambda message: _send(setup.report_fd, message),
        )
        result = setup.function(context)
        line = json.dumps({"result": result})
        sys.stdout.flush()
        sys.stderr.flush()
        _write(setup.report_fd, line)
    if capture.failure is not None:
        with contextlib.suppress(OSError):
            _send(setup.report_fd, {"failure": capture.failure})
        os._exit(1)
    while True:
        time.sleep(3600)


def _redirect_output(setup: RankSetup) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    log = os.open(log_path(setup.run_dir, setup.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stack = open(stack_path(setup.run_dir, setup.rank), "w")  # noqa: SIM115 - stays open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


def take_gpu(rank: int, world_size: int, num_gpus: int) -> int:
    """This rank's GPU: ranks take them in turn, and share them where there are more ranks.

    NCCL refuses two ranks on one GPU of a host. Ranks that share are hosts of their own to it, and talk by sockets, as
    ranks of several hosts do without InfiniBand.

    Returns:
        The GPU's number among those that this process sees.
    """
    if world_size > num_gpus:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return rank % num_gpus


def _join(setup: RankSetup) -> None:
    """Initialise torch.distributed on the store whose socket was bound before the fork; with GPUs, over NCCL too."""
    import torch
    import torch.distributed as dist

    from verifier.launch.gloo_device import share_device
    from verifier.platform import select

    backends, gpu = "gloo", setup.rank
    if select() == "cuda":
        backends = "cpu:gloo,cuda:nccl"
        gpu = take_gpu(setup.rank, setup.world_size, setup.num_gpus or torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(gpu),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.store_port),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share_device()
    recorder = flight.Recorder(setup.memory, setup.rank)
    flight.activate(recorder)
    everyone = flight.group_key("init_process_group", range(setup.world_size))
    recorder.wait(recorder.enter(everyone, b"init_process_group", b"", None))
    timeout = datetime.timedelta(seconds=setup.collective_deadline_s + _STORE_GRACE_S)
    store = dist.TCPStore(
        "127.0.0.1",
        setup.store_port,
        world_size=setup.world_size,
        is_master=setup.store_fd is not None,
        timeout=timeout,
        master_listen_fd=setup.store_fd,
    )
    dist.init_process_group(backends, store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)
    recorder.leave()


def _send(fd: int, message: dict[str, JSON]) -> None:
    _write(fd, json.dumps(message))


def _write(fd: int, line: str) -> None:
    """Write one line whole; a pipe takes long ones in pieces."""
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]
