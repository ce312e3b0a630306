"""Known bugs of vLLM's reload and sleep, mended inside the engine's workers for as long as the pinned vLLM has them.

A guard names its upstream issue and the versions that have the bug. `tests/contracts/test_reload.py` shows on the
installed vLLM that the bug is there without the guard and gone with it; once upstream is mended that test fails, and
the guard goes. What else of the known reload bugs vLLM 0.21 has, or has not, stands in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import vllm

from verifier.platform.patch import Patch, apply, current

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One mended function of vLLM."""

    issue: str
    """Upstream pull requests that mend it, as "vllm #NUMBER"."""
    versions: tuple[str, ...]
    target: str
    """`package.module:attribute`."""
    takes: str
    """The function's parameters, separated by spaces."""
    make: Make
    """Takes vLLM's function, gives the mended one."""


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
    """Who sleeps well fails all the same if others on that GPU took more memory meanwhile than was given up.

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


GUARDS = (
    Guard(
        issue="vllm #42481, vllm #44371",
        versions=("0.21.0",),
        target="vllm.model_executor.model_loader.reload.layerwise:materialize_layer",
        takes="layer info",
        make=_kept_buffers,
    ),
    Guard(
        issue="vllm #48251",
        versions=("0.21.0",),
        target="vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
        takes="self act_dtype",
        make=_kept_storage,
    ),
    Guard(
        issue="vllm #45620",
        versions=("0.21.0",),
        target="vllm.v1.worker.gpu_worker:Worker.sleep",
        takes="self level",
        make=_asleep_beside_others,
    ),
)


def install() -> None:
    """Mend what the running vLLM needs mended, once per process.

    Raises:
        UsageError: a function to mend is not the one that was read.
    """
    running = vllm.__version__.partition("+")[0]
    apply(
        [
            Patch(target=guard.target, replacement=guard.make(current(guard.target)), takes=guard.takes)
            for guard in GUARDS
            if running in guard.versions
        ]
    )
