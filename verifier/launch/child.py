"""Processes started for a run: each leads a session, ends with its owner, and is waited for by a descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, TypeVar

from verifier.errors import InternalError, UsageError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(__file__).resolve().parents[2])
"""Folder that must be importable for this package to be."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verifier.launch.child import boot; boot()"
_LAST_LINES, _LONGEST = 12, 1 << 20
_REAP_S = 10.0
_GRACE_S = 3.0
"""Seconds that processes have to end by themselves."""


class Child:
    """A process that leads a session of its own: our child, or a fork server's.

    `pid` is the id of its session and process group too. `collect` waits for its end and returns its exit status as
    `subprocess` gives it; None if nobody knows.
    """

    def __init__(self, pid: int, collect: Callable[[], int | None]) -> None:
        self.pid = pid
        self._pid_fd = os.pidfd_open(pid)  # nobody else has it: it is not collected yet
        self._collect = functools.cache(collect)

    def ended(self, within_s: float = 0.0) -> bool:
        """Wait at most so many seconds for its end; True if it has ended."""
        return self._pid_fd < 0 or bool(connection.wait([self._pid_fd], max(within_s, 0.0)))

    def cause_of_death(self) -> str | None:
        """Wait for its end: "exit status 7" or "killed by SIGKILL"; None if nobody knows."""
        code = self._collect()
        return None if code is None else described(code)

    @property
    def stopped(self) -> bool:
        """A signal such as SIGSTOP has stopped it, and nothing has continued it since.

        Source:
            proc_pid_stat(5): the state is T, or t under a tracer.
        """
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def fileno(self) -> int:
        """Descriptor that becomes readable when it ends."""
        return self._pid_fd

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it has not ended."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, signum)

    def stop(self, grace_s: float = 0.0) -> None:
        """End it and all processes of its group; nothing is left, whatever state they are in.

        They have `grace_s` after SIGTERM, before SIGKILL.

        Raises:
            InternalError: it is still there 10 s after SIGKILL: it hangs in the kernel.
        """
        if self._pid_fd < 0:
            return
        until = time.monotonic() + grace_s
        if grace_s:
            self.send_signal(signal.SIGTERM)
            if self.ended(grace_s):
                self._collect()
            while self._signal_group(0) and time.monotonic() < until:
                time.sleep(0.02)
        self._signal_group(signal.SIGKILL)
        self.send_signal(signal.SIGKILL)  # it leads no group yet if it has only just been forked
        if not self.ended(_REAP_S):
            raise InternalError(f"process {self.pid} is still there {_REAP_S:g} s after SIGKILL")
        self._collect()
        os.close(self._pid_fd)
        self._pid_fd = -1

    def _signal_group(self, signum: int) -> bool:
        """Signal all processes of the group; False if there are none, alive or not collected."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def described(code: int) -> str:
    """An exit status as `subprocess` gives it: "exit status 7" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit status {code}"
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


IDLE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads sleep at a barrier. Spinning ones lose their core to another process in the middle of an operation:
two beside a busy process take 7 to 16 ms for a product of [64, 576] and [576, 1536], 2 ms if they sleep, 1 ms alone."""
KEPT_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)
}  # fmt: skip
"""Memory of up to 1 GiB that is freed is kept for what comes next, in pages of 2 MiB. glibc gives arrays above 32 MiB
back at once, so that each temporary of log-probabilities over a vocabulary of 50 thousand is faulted in again, page by
page: float64 log-softmax and entropy of 290 rows take 1.0 s so, 0.2 s with memory that is kept."""


def give_memory_back() -> None:
    """Give what nothing refers to, and `KEPT_MEMORY` keeps, back to the kernel."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def spawn(
    function: str,
    arguments: Sequence[str],
    log: IO[bytes],
    *,
    death_signal: int,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Call a function in an interpreter of its own, with the module path of this one.

    `log` receives stdout and stderr. `death_signal` is sent to the process when the thread that calls this ends,
    however it ends; 0: none.
    """
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))
    popen = subprocess.Popen(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(os.getpid()), str(death_signal), function, *arguments],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=pass_fds, start_new_session=True,
        env={**IDLE_THREADS, **KEPT_MEMORY, **os.environ, "PYTHONPATH": path, **(environment or {})},
    )  # fmt: skip
    return Child(popen.pid, popen.wait)


def boot() -> None:
    """The other side of `spawn`."""
    owner_pid, death_signal, function, *arguments = sys.argv[2:]
    if int(death_signal):
        die_with_parent(int(owner_pid), int(death_signal))
    resolve(function)(*arguments)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that created it ends, also if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def end_with_owner() -> None:
    """Have this process, which multiprocessing started, end when its owner has ended, by whatever."""
    owner = multiprocessing.parent_process()
    if owner is None:
        raise InternalError("multiprocessing did not start this process")

    def follow() -> None:
        connection.wait([owner.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="follows its owner").start()


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call in a thread that nothing waits for at the end: what it waits for itself has deadlines, and may have died."""
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


def entered(within: Sequence[str], *given: Any) -> contextlib.AbstractContextManager[Any]:
    """The context manager that a function of this name makes, called with `given` and its further arguments, if any."""
    if not within:
        return contextlib.nullcontext()
    function, *arguments = within
    found: contextlib.AbstractContextManager[Any] = resolve(function)(*given, *arguments)
    return found


def resolve(name: str) -> Callable[..., Any]:
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


def end_of(log: Path) -> bytes:
    """The last bytes of a log; nothing of one that is gone."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST))
        return file.read()
    return b""


def last_lines(log: Path | IO[bytes]) -> str:
    """The end of a log as the end of an error's sentence; empty if there is none."""
    if isinstance(log, Path):
        text = end_of(log)
    else:
        log.seek(0)
        text = log.read()
    lines = text.decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join(["; its last words:", *lines]) if lines else ""


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Have all processes that descend from this one now, and a folder, removed if this process is killed."""
    theirs, ours = os.pipe()
    pids = [str(pid) for pid in descendants(os.getpid())]
    with tempfile.TemporaryFile() as log:
        keeper = spawn(
            "verifier.launch.child:keep", [str(theirs), str(folder), *pids], log, death_signal=0, pass_fds=[theirs]
        )
        os.close(theirs)
        try:
            yield
        finally:
            keeper.stop()  # before its pipe is closed: there is nothing for it to do
            os.close(ours)


def keep(owner_fd: str, folder: str, *pids: str) -> None:
    """Be the keeper: wait for the owner's end, then end its processes and remove its folder."""
    fds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(int(pid)))
    os.read(int(owner_fd), 1)
    time.sleep(_GRACE_S)
    for fd in fds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """Processes that descend from one, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found
