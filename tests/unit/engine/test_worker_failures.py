"""What workers log of their exceptions, as the process that drives them reads it."""

import logging
import multiprocessing

import pytest

from tests.unit.launch.test_stack_failure import raised
from verifier.engine import worker_failures
from verifier.engine.worker_failures import WorkerFailures

LOGGER = logging.getLogger("vllm.v1.executor.multiproc_executor")
DRIVERS = RuntimeError("WorkerProc initialization failed, see stack trace for root cause")


def fail(*modules: str) -> None:
    """Log an exception as vLLM's worker does."""
    error = raised(ValueError("unsupported activation"), *modules)
    LOGGER.error("WorkerProc failed to start.", exc_info=error)


def fail_alone(*modules: str) -> None:
    """Log one in an interpreter of its own, which has no handler yet."""
    worker_failures.listen_in_worker()
    fail(*modules)


@pytest.fixture
def failures(tmp_path, monkeypatch):
    for name in ("VERIFIER_ENGINE_DRIVER", "VERIFIER_ENGINE_FAILURES"):
        monkeypatch.setenv(name, "")  # and as it was afterwards
    found = WorkerFailures(tmp_path / "failures")
    found.listen()
    yield found
    logging.getLogger("vllm").removeHandler(found)


def in_worker(method: str, *modules: str) -> None:
    target = fail if method == "fork" else fail_alone
    worker = multiprocessing.get_context(method).Process(target=target, args=modules)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_failure_stands_for_the_drivers(failures, method):
    error = raised(DRIVERS, "verifier.engine.x", "vllm.v1.executor.multiproc_executor")
    assert failures.of(error).message.startswith("RuntimeError: WorkerProc")
    in_worker(method, "verifier.engine.x", "vllm.models.llama")
    assert failures.of(error).where == "vllm/models/llama.py:2"
    failures.clear()
    assert not failures.heard


def test_a_workers_failure_that_is_ours_is_not_the_stacks(failures):
    in_worker("fork", "vllm.v1.worker", "verifier.engine.vllm.worker_vllm")
    assert failures.heard
    assert failures.of(raised(DRIVERS, "verifier.engine.x", "vllm.v1.executor")) is None


def test_what_the_driver_logs_itself_is_not_a_workers(failures):
    fail("verifier.engine.x", "vllm.models.llama")
    assert not failures.heard
