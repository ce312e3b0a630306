"""Contracts of vLLM's weight transfer: how its worker makes a registered engine, and what it asks of one."""

from __future__ import annotations

from torch import nn
from vllm.config.parallel import ParallelConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.gpu_worker import Worker

from verifier.engine.vllm.worker_vllm import BACKEND, ChunkTransferEngine
from verifier.platform.patch import parameters


def factory_makes_our_engine() -> None:
    """The factory constructs a registered engine with what ours takes: vLLM 0.22 gives the model too."""
    given = {
        "config": WeightTransferConfig(backend=BACKEND), "parallel_config": ParallelConfig(), "model": nn.Linear(1, 1),
    }  # fmt: skip
    create = WeightTransferEngineFactory.create_engine
    made = create(*(given[name] for name in parameters(create).split()))
    assert type(made) is ChunkTransferEngine
    made.shutdown()


def worker_hands_chunks_to_the_engine() -> None:
    """What the worker calls an update with, and what it then calls the engine with."""
    takes = {
        Worker.start_weight_update: "self is_checkpoint_format",
        Worker.update_weights: "self update_info",
        Worker.finish_weight_update: "self",
        WeightTransferEngine.init_transfer_engine: "self init_info",
        WeightTransferEngine.receive_weights: "self update_info load_weights",
    }
    for function, expected in takes.items():
        assert parameters(function) == expected, (function.__qualname__, parameters(function))
