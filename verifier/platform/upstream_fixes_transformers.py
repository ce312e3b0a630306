"""The fixes of transformers' layers: in an engine that asks for them, and always in the oracle."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import ACT2FN


def scan_in_one_chunk(model: nn.Module) -> None:
    """Have state-space layers compute what their definition says, whatever the length.

    Without CUDA kernels transformers loses the state between chunks, so a sequence longer than a chunk is scored
    wrongly, and it raises small time steps to a bound that the kernels do not have. One chunk as long as the sequence
    has nothing to hand on, and a bound of 0 raises nothing.

    Source:
        transformers #47246: 5.6.0 to 5.13.0, `NemotronHMamba2Mixer.torch_forward`;
        verifier/contracts/forward_hf.py does not find it when it is mended.
    """
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            if not hasattr(module, "torch_forward"):  # 5.16 hands the state on, and has the bound here
                module.time_step_limit = (0.0, math.inf)
                continue
            module.time_step_min = 0.0
            module.register_forward_pre_hook(_chunk_of_the_sequence)
            module.register_forward_hook(partial(_chunk_as_before, size=module.chunk_size))


def _chunk_of_the_sequence(mixer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    mixer.chunk_size = inputs[0].shape[1]


def _chunk_as_before(mixer: nn.Module, inputs: object, output: object, *, size: int) -> None:
    mixer.chunk_size = size


def norm_latents_by_config(model: nn.Module) -> None:
    """Give the norms of compressed queries and keys the epsilon of the config, as Megatron and vLLM do.

    Source:
        transformers #44261: `q_a_layernorm` and `kv_a_layernorm` are made without an epsilon, and have 1e-6;
        docs/upstream.md does not find it when it is mended.
    """
    for module in model.modules():
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if (norm := getattr(module, name, None)) is not None:
                norm.variance_epsilon = module.config.rms_norm_eps


def scale_softmax_by_config(model: nn.Module) -> None:
    """Scale the scores of DeepSeek-V2 by the square of YaRN's `mscale_all_dim` too, as Megatron and vLLM do.

    Source:
        transformers #47435: DeepSeek-V3 has it, and DeepSeek-V2 not.
    """
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Attention":
            numbers = module.config.rope_parameters
            if scale := numbers.get("mscale_all_dim"):
                module.scaling = module.qk_head_dim**-0.5 * (0.1 * scale * math.log(numbers["factor"]) + 1) ** 2


def choose_within_groups(model: nn.Module) -> None:
    """Let DeepSeek-V2 choose experts within groups, where transformers 5.12.1 ends for want of a number.

    A chosen expert weighs its own score, also one that is given and of a group that the router leaves out.
    """
    for module in model.modules():
        if getattr(module, "topk_method", None) == "group_limited_greedy":
            cast(Any, module).route_tokens_to_experts = partial(_chosen, module)


def _chosen(block: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and their weights, [tokens, K] each, of logits [batch, length, experts]."""
    scores = logits.flatten(0, 1).softmax(dim=-1, dtype=torch.float32)
    groups = scores.unflatten(-1, (block.num_group, -1))
    best = torch.topk(groups.amax(dim=-1), block.topk_group, dim=-1, sorted=False)[1]
    left_out = torch.ones_like(groups[..., 0]).scatter(1, best, 0).bool()
    chosen = torch.topk(groups.masked_fill(left_out[..., None], 0.0).flatten(1), block.top_k, dim=-1, sorted=False)[1]
    return chosen, scores.gather(1, chosen) * block.routed_scaling_factor


def rotate_by_config(model: nn.Module) -> None:
    """Rotate the part of MiniMax-M2's heads that `rotary_dim` says, as Megatron and vLLM do.

    Source:
        transformers #48241: the key is ignored, and whole heads are rotated;
        docs/upstream.md does not find it when it is mended.
    """
    for module in model.modules():
        if type(module).__name__ == "MiniMaxM2RotaryEmbedding":
            config, kind, held = module.config, type(module), module.inv_freq
            numbers, width = config.rope_parameters, getattr(config, "rotary_dim", None)
            if width is None or numbers.get("partial_rotary_factor") is not None:
                continue
            numbers["partial_rotary_factor"] = width / config.head_dim
            made: Any = kind(config, held.device)
            module.inv_freq, module.original_inv_freq = made.inv_freq, made.original_inv_freq


def activate_as_trained(model: nn.Module) -> None:
    """Give a Gemma of 2024 the activation of `hidden_activation`, or the approximate GELU that it was trained with.

    `hidden_act` of its first published configs says "gelu", which is the exact one.

    Source:
        transformers #29402, which the classes of 5.12.1 no longer have; docs/upstream.md does not find it when it is
        mended.
    """
    for module in model.modules():
        if type(module).__name__ == "GemmaMLP":
            config = cast(Any, module).config
            module.act_fn = ACT2FN[getattr(config, "hidden_activation", None) or "gelu_pytorch_tanh"]
