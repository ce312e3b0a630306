"""What megatron-core hands to a kernel that gets it wrong, mended in the GPU tier's trainer ranks.

It can go when no machine runs cuDNN older than 9.19; `tests/h100/test_attention.py` shows which has the bug.
"""

from __future__ import annotations

from typing import Any

from verifier.platform.patch import Patch, apply

PREPARE = "megatron.core.transformer.multi_latent_attention:_prepare_mla_core_attention_value"


def _unpadded(
    parallel_attention: Any,
    query: Any,
    value: Any,
    packed_seq_params: Any,
) -> tuple[Any, bool, int | None, int | None]:
    """The value as it is, and that nothing is to be cut off its output.

    megatron-core 0.19.2 pads the values of latent attention to the width of its keys, 128 to 192, where sequences are
    packed. For packed sequences of 192 elements per head in keys and values, cuDNN 9.14 on Hopper returns gradients of
    queries, keys and values whose elements from the 128th on are zero, or lack part of the sum: the rotated part of
    each head is not trained on. With values of 128 elements its gradients are right; cuDNN 9.19 has both right.
    """
    width = None if value is None else value.shape[-1]
    return value, False, width, width


def install() -> None:
    """Mend what needs mending, in this process.

    Raises:
        UsageError: a function to mend is not the one that was read.
    """
    apply([Patch(target=PREPARE, replacement=_unpadded, takes="parallel_attention query value packed_seq_params")])
