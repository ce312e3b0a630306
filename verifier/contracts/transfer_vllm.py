"""Contracts of vLLM's weight transfer: how its worker makes a registered engine, and what it asks of one."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
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
