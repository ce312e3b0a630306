"""vLLM's executor with workers that are forked from the driver, which has imported all that they need."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_SPIN_S = 0.005
"""Seconds that a reader looks for the next message before it sleeps: some steps of a small model."""
_LOOK_MS = 20
"""Milliseconds after which a sleeping reader looks by itself: a notice that is sent before it is connected is lost."""


class ForkingExecutor(MultiprocExecutor):
    """Forks workers on a CPU too, where vLLM's platform asks for interpreters of their own: 13 processor seconds each.

    A new interpreter is for OpenMP: it reads the cores that its threads are bound to when it begins. Workers of this
    executor have one thread and are bound to no core (`VLLM_CPU_OMP_THREADS_BIND=nobind`), so nothing is to be read.

    Source:
        vLLM 0.21, vllm/platforms/cpu.py (check_and_update_config) and vllm/utils/ompmultiprocessing.py.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()


def wait_asleep() -> None:
    """Have this process, and workers that are forked from it, sleep while they wait for messages of vLLM.

    vLLM's readers look for the next message for a second after each: on a CPU they take a core from the worker that
    they wait for, or from ranks of the trainer. A version without such readers keeps its own way.

    Source:
        vLLM 0.21, vllm/distributed/device_communicators/shm_broadcast.py.
    """
    reader = getattr(shm_broadcast, "SpinCondition", None)
    if reader is not None and "busy_loop_s" in inspect.signature(reader).parameters:
        reader.wait = _asleep(reader.wait)


def _asleep(spinning: Callable[[Any, int | None], None]) -> Callable[[Any, int | None], None]:
    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = min(condition.busy_loop_s, _SPIN_S)
        spinning(condition, _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

    return wait
