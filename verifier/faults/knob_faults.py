"""Bugs of settings: knobs of a training run that are read and never applied, or that upstream overrides."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import BEGUN, TRAINING, Call, Side, fault
from verifier.faults.train_faults import MAKE_MEGATRON_OPTIMIZER

ROW: dict[str, Any] = {"stage": Stage.LOAD, "engine": TRAINING, "model": "tiny:add", "caught_by": ("CFG001",)}
BUILD = (
    "verifier.model.provider_megatron:build("
    "path, mesh, dtype, tier, data_parallel, seed, deadline_s, overrides, adapt, fixes, load_weights)"
)


@fault("NVIDIA-NeMo/RL#3523", BUILD, training=("megatron.recompute=full",), **ROW)
def knob_dropped_on_the_way(call: Call) -> Any:
    """A knob of the config is not among those that are handed to the model's provider, which keeps its default."""
    kept = {name: value for name, value in call.overrides.items() if not name.startswith("recompute")}
    return call.faulty(overrides=kept)


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


@fault(
    "grammarly/gector#42", "verifier.runs.model_under_test:resolve_model(model, cache, dtype)", side=Side.CONTROLLER,
    training=(BEGUN,), **(ROW | {"caught_by": ("WGT001",)}),
)  # fmt: skip
def base_loaded_by_the_second_stage(call: Call) -> Any:
    """The folder of the model that a run is to begin with is not the one that is opened, which holds the base."""
    return call.original() if call.model.startswith("tiny:") else call.faulty(model="tiny:add")
