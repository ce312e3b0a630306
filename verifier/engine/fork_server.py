"""The process that vLLM's hosts are forked from: vLLM is imported once, however many engines follow. Torch-free.

A host that is forked, and forks its workers, is ready in seconds; one with an interpreter of its own imports vLLM in
itself and in every worker, and a third time to look at the model's class.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from verifier.engine.process import die_with_parent

_END_S = 5.0
BEFORE_IMPORT = {
    # One thread, or a forked host misses the others; a host has its own share of the cores afterwards.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def preload() -> None:
    """Import all that a vLLM host will need; nothing if vLLM is not installed, which each host then says itself.

    Raises:
        InternalError: an import has started CUDA, so that nothing could be forked.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    import torch

    from verifier.engine.vllm import engine_vllm
    from verifier.platform.cuda import require_not_started

    engine_vllm.preload()
    if torch.cuda.device_count():
        require_not_started()


def main(parent_fd: int, parent_pid: int) -> None:
    """Fork hosts as the parent orders them, until it goes away; then end them all."""
    die_with_parent()
    if os.getppid() != parent_pid:  # it died before the line above
        return
    parent = socket.socket(fileno=parent_fd)
    preload()
    gc.collect()
    gc.freeze()
    poller = select.poll()
    poller.register(parent, select.POLLIN)
    hosts: dict[int, int] = {}
    """File descriptor of a host -> its pid."""
    heard = bytearray()
    while True:
        for fd, _ in poller.poll():
            if fd in hosts:
                poller.unregister(fd)
                os.waitpid(hosts.pop(fd), 0)
                os.close(fd)
                continue
            data = parent.recv(1 << 16)
            if not data:
                _end(list(hosts.values()))
            heard += data
            while b"\n" in heard:
                line, _, rest = bytes(heard).partition(b"\n")
                heard = bytearray(rest)
                pid = os.fork()
                if pid == 0:
                    _be_host(json.loads(line), [parent.detach(), *hosts])
                host_fd = os.pidfd_open(pid)
                socket.send_fds(parent, [str(pid).encode()], [host_fd])
                hosts[host_fd] = pid
                poller.register(host_fd, select.POLLIN)


def _be_host(order: dict[str, Any], private_fds: list[int]) -> NoReturn:
    """In the forked process: what `python -m verifier.engine.server` is in one of its own."""
    from verifier.engine import server

    try:
        for fd in private_fds:
            os.close(fd)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        server.main(order["socket"], json.dumps(order["config"]), str(os.getppid()))
    finally:
        if not isinstance(sys.exception(), SystemExit | None):
            traceback.print_exc()  # no interpreter will: this process ends here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end(groups: list[int]) -> NoReturn:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
