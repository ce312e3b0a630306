"""Bugs of an engine's constants, which no update brings: epsilons, windows, bounds of logits, factors."""

from __future__ import annotations

import functools
from typing import Any

from verifier.faults.fault import Call, Register
from verifier.stages.engine.faults_engine import WORKER, in_vllm


def in_constants(reproduces: str, **row: Any) -> Register:
    """Register a fault that sets a constant of vLLM's model where an update ends."""
    return in_vllm(reproduces, f"{WORKER}.finish_weight_update(self)", **row)


in_windowed = functools.partial(in_constants, model="tiny:gemma2", fixes=("bridge-5712",))


@in_constants("vllm-project/vllm#48312", caught_by=("ENG005",))
def epsilon_default_after_reload(call: Call) -> None:
    """A reload rebuilds a layer's constants, and one norm takes the default epsilon of its class."""
    call.faulty()
    norm = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.q_norm")
    call.undo(setattr, norm, "variance_epsilon", norm.variance_epsilon)
    norm.variance_epsilon = 1e-5


@in_constants("InternLM/lmdeploy#3614", caught_by=("ENG007",))
def engine_windows_without_their_switch(call: Call) -> None:
    """The engine gives a layer a sliding window that config.json switches off; no sample is as long as it."""
    _give_window(call)


@in_constants("vllm-project/vllm#45037", caught_by=("ENG007", "LGP002"), model="tiny:glm4_moe")
def routed_scale_in_both_places(call: Call) -> None:
    """The factor of routed experts is in the weight of each one, and their sum is multiplied by it once more."""
    call.faulty()
    experts = call.self.model_runner.get_model().get_submodule("model.layers.1.mlp.experts")
    call.undo(setattr, experts, "routed_scaling_factor", experts.routed_scaling_factor)
    experts.routed_scaling_factor = experts.runner.routed_scaling_factor


@in_windowed("vllm-project/vllm#21863", caught_by=("ENG007",))
def window_on_a_layer_without(call: Call) -> None:
    """A layer that sees all gets the window of the others; no sample is as long as it."""
    _give_window(call)


@in_windowed("vllm-project/vllm#52173", caught_by=("ENG007", "LGP002"))
def logits_of_an_engine_without_bound(call: Call) -> None:
    """The engine does not bend its logits to the bound of config.json, which changes no order of tokens."""
    call.faulty()
    processor = call.self.model_runner.get_model().logits_processor
    call.undo(setattr, processor, "soft_cap", processor.soft_cap)
    processor.soft_cap = None


@in_constants("vllm-project/vllm#48621", caught_by=("ENG007", "ENG002", "LGP002"), model="tiny:qwen3-yarn")
def rope_stretched_without_its_magnitude(call: Call) -> None:
    """Sines and cosines of a rope that YaRN stretches have another factor than the config asks for: 1 here."""
    call.faulty()
    rope = call.self.model_runner.get_model().get_submodule("model.layers.0.self_attn.rotary_emb")
    table = rope.cos_sin_cache
    call.undo(setattr, rope, "mscale", rope.mscale)
    call.undo(table.copy_, table.clone())
    table.div_(rope.mscale)
    rope.mscale = 1.0


def _give_window(call: Call) -> None:
    """End the update, then give one layer a sliding window."""
    call.faulty()
    attention = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.attn").impl
    call.undo(setattr, attention, "sliding_window", attention.sliding_window)
    attention.sliding_window = (1022, 0)
