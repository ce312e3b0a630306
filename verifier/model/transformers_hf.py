"""A transformers model: loaded in one dtype, asked for logprobs, and its tensors found by checkpoint name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from verifier.errors import ContractError
from verifier.model.checkpoint import open_checkpoint
from verifier.platform.upstream_fixes import TRANSFORMERS_SCAN
from verifier.platform.upstream_fixes_transformers import scan_in_one_chunk

_PREFIXES = {"nemotron_h": ("model.", "backbone.")}
"""Model type -> transformers' prefix of the stack's tensors, and the checkpoints'."""


def load_model(
    path: Path | str, dtype: torch.dtype, *, fixes: Collection[str] = (TRANSFORMERS_SCAN,)
) -> PreTrainedModel:
    """Load a checkpoint directory with eager attention and eager experts, on the CPU, for inference.

    Args:
        path: the checkpoint.
        dtype: of the parameters, but for those that the checkpoint keeps in float32.
        fixes: ids of the upstream fixes to install. The oracle has them whatever the run asks for: it computes what the
            model's definition says.

    Raises:
        ContractError: transformers finds a tensor missing, or one that the architecture has no place for.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    for what, names in (("is missing", info["missing_keys"]), ("has no place in it", info["unexpected_keys"])):
        if names:
            raise ContractError(f"transformers loads {path}, but `{sorted(names)[0]}` {what}")
    _restore_float32(model, path)
    if TRANSFORMERS_SCAN in fixes:
        scan_in_one_chunk(model)
    _scan_without_kernels(model)
    return model.eval().requires_grad_(False)


_held: dict[tuple[Any, ...], PreTrainedModel] = {}


def hold_model(path: Path | str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The last model that was asked for, or another in its place: requests for one checkpoint follow each other.

    Args:
        path: the checkpoint; one whose files were written since is another.
        dtype: as `load_model` takes it.
        device: "cpu", or "cuda".

    Returns:
        For inference only; it must be left as it is.

    Raises:
        ContractError: as `load_model` does.
    """
    files = [(item.name, item.stat()) for item in sorted(Path(path).iterdir())]
    key = (str(path), dtype, device, *((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in files))
    if key not in _held:
        release_model()
        _held[key] = load_model(path, dtype).to(device)
    return _held[key]


def release_model() -> None:
    """Give up the model that is held, if any, and its memory."""
    _held.clear()


def _restore_float32(model: PreTrainedModel, path: Path | str) -> None:
    """Give back what a checkpoint of another dtype keeps in float32 and transformers rounded to the model's dtype."""
    checkpoint = open_checkpoint(path)
    if all(meta.dtype == "float32" for meta in checkpoint.metas.values()):
        return
    for name, (holder, tensor) in checkpoint_places(model).items():
        if checkpoint.meta(name).dtype == "float32" and tensor.dtype != torch.float32:
            model.get_parameter(holder).data = checkpoint.read(name).clone()


def _scan_without_kernels(model: PreTrainedModel) -> None:
    """Have state-space layers take torch's operations on a GPU too, as they do on the host.

    The kernels are the trainer's and the engine's, and would be compiled again for every length of sequence.
    """
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.cuda_kernels_forward = module.torch_forward


@torch.inference_mode()
def token_logprobs(
    model: PreTrainedModel, tokens: Sequence[int], precision: torch.dtype, temperature: float = 1.0
) -> torch.Tensor:
    """Teacher-forced logprobs of one sequence, alone in its batch.

    Args:
        model: as `load_model` returns it.
        tokens: T ids.
        precision: of the log-softmax.
        temperature: what logits are divided by; 0 asks for the likeliest token's, undivided, whatever the tokens.

    Returns:
        [T - 1] float32, nats, on the host: entry t is log p(tokens[t + 1] | tokens[: t + 1]).
    """
    ids = torch.tensor([list(tokens)], dtype=torch.int64, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.to(precision) / (temperature or 1.0), dim=-1)
    found = logprobs.gather(1, ids[0, 1:, None])[:, 0] if temperature else logprobs.amax(dim=-1)
    return found.float().cpu()


def checkpoint_places(model: PreTrainedModel) -> dict[str, tuple[str, torch.Tensor]]:
    """Where each checkpoint tensor lives in the model: name -> (holder's name, view of its storage).

    transformers 5 keeps all experts of a layer in two parameters; their slices are the checkpoint's tensors. A head
    that is tied to the embedding is no tensor of its own. Buffers that no checkpoint carries are left out.
    """
    places: dict[str, tuple[str, torch.Tensor]] = {}
    theirs, published = _PREFIXES.get(model.config.model_type, ("", ""))
    tied = frozenset(model.all_tied_weights_keys)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        fused = _fused_experts(prefix, module)
        places.update(fused)
        for name, tensor in module._parameters.items():
            if tensor is not None and prefix + name not in tied and not (fused and tensor.ndim == 3):
                places[prefix + name] = (prefix + name, tensor.data)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                places[prefix + name] = (prefix + name, tensor)
    return {
        published + name.removeprefix(theirs) if name.startswith(theirs) else name: place
        for name, place in places.items()
    }


def _fused_experts(prefix: str, module: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    up = {leaf: module._parameters.get(leaf) for leaf in ("gate_up_proj", "up_proj")}
    down = module._parameters.get("down_proj")
    leaf, first = next(((leaf, found) for leaf, found in up.items() if found is not None), ("", None))
    if first is None or down is None or first.ndim != 3:
        return {}
    return dict(_expert_slices(prefix, leaf, first.data, down.data))


def _expert_slices(
    prefix: str, leaf: str, first: torch.Tensor, down: torch.Tensor
) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    """Slices of [experts, 2*width, hidden], or [experts, width, hidden] without gates, and [experts, hidden, width]."""
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("up_proj",)
    width = first.shape[1] // len(parts)
    for expert in range(first.shape[0]):
        for at, part in enumerate(parts):
            yield f"{prefix}{expert}.{part}.weight", (f"{prefix}{leaf}", first[expert, at * width : (at + 1) * width])
        yield f"{prefix}{expert}.down_proj.weight", (f"{prefix}down_proj", down[expert])
