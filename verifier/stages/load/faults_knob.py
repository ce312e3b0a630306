"""Bugs of settings: knobs of a training run that are read and never applied, or that upstream overrides."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.stages.train.faults import MAKE_MEGATRON_OPTIMIZER

ROW: dict[str, Any] = {"stage": Stage.LOAD, "engine": TRAINING, "model": "tiny:add", "caught_by": ("CFG001",)}


@fault(
    "NVIDIA/Megatron-LM#5694", "megatron.bridge.models.transformer_config:TransformerConfig.finalize(self)",
    training=("megatron.recompute=selective", "megatron.recompute_modules=[mlp]"), **ROW,
)  # fmt: skip
def knob_overridden_by_finalize(call: Call) -> None:
    """The provider's last step, which completes its fields, sets one that was asked for to upstream's own default."""
    call.faulty()
    call.self.recompute_modules = ["core_attn"]


@fault("NVIDIA-NeMo/RL#3523", MAKE_MEGATRON_OPTIMIZER, training=("optimizer.clip_grad=0.25",), **ROW)
def clip_left_at_its_default(call: Call) -> Any:
    """The optimizer is made with Megatron's own clip of 1, whatever the config says."""
    call.config.clip_grad = 1.0
    return call.faulty()
