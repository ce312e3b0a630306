"""Libraries of vLLM's engines without any module of this package."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util

from verifier.platform import FLASHINFER, leave_out

_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "nemotron_h")
"""Modules of models that are imported ahead; others are when an engine needs them."""


def preload() -> None:
    """Import them, in a fork server; without vLLM nothing."""
    if importlib.util.find_spec("vllm") is None:
        return
    import torch

    leave_out(FLASHINFER)
    importlib.import_module(f"vllm.v1.worker.{'gpu' if torch.cuda.is_available() else 'cpu'}_worker")
    importlib.import_module("vllm.v1.executor.multiproc_executor")
    for name in _MODELS:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"vllm.model_executor.models.{name}")
