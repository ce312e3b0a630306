"""transformers models: loading in one dtype, log-probabilities, and lookup of tensors by checkpoint name."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from verifier.config_json import text_model
from verifier.errors import ContractError, UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.delta_rule_hf import scan_by_token
from verifier.model.families import Content, TensorSpec, is_served
from verifier.platform.cpu_products import multiply_bfloat16_in_float32
from verifier.platform.upstream_fixes import (
    TRANSFORMERS_GELU,
    TRANSFORMERS_LATENT,
    TRANSFORMERS_ROTARY,
    TRANSFORMERS_SCAN,
    TRANSFORMERS_SOFTMAX,
)
from verifier.platform.upstream_fixes_transformers import (
    activate_as_trained,
    choose_within_groups,
    norm_latents_by_config,
    rotate_by_config,
    scale_softmax_by_config,
    scan_in_one_chunk,
)

REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
    StrictDataclassError,
)  # fmt: skip
"""Errors with which a class of transformers or a bridge refuses a config."""
_MENDED = {
    TRANSFORMERS_SCAN: scan_in_one_chunk,
    TRANSFORMERS_LATENT: norm_latents_by_config,
    TRANSFORMERS_ROTARY: rotate_by_config,
    TRANSFORMERS_SOFTMAX: scale_softmax_by_config,
    TRANSFORMERS_GELU: activate_as_trained,
    "gated-delta-rule": scan_by_token,
}
"""Id of an upstream fix -> what installs it in a model; the last is of the oracle alone."""
_WITH_W = ("minimax_m2", "mixtral")
"""Model types whose checkpoints have experts `w1`, `w2`, `w3` in `block_sparse_moe`."""
_RENAMED = {
    "nemotron_h": (r"^model\.", "backbone."),
    "ernie4_5_moe": (r"\.gate\.moe_statics\.", ".moe_statics."),
    "exaone_moe": (r"\.gate\.e_score", ".e_score"),
    **dict.fromkeys(_WITH_W, (r"\.mlp\.", ".block_sparse_moe.")),
}
"""Model type -> (part of a tensor's name in transformers, what stands for it in checkpoints)."""
_WITHIN = "model.language_model."
"""Begin of the names of a text model that a checkpoint has beside parts that read images."""
_EXPERT_LEAVES = {kind: {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} for kind in _WITH_W}
"""Model type -> names of an expert's matrices in checkpoints, where they are others."""


def load_model(path: Path | str, dtype: torch.dtype, *, fixes: Collection[str] = tuple(_MENDED)) -> PreTrainedModel:
    """Load a checkpoint directory with eager attention and eager experts, on the CPU, for inference.

    Tensors that the checkpoint stores in float32 stay so. `fixes` are ids of upstream fixes to install; the oracle,
    which computes the model's definition, always has them.

    Raises:
        ContractError: a tensor is missing, or the architecture has no place for one that it has to serve.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    config = open_checkpoint(path).config
    odd = [name for name in info["unexpected_keys"] if is_served(name, config)]
    for what, names in (("is missing", info["missing_keys"]), ("has no place in it", odd)):
        if names:
            raise ContractError(f"transformers loads {path}, but `{sorted(names)[0]}` {what}")
    _restore_float32(model, path)
    compute_the_definition(model, dtype, fixes)
    return model.eval().requires_grad_(False)


def meta_tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Tensors of the language model that transformers builds of a config.json, without their values.

    Raises:
        UsageError: transformers builds none of it, or another model than config.json names.
    """
    name = str((config.get("architectures") or [""])[0])
    logging.set_verbosity_error()  # of kernels that a model without values does not need
    try:
        with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
            Path(folder, "config.json").write_text(json.dumps(config))
            whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            text = whole.get_text_config()
            stated = {**vars(whole), **vars(text), **text_model(config)}  # some classes have no such field: Qwen3-VL's
            tied = stated.get("tie_word_embeddings", False)
            whole.tie_word_embeddings = text.tie_word_embeddings = tied
            is_causal = type(text) in AutoModelForCausalLM._model_mapping
            auto: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
            model = auto.from_config(text if is_causal else whole, trust_remote_code=False)
    except (OSError, *REFUSALS) as error:
        said = re.sub(r":\n\s+", ": ", str(error)).partition("\n")[0]
        raise UsageError(f"transformers builds no {name} of config.json: {type(error).__name__}: {said}") from error
    if type(model).__name__.lower() != name.lower() and is_causal and text is whole:  # Phi-3.5-MoE names PhiMoE
        raise UsageError(f"config.json names {name}, and transformers builds a {type(model).__name__} of it")
    buffers = {name for name, _ in model.named_buffers()} | {
        name for name, item in model.named_parameters() if not item.requires_grad
    }
    parts = () if is_causal else (*model.get_decoder().modules(), model.get_output_embeddings())
    return [
        TensorSpec(name=name, shape=tuple(tensor.shape), content=Content.SCORE_BIAS if holder in buffers else kind)
        for name, (holder, tensor) in checkpoint_places(model).items()
        if is_causal or model.get_submodule(holder.rpartition(".")[0]) in parts
        for kind in (Content.DECAY if name.endswith("A_log") else Content.MATRIX,)
    ]


def compute_the_definition(model: PreTrainedModel, dtype: torch.dtype, fixes: Collection[str] = tuple(_MENDED)) -> None:
    """Mend what transformers, in a dtype, computes otherwise than the model is defined; see `load_model`."""
    if dtype == torch.bfloat16:
        multiply_bfloat16_in_float32()
    for mend in (_MENDED[item] for item in _MENDED if item in fixes):
        mend(model)
    _scan_without_kernels(model)
    _learn_padding(model)
    choose_within_groups(model)


def _restore_float32(model: PreTrainedModel, path: Path | str) -> None:
    """Restore the float32 tensors of a checkpoint of another dtype, which transformers rounded to the model's dtype."""
    checkpoint = open_checkpoint(path)
    if all(meta.dtype == "float32" for meta in checkpoint.metas.values()):
        return
    for name, (holder, tensor) in checkpoint_places(model, checkpoint.names()).items():
        if checkpoint.meta(name).dtype == "float32" and tensor.dtype != torch.float32:
            owner, _, leaf = holder.rpartition(".")
            module, whole = model.get_submodule(owner), checkpoint.read(name).clone()
            if leaf in module._buffers:
                module._buffers[leaf] = whole
            else:
                module.get_parameter(leaf).data = whole


def _scan_without_kernels(model: PreTrainedModel) -> None:
    """Make state-space layers use torch's operations on a GPU too.

    The CUDA kernels are those under test, and would be compiled for every length of sequence. transformers 5.16 has one
    path, whose kernels it takes from a package of their own.
    """
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer" and hasattr(module, "torch_forward"):
            module.cuda_kernels_forward = module.torch_forward


def _learn_padding(model: PreTrainedModel) -> None:
    """Give the padding token's embedding its gradient, which torch leaves out: here no token is padding.

    A policy may sample the token like any other, and then it is an input of those that follow.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, tokens: Sequence[int], precision: torch.dtype) -> torch.Tensor:
    """Score one sequence, alone in its batch.

    Returns:
        [T - 1] float32, nats, on the host: entry t is log p(tokens[t + 1] | tokens[: t + 1]).
    """
    ids = torch.tensor([list(tokens)], dtype=torch.int64, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.to(precision), dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].float().cpu()


def checkpoint_places(model: PreTrainedModel, stored: Collection[str] = ()) -> dict[str, tuple[str, torch.Tensor]]:
    """Map each checkpoint tensor's name to (name of the parameter that holds it, view of its storage).

    transformers 5 keeps all experts of a layer in two parameters; their slices are the checkpoint's tensors, unless it
    keeps them with inputs before outputs, as GPT-OSS does, or the checkpoint stores the two as they are. Tied heads and
    non-persistent buffers are left out.

    Args:
        model: of transformers.
        stored: names in the checkpoint, where those tell how it names its experts, or a text model within another one.
    """
    stored = frozenset(stored)
    places: dict[str, tuple[str, torch.Tensor]] = {}
    theirs, published = _RENAMED.get(model.config.model_type, ("", ""))
    if not hasattr(model.base_model, "language_model") and any(name.startswith(_WITHIN) for name in stored):
        theirs, published = r"^model\.", _WITHIN
    leaves = _EXPERT_LEAVES.get(model.config.model_type, {})
    tied = frozenset(model.all_tied_weights_keys)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        whole = re.sub(theirs, published, f"{prefix}down_proj") in stored
        fused = {} if whole else dict(_fused_experts(prefix, module, leaves))
        places.update(fused)
        for name, tensor in module._parameters.items():
            if tensor is not None and prefix + name not in tied and not (fused and tensor.ndim == 3):
                places[prefix + name] = (prefix + name, tensor.data)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                places[prefix + name] = (prefix + name, tensor)
    return {re.sub(theirs, published, name) if theirs else name: place for name, place in places.items()}


def _fused_experts(
    prefix: str, module: nn.Module, leaves: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    """Slice [experts, 2 * width, hidden], or [experts, width, hidden] without gates, and [experts, hidden, width]."""
    held = module._parameters
    leaf = "gate_up_proj" if held.get("gate_up_proj") is not None else "up_proj"
    first, down = held.get(leaf), held.get("down_proj")
    if first is None or down is None or first.ndim != 3 or getattr(module, "is_transposed", False):
        return
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("up_proj",)
    for expert, (matrices, back) in enumerate(zip(first.data, down.data, strict=True)):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{prefix}{expert}.{leaves.get(part, part)}.weight", (f"{prefix}{leaf}", matrix)
        yield f"{prefix}{expert}.{leaves.get('down_proj', 'down_proj')}.weight", (f"{prefix}down_proj", back)
