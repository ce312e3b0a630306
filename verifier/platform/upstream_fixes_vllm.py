"""Fixes of vLLM's reload and sleep in an engine's workers, each installed for a run that asks for its id.

`verifier/contracts/reload_vllm.py` shows on the installed vLLM that each bug is there without its fix and gone with it.
It does not find a bug that upstream has mended, and the fix goes then. What else of the known reload bugs vLLM 0.21
has, or has not, stands there too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from verifier.platform.patch import Patch, apply, current
from verifier.platform.upstream_fixes import ENGINE_VARIABLE, VLLM_BUFFERS, VLLM_HEADS, VLLM_LATENT, VLLM_SLEEP


def _kept_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reload makes a layer's tensors anew and copies all of them over the live ones, loaded or not.

    A buffer that no checkpoint carries thus becomes what fresh memory held; NemotronH's `conv_weights` is the same
    memory as its child's `conv1d.weight`, which had just been loaded. Here the new buffer begins as a copy of the live
    one.
    """

    @wraps(original)
    def materialize(layer: torch.nn.Module, info: Any) -> None:
        original(layer, info)
        for name, live in (info.kernel_tensors or ({}, {}))[1].items():
            fresh = layer._buffers.get(name)
            if fresh is not None and fresh is not live and (fresh.shape, fresh.dtype) == (live.shape, live.dtype):
                fresh.copy_(live)

    return materialize


def _packed_heads(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reload packs a layer's weight anew when that layer was loaded; a tied head shares one that another loaded.

    `ParallelLMHead.tie_weights` binds the embedding's parameter, and models skip `lm_head` in what they load. The
    parameter is filled in place, so the head is packed again from it here, and so is any layer that shares one.
    """

    @wraps(original)
    def finalize(model: torch.nn.Module, model_config: Any) -> None:
        original(model, model_config)
        holders: dict[int, list[torch.nn.Module]] = {}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                holders.setdefault(id(weight), []).append(module)
        for sharing in holders.values():
            for module in sharing if len(sharing) > 1 else ():
                if "cpu_linear" in module.__dict__:
                    module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]

    return finalize


def _kept_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reload of latent attention binds matrices that it derives to new memory; captured graphs read the old one.

    Only where they are derived by arithmetic, as from fp8 weights: bf16 ones are views of the weight itself.
    """

    @wraps(original)
    def process(self: Any, act_dtype: torch.dtype) -> None:
        earlier = {name: getattr(self, name, None) for name in ("W_UV", "W_UK_T")}
        original(self, act_dtype)
        for name, live in earlier.items():
            fresh = getattr(self, name, None)
            if live is None or fresh is None or fresh.data_ptr() == live.data_ptr():
                continue
            if (fresh.shape, fresh.dtype) == (live.shape, live.dtype):
                live.copy_(fresh)
                setattr(self, name, live)

    return process


def _asleep_beside_others(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sleep that succeeds although others on that GPU took more memory meanwhile than was given up.

    vLLM asserts it of the GPU's free memory, at the end, when it has given up its own.
    """

    @wraps(original)
    def sleep(self: Any, level: int = 1) -> None:
        try:
            original(self, level)
        except AssertionError as error:
            if str(error) != "Memory usage increased after sleeping.":
                raise

    return sleep


MODULES = "vllm.model_executor"
REPLACED: dict[str, tuple[str, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    VLLM_BUFFERS: (f"{MODULES}.model_loader.reload.layerwise:materialize_layer", "layer info", _kept_buffers),
    VLLM_HEADS: (
        f"{MODULES}.model_loader.reload.layerwise:finalize_layerwise_processing",
        "model model_config",
        _packed_heads,
    ),
    VLLM_LATENT: (
        f"{MODULES}.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
        "self act_dtype",
        _kept_storage,
    ),
    VLLM_SLEEP: ("vllm.v1.worker.gpu_worker:Worker.sleep", "self level", _asleep_beside_others),
}
"""Id of a fix -> the function that it replaces, that function's parameters, and what makes the new one of the old."""
_installed: set[str] = set()


def install(fixes: Collection[str]) -> None:
    """Replace the functions of these fixes in this process, each once.

    Raises:
        UsageError: a function to replace is not the one that was read.
    """
    wanted = {item: row for item, row in REPLACED.items() if item in fixes and item not in _installed}
    apply([Patch(target, make(current(target)), takes) for target, takes, make in wanted.values()])
    _installed.update(wanted)


def install_asked() -> None:
    """Install what the environment of an engine's process asks for; see `install`."""
    install(os.environ.get(ENGINE_VARIABLE, "").split(","))


def installed(worker: Any) -> list[str]:
    """Ids of the fixes in one engine rank's process; called through `Engine.call`."""
    return sorted(_installed)
