"""Parts of megatron-bridge that ask for a GPU, or for sequences that are not packed, on the host."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from verifier.platform.cpu_attention import TEDotProductAttention
from verifier.platform.cpu_cuda_shims import HostTorch
from verifier.platform.patch import Patch

LITERAL_CUDA_MODULES = ("megatron.bridge.models.minimax_m2.minimax_m2_bridge",)
"""Modules of megatron-bridge 0.6.2 that put tensors onto `torch.device("cuda", ...)`."""


class Gemma2FlexDotProductAttention(TEDotProductAttention):
    """Gemma 2's attention: scores bent to a bound, a scale of its own, and a window in every other layer.

    Upstream's takes no packed sequences, on a GPU either.

    Source:
        megatron-bridge 0.6.2, models/gemma/gemma2_provider.py, `Gemma2DotProductAttention`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        options["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, attn_mask_type, attention_type, **options)
        self.softcap = config.attn_logit_softcapping
        if layer_number % 2 == 0:
            self.rows_before = None


def bridge_patches() -> list[Patch]:
    """Return the patches of megatron-bridge, for use after it is imported."""
    view = HostTorch()
    return [
        *(Patch(f"{module}:torch", view) for module in LITERAL_CUDA_MODULES),
        Patch(
            "megatron.bridge.models.gemma.gemma2_provider:Gemma2FlexDotProductAttention",
            Gemma2FlexDotProductAttention,
            takes="config layer_number attn_mask_type attention_type attention_dropout kwargs",
        ),
    ]
