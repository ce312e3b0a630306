"""Refusals of Megatron-FSDP beside other parts of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifier.errors import UsageError

if TYPE_CHECKING:
    from verifier.config.training import TrainConfig


def refuse_fsdp(config: TrainConfig) -> None:
    """Refuse what a run with Megatron-FSDP does not have.

    Raises:
        UsageError: names both knobs.
    """
    if not config.megatron.use_fsdp:
        return
    reasons = {
        "mesh.pp": (config.mesh.pp, 1, "stages of a pipeline are not sharded so far"),
        "mesh.ep": (config.mesh.ep, 1, "experts have shards of their own, which are not judged so far"),
        "lora.rank": (config.lora.rank, 0, "adapters are not sharded so far"),
        "grpo.kl_weight": (config.grpo.kl_weight, 0, "the reference would be held whole on every rank"),
        "grpo.replay_routes": (config.grpo.replay_routes, False, "experts are not sharded so far"),
        "engine.sleep_level": (config.engine.sleep_level, 0, "its shards do not leave the GPU so far"),
    }
    for key, (value, without, reason) in reasons.items():
        if (value or without) != without:
            shown = "true" if value is True else value
            raise UsageError(f"megatron.use_fsdp is true and {key} is {shown}: {reason}, leave one of the two out")
