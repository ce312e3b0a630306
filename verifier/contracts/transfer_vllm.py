"""Contracts of vLLM's weight transfer and workers: what it asks of a registered engine, and how workers are forked."""

from __future__ import annotations

import inspect
import os

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.gpu_worker import Worker

from verifier.engine.vllm.worker_vllm import BACKEND, ChunkTransferEngine
from verifier.platform.patch import parameters


def factory_makes_our_engine() -> None:
    """The factory constructs a registered engine with what ours takes: vLLM 0.22 gives the model too."""
    of_all = VllmConfig()
    given = {
        "config": WeightTransferConfig(backend=BACKEND), "parallel_config": of_all.parallel_config,
        "vllm_config": of_all, "device": torch.device("cpu"), "model": nn.Linear(1, 1),
    }  # fmt: skip
    create = WeightTransferEngineFactory.create_engine
    made = create(*(given[name] for name in parameters(create).split()))
    assert type(made) is ChunkTransferEngine
    made.shutdown()


def worker_takes_what_ours_passes() -> None:
    """The worker's part of an update takes what ours passes it."""
    for function, given in ((Worker.start_weight_update, ()), (Worker.update_weights, ({},))):
        inspect.signature(function).bind(None, *given)
    inspect.signature(Worker.finish_weight_update).bind(None)


def our_engine_takes_what_the_worker_passes() -> None:
    """Our engine takes what vLLM's takes in each method that it replaces."""
    for name, ours in vars(ChunkTransferEngine).items():
        theirs = getattr(WeightTransferEngine, name, None)
        if inspect.isfunction(ours) and theirs is not None and name != "__init__":
            missing = set(parameters(theirs).split()) - set(parameters(ours).split())
            assert not missing, (name, missing)


def forked_workers_need_no_binding() -> None:
    """`nobind` leaves OpenMP's threads alone, and an executor's workers begin in the method that ours replaces."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    assert OMPProcessManager(VllmConfig()).skip_setup
    assert "_init_executor" in vars(MultiprocExecutor)


def readers_spin_for_a_time_that_can_be_set() -> None:
    """A reader of messages looks for `busy_loop_s` seconds, then sleeps for `timeout_ms` at most."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    assert "busy_loop_s" in parameters(SpinCondition.__init__).split()
    inspect.signature(SpinCondition.wait).bind(None, timeout_ms=1)
