"""Behaviours of Ray that `cluster_ray` and `join_ray` build on, or has to undo.

What this does not exercise: nodes on several hosts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from tests.processes import alive
from verifier.config.cluster import RayOptions
from verifier.errors import UsageError
from verifier.runs.join_ray import joined

pytestmark = pytest.mark.slow


class Probe:
    """Tells what an actor is like."""

    def facts(self) -> dict[str, Any]:
        return {
            "main": threading.current_thread() is threading.main_thread(), "pid": os.getpid(),
            "threads": len(os.listdir("/proc/self/task")), "omp": os.environ.get("OMP_NUM_THREADS"),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }  # fmt: skip

    def child(self) -> int:
        """Process id of a child that asks for a death signal."""
        libc = ctypes.CDLL(None)
        self._child = subprocess.Popen(["/bin/sleep", "100"], preexec_fn=lambda: libc.prctl(1, signal.SIGKILL, 0, 0, 0))
        return self._child.pid

    def refuse(self) -> None:
        raise UsageError("16 experts do not divide over ep = 3")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        with joined(RayOptions(use=True), tmp_path_factory.mktemp("ray"), 1):
            yield ray.remote(num_cpus=0, max_restarts=0)(Probe)


def test_methods_run_on_the_main_thread_of_a_process_that_must_not_fork(remote):
    facts = ray.get(remote.remote().facts.remote(), timeout=60)
    assert facts["main"]
    assert facts["threads"] > 10


def test_ray_sets_the_number_of_threads_and_leaves_the_gpus_alone(remote):
    facts = ray.get(remote.remote().facts.remote(), timeout=60)
    assert (facts["omp"], facts["gpus"]) == ("1", "3,1")


def test_a_killed_actor_is_noticed_and_its_child_dies(remote):
    actor = remote.remote()
    child = ray.get(actor.child.remote(), timeout=60)
    os.kill(ray.get(actor.facts.remote(), timeout=60)["pid"], signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(actor.facts.remote(), timeout=10)
    until = time.monotonic() + 5
    while alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(child)


def test_an_error_of_a_method_comes_with_its_cause(remote):
    with pytest.raises(RayTaskError) as caught:
        ray.get(remote.remote().refuse.remote(), timeout=60)
    assert type(caught.value.cause) is UsageError
    assert str(caught.value.cause) == "16 experts do not divide over ep = 3"
