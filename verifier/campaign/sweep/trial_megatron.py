"""One rank of a trial: optimizer steps on made-up rollouts, timed, with the rank's high-water marks of memory."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from verifier.campaign.sweep.layouts import SweptLayout, made_up
from verifier.campaign.sweep.summary import memory_file
from verifier.config.training import TrainConfig
from verifier.megatron import memory, optimizer_megatron, step_megatron
from verifier.model import provider_megatron
from verifier.model.families import size_if_any
from verifier.trainer.state_megatron import data_parallel_of
from verifier.trainer.upstream_fields import provider_overrides

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext

LEARNING_RATE = 1e-6
"""Small: every step is taken, and random weights stay finite."""


def run(context: RankContext) -> dict[str, Any]:
    """Rank function of a trial.

    Returns:
        ``seconds`` of each timed step, ``tokens`` of a step without padding.
    """
    tier, limit = context.args["tier"], context.args["memory_limit"]
    try:
        if limit is not None and tier == "cuda":
            memory.limit_memory(limit, tier)
        return _steps(context)
    finally:  # also of a rank that runs out of memory
        memory_file(context.run_dir, context.rank).write_bytes(msgspec.json.encode(asdict(memory.peaks(tier))))


def _steps(context: RankContext) -> dict[str, Any]:
    args = context.args
    config = TrainConfig.from_dict(args["config"])
    budget, layout = config.batch.max_tokens, SweptLayout(mesh=config.mesh, recompute=config.megatron.recompute)
    assert budget is not None, "a trial has a budget"
    trainer = provider_megatron.build(
        Path(args["model"]), config.mesh, dtype=config.dtype, tier=args["tier"],
        data_parallel=data_parallel_of(config.megatron), overrides=provider_overrides(config), seed=config.seed,
        deadline_s=args["deadline_s"], load_weights=False,
    )  # fmt: skip
    optimizer = optimizer_megatron.make_optimizer(trainer, learning_rate=LEARNING_RATE)
    if args["memory_limit"] is not None and args["tier"] == "cpu":
        # gloo hangs where it cannot start a thread, so its groups come first; what they and the model hold counts too.
        memory.limit_memory(args["memory_limit"], "cpu")
    vocabulary = size_if_any(trainer.bridge.hf_pretrained.config.to_dict(), "vocab_size")
    rollouts = made_up(
        budget, copies=config.mesh.dp * layout.micro_batches(args["micro_batches"]), longest=args["longest"],
        multiple=layout.multiple, vocabulary=vocabulary or trainer.provider.vocab_size, seed=config.seed,
    )  # fmt: skip
    seconds = []
    for number in range(1 + args["steps"]):
        began = time.monotonic()
        step_megatron.train_step(trainer, optimizer, rollouts, max_tokens=budget)
        if args["tier"] == "cuda":
            torch.cuda.synchronize()
        if number:
            seconds.append(time.monotonic() - began)
        if context.rank == 0:
            context.progress(f"step {number} of {args['steps']}")
    return {"seconds": seconds, "tokens": sum(map(len, rollouts))}
