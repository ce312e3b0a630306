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

    Driver and workers sleep while they wait for each other. vLLM's look for the next message for a second after each,
    on cores that ranks of the trainer compute on. A version without such readers keeps its own way.

    Source:
        vLLM 0.21, vllm/platforms/cpu.py (check_and_update_config), vllm/utils/ompmultiprocessing.py and
        vllm/distributed/device_communicators/shm_broadcast.py.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        reader = getattr(shm_broadcast, "SpinCondition", None)
        if reader is not None and "busy_loop_s" in inspect.signature(reader).parameters:  # workers inherit it
            reader.wait = _asleep(reader.wait)
        super()._init_executor()


def _asleep(wait: Callable[[Any, int | None], None]) -> Callable[[Any, int | None], None]:
    def wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = min(condition.busy_loop_s, _SPIN_S)
        wait(condition, _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

    return wait_asleep
