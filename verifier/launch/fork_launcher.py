"""Run functions on ranks: the light side, which loads neither torch nor anything that needs it.

    with ForkLauncher(preload="verifier.model.provider_megatron:preload") as launcher:
        results = launcher.run("package.module:function", world_size=4, args={"seed": 1}, run_dir=path, deadline_s=300)

`function` gets a `RankContext` and returns something that JSON can carry; `results` has one such value per rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.launch.failures import LaunchError, failure_from
from verifier.launch.flight_recorder import MAX_RANKS
from verifier.mesh.mesh import Mesh

JSON = Any
_SLACK_S = 30.0
"""How long after a job's deadline the forking process may still take to say why."""
_END_S = 15.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from verifier.launch.rank_server import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == '1', sys.argv[5])"
)


class ForkLauncher:
    """One process with the heavy libraries loaded, from which the ranks of any number of jobs are forked.

    It starts at `with`, and loads while the caller goes on; the first job waits for it. Use it from one thread.

    Args:
        preload: "package.module:function", called without arguments in the launcher before the first fork; it must
            start no thread.
        load_deadline_s: seconds that loading may take.
    """

    def __init__(self, *, preload: str = "", load_deadline_s: float = 300.0) -> None:
        self._preload = preload
        self._load_deadline_s = load_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: dict[int, Job] = {}
        self._num_jobs = 0
        self._heard = bytearray()
        self._loaded_s: float | None = None
        self._refusal: VerifierError | None = None

    def __enter__(self) -> ForkLauncher:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._log = tempfile.TemporaryFile()
        main_thread = threading.current_thread() is threading.main_thread()
        # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [*command, "1" if main_thread else "0", self._preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self._started_at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the forking process; also its session's."""
        if self._process is None:
            raise ContractError("the launcher is not running: use it in a with block")
        return self._process.pid

    def ready(self) -> float:
        """Wait until the libraries are loaded; the seconds that it took.

        Raises:
            UsageError: the preload refused, for instance because a version is not supported.
            InternalError: it failed otherwise, or did not end within its deadline.
        """
        give_up_at = self._started_at + self._load_deadline_s
        while self._loaded_s is None:
            if self._refusal is not None:
                raise self._refusal
            if not self._hear(give_up_at):
                self.close()
                raise InternalError(f"`{self._preload}` did not load within {self._load_deadline_s:g} s")
        return self._loaded_s

    def run(
        self,
        function: str,
        *,
        world_size: int,
        run_dir: Path,
        args: Mapping[str, JSON] | None = None,
        deadline_s: float = 600.0,
        collective_deadline_s: float = 120.0,
        mesh: Mesh | None = None,
        num_gpus: int = 0,
        on_progress: Callable[[int, str], None] | None = None,
    ) -> list[JSON]:
        """`submit` and `wait` in one."""
        job = self.submit(
            function,
            world_size=world_size,
            run_dir=run_dir,
            args=args,
            deadline_s=deadline_s,
            collective_deadline_s=collective_deadline_s,
            mesh=mesh,
            num_gpus=num_gpus,
            on_progress=on_progress,
        )
        return job.wait()

    def submit(
        self,
        function: str,
        *,
        world_size: int,
        run_dir: Path,
        args: Mapping[str, JSON] | None = None,
        deadline_s: float = 600.0,
        collective_deadline_s: float = 120.0,
        mesh: Mesh | None = None,
        num_gpus: int = 0,
        on_progress: Callable[[int, str], None] | None = None,
    ) -> Job:
        """Start a job; several may be alive at once.

        Args:
            function: "package.module:function", called with a RankContext on every rank; returns what JSON can carry.
            world_size: number of ranks, 1 to 128.
            run_dir: gets a log per rank; made if absent.
            args: what JSON can carry; `context.args` on the ranks.
            deadline_s: seconds for the whole job.
            collective_deadline_s: seconds that any rank may wait in one collective.
            mesh: names each rank's coordinates in errors.
            num_gpus: how many of the host's GPUs the ranks take, in turn; 0: all.
            on_progress: called with (rank, text) for each `context.progress`, while the job is waited for.

        Raises:
            UsageError: a world size that is out of range or not the mesh's; the preload refused.
            InternalError: the launcher is gone or did not load.
        """
        require_ranks(world_size)
        if mesh is not None and mesh.world_size != world_size:
            raise UsageError(f"mesh {mesh.label()} has {mesh.world_size} ranks, but {world_size} were asked for")
        self.ready()
        self._num_jobs += 1
        places = [str(mesh.coordinate(rank)) for rank in range(world_size)] if mesh is not None else []
        job = Job(self, self._num_jobs, function, deadline_s, places, on_progress)
        order = {
            "job": self._num_jobs,
            "function": function,
            "world_size": world_size,
            "args": dict(args or {}),
            "run_dir": str(run_dir.absolute()),
            "deadline_s": deadline_s,
            "collective_deadline_s": collective_deadline_s,
            "num_gpus": num_gpus,
        }
        self._jobs[self._num_jobs] = job
        self._say({"command": "start", "order": order})
        return job

    def close(self) -> None:
        """End every job and the forking process; nothing is left when this returns."""
        process, self._process = self._process, None
        if process is None:
            return
        self._socket.close()
        try:
            process.wait(_END_S if self._loaded_s is not None else 0.5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._log.close()

    def _say(self, message: dict[str, JSON]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            raise self._death() from None

    def _hear(self, give_up_at: float) -> bool:
        """Deal with what the forking process says next; False if it said nothing until `give_up_at`."""
        left = give_up_at - time.monotonic()
        if self._process is None:
            raise ContractError("the launcher is not running: use it in a with block")
        if left <= 0:
            return False
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            return False
        except ConnectionError:
            data = b""
        finally:
            if self._socket.fileno() >= 0:
                self._socket.settimeout(None)
        if not data:
            raise self._death()
        self._heard += data
        *lines, rest = bytes(self._heard).split(b"\n")
        self._heard = bytearray(rest)
        for line in lines:
            self._take(json.loads(line))
        return True

    def _take(self, message: dict[str, JSON]) -> None:
        event = message["event"]
        if event == "ready":
            self._loaded_s = message["seconds"]
        elif event == "unready":
            self._refusal = _refusal(f"loading `{self._preload}` failed", message)
        else:
            self._jobs[message["job"]].take(message)

    def _death(self) -> InternalError:
        process = self._process
        tail = self._log_tail()
        self.close()
        code = process.returncode if process is not None else None
        said = f":\n{tail}" if tail else ""
        return InternalError(f"the forking process ended by itself (exit status {code}){said}")

    def _log_tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        return self._log.read().decode("utf-8", "replace").strip()


class Job:
    """A job under way."""

    def __init__(
        self,
        launcher: ForkLauncher,
        number: int,
        function: str,
        deadline_s: float,
        places: list[str],
        on_progress: Callable[[int, str], None] | None,
    ) -> None:
        self._launcher, self._number, self._function, self._places = launcher, number, function, places
        self._deadline_s = deadline_s
        self._deadline_at = time.monotonic() + deadline_s
        self._on_progress = on_progress
        self._results: list[JSON] | None = None
        self._failure: VerifierError | None = None

    def wait(self) -> list[JSON]:
        """Each rank's result, in rank order, once all have returned.

        Raises:
            RankFailed: a rank raised (other than below), exited or was killed; all others were killed at once.
            CollectiveTimeout: a collective waited longer than its deadline; says who did not come.
            JobTimeout: the job passed its deadline.
            UsageError, ContractError: a rank raised it; the RankFailed is its cause.
            InternalError: the forking process is gone or answers no more.
        """
        while self._results is None and self._failure is None:
            if not self._launcher._hear(self._deadline_at + _SLACK_S):
                self._launcher.close()
                raise InternalError(
                    f"the forking process said nothing {_SLACK_S:g} s after the deadline of `{self._function}` "
                    f"({self._deadline_s:g} s)"
                )
        if self._failure is not None:
            raise self._failure
        assert self._results is not None
        return self._results

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._results is not None or self._failure is not None

    def kill(self) -> None:
        """End the job's ranks."""
        if not self.done:
            self._failure = LaunchError(f"`{self._function}` was ended on request")
            self._launcher._say({"command": "kill", "job": self._number})

    def take(self, message: dict[str, JSON]) -> None:
        """Deal with one event about this job; called by the launcher."""
        event = message["event"]
        if event == "progress":
            if self._on_progress is not None:
                self._on_progress(message["rank"], message["text"])
        elif self.done:
            return
        elif event == "done":
            self._results = message["results"]
        elif event == "refused":
            self._failure = _refusal(f"`{self._function}` could not be started", message)
        else:
            self._failure = failure_from(message, self._places)


def require_ranks(world_size: int) -> None:
    """Refuse a number of ranks that cannot be started.

    Raises:
        UsageError: fewer than one, or more than the flight recorder has room for.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise UsageError(f"{world_size} ranks asked for: this machine's launcher starts 1 to {MAX_RANKS}")


def _refusal(what: str, message: Mapping[str, JSON]) -> VerifierError:
    if message["error"] == "UsageError":
        return UsageError(message["message"])
    return InternalError(f"{what}: {message['cause']}\n{message['traceback']}".rstrip())
