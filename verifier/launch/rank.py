"""A job of ranks, and a forked rank from the fork to its last breath, with the imports that it needs."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from verifier.errors import UsageError
from verifier.launch import flight_recorder as flight
from verifier.launch.channel import Channel, ChannelClosed
from verifier.launch.child import resolve
from verifier.launch.failures import to_record
from verifier.mesh.mesh import Mesh

JSON = Any
LOOPBACK = "127.0.0.1"
"""Address at which ranks of one host meet."""
_STORE_GRACE_S = 30.0
"""Seconds that gloo itself waits beyond the watchdog, so that the watchdog, which can say more, speaks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A function, and the ranks that call it.

    Raises:
        UsageError: a number of ranks that is not the mesh's.
    """

    function: str
    """"package.module:function", called with a RankContext on every rank; returns what JSON can carry."""
    world_size: int
    run_dir: Path
    """Gets a log per rank; made if absent."""
    args: Mapping[str, JSON] = field(default_factory=dict)
    """JSON values; `context.args` on the ranks."""
    deadline_s: float = 600.0
    """Seconds for the whole job."""
    collective_deadline_s: float = 120.0
    """Seconds that any rank may wait in one collective."""
    mesh: Mesh | None = None
    """Names each rank's coordinates in errors."""
    num_gpus: int = 0
    """Number of a host's GPUs, which its ranks take in turn; 0: all."""

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.world_size != self.world_size:
            has = f"mesh {self.mesh.label()} has {self.mesh.world_size} ranks"
            raise UsageError(f"{has}, but {self.world_size} were asked for")

    def place(self, rank: int) -> str:
        """Coordinates of a rank; empty where no mesh is known."""
        return "" if self.mesh is None else str(self.mesh.coordinate(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Argument of a rank function: who it is, where it may write, and its arguments."""

    rank: int
    world_size: int
    run_dir: Path
    args: Mapping[str, JSON]
    report: Callable[[dict[str, JSON]], None]
    """Sends one JSON message to the owner of the job; rank functions use `progress`."""
    receive: Callable[[], JSON]
    """Waits for one JSON message of the owner; rank functions use `serve`."""

    def progress(self, text: str) -> None:
        """Show a line to the user while the job runs."""
        self.report({"progress": text})

    def serve(self, methods: Mapping[str, Callable[..., JSON]]) -> None:
        """Answer the calls of the job's owner (`ForkJob.call`) by these functions, until it asks for the end."""
        while (call := self.receive()) is not None:
            self.report({"answer": methods[call["name"]](**call["arguments"])})


def preload() -> None:
    """Import torch.distributed and wrap its collectives; called in the fork server."""
    import torch

    from verifier.launch import collectives

    torch.set_num_threads(1)
    collectives.install()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # seven groups of 256 ranks have 1,796 open on each


def log_path(run_dir: Path, rank: int) -> Path:
    """File of a rank's stdout and stderr."""
    return run_dir / f"rank{rank:03d}.log"


def stack_path(run_dir: Path, rank: int) -> Path:
    """File of a rank's Python stack, written when it gets SIGUSR1."""
    return run_dir / f"rank{rank:03d}.stack"


def run_rank(
    reports: Channel,
    memory_fd: int,
    store_fd: int | None = None,
    *,
    rank: int,
    run_dir: str,
    address: str,
    here: tuple[int, int],
    rendezvous: tuple[str, int] | None,
    **shared: Any,
) -> NoReturn:
    """Be a rank: join the process group, call the function, report its result or its failure, wait to be ended.

    A rank that is done stays until all are, since others may still use its connections; the owner then kills all.

    `reports` gets any number of "progress" messages and an "answer" to each call, then a "result" or a "failure";
    `memory_fd` is of the flight recorder. `store_fd` is of the file in memory by which ranks of one node find each
    other; of several nodes, the listening socket of the store on rank 0, whose host and port are `rendezvous`. `here`
    is the first rank of this node, and their number; `shared` has further fields of the `JobSpec`.
    """
    job = JobSpec(run_dir=Path(run_dir), **shared)
    try:
        stack = open(stack_path(job.run_dir, rank), "w")  # noqa: SIM115 - stays open for the signal handler
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        call = resolve(job.function)
        flight.RECORDER.use(flight.slots_for(job.world_size, memory_fd)[rank])
        _join(job, rank, store_fd, address, here, rendezvous)
        context = RankContext(
            rank=rank, world_size=job.world_size, run_dir=job.run_dir, args=job.args, report=reports.send,
            receive=reports.receive,
        )  # fmt: skip
        result = call(context)
        sys.stdout.flush()
        reports.send({"result": result})
    except BaseException as error:  # reported to the owner of the job; the process ends
        sys.stdout.flush()
        with contextlib.suppress(ChannelClosed):
            reports.send({"failure": to_record(error)})
        os._exit(1)
    while True:
        time.sleep(3600)


def take_gpu(rank: int, world_size: int, num_gpus: int) -> int:
    """Number, among the GPUs that this process sees, of this rank's: ranks take them in turn, and may share them.

    NCCL refuses two ranks on one GPU of a host. Ranks that share are hosts of their own to it, and talk by sockets, as
    ranks of several hosts do without InfiniBand.
    """
    if world_size > num_gpus:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return rank % num_gpus


def _join(
    job: JobSpec, rank: int, store_fd: int | None, address: str, here: tuple[int, int],
    rendezvous: tuple[str, int] | None,
) -> None:  # fmt: skip
    """Initialise torch.distributed, with GPUs over NCCL too.

    Ranks of one node find each other through a file in memory, which nobody else can open. Those of several nodes have
    torch's TCPStore, which lets whoever reaches its port read, list and write its keys.

    Source:
        torch 2.11, torch/csrc/distributed/c10d/FileStore.cpp: opens its path for each operation; TCPStore.cpp: no
        client is asked who it is.
    """
    import torch
    import torch.distributed as dist

    from verifier.platform import select

    backends, world_size, local_size = "gloo", job.world_size, here[1]
    gpu = rank - here[0]
    if select() == "cuda":
        backends = "cpu:gloo,cuda:nccl"
        gpu = take_gpu(gpu, local_size, job.num_gpus or torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(gpu), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR=LOOPBACK if rendezvous is None else rendezvous[0],
    )  # fmt: skip
    if address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _set_gloo_options(address)
    everyone = flight.group_key("init_process_group", range(world_size))
    with flight.blocked(flight.RECORDER.enter(everyone, "init_process_group")):
        timeout = datetime.timedelta(seconds=job.collective_deadline_s + _STORE_GRACE_S)
        if rendezvous is None:
            store: dist.Store = dist.FileStore(f"/proc/self/fd/{store_fd}", world_size)
        else:
            store = dist.TCPStore(
                *rendezvous,
                world_size,
                store_fd is not None,
                timeout,
                master_listen_fd=store_fd,
                wait_for_workers=False,
            )
        store.set_timeout(timeout)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _set_gloo_options(address: str) -> None:
    """Give every gloo group that this process makes from now on one worker thread, and the same device as all others.

    Gloo gives every group a device of its own, and every device a thread that looks for work a hundred times a second.
    Megatron makes about twenty groups, so 64 ranks on two cores spent more than half of their time waking up for
    nothing. It starts a thread: fork before.

    Torch gives every group two workers, which corrupt the heap (docs/upstream.md): each notes the name of what it has
    done in one string, without a lock.

    Source:
        gloo/transport/tcp/loop.cc: `epoll_wait` with a timeout of 10 ms. torch 2.11, ProcessGroupGloo.cpp:
        `ProcessGroupGloo::Options`; `runLoop` assigns `pgStatus_->lastCompletedWorkName` before `lock.lock()`.
    """
    from torch.distributed import ProcessGroupGloo

    original = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()
    if address != LOOPBACK:  # the default is the address of this host's name, which other hosts may not reach
        device = ProcessGroupGloo.create_device(hostname=address)

    @functools.wraps(original)
    def init(group: Any, *args: Any, timeout: datetime.timedelta | None = None, **kwargs: Any) -> None:
        if timeout is None:  # made with options of its own
            original(group, *args, **kwargs)
            return
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 1, timeout
        original(group, *args, options, **kwargs)

    ProcessGroupGloo.__init__ = init
