"""Routers that list a token's experts in the same order with and without gradients, so that both passes round alike.

megatron-core 0.19.2 sorts the experts of a token by score only where gradients are computed
(core/transformer/moe/moe_utils.py, `topk_routing_with_score_function`). The weights of more than two experts are
divided by a sum, which then has its summands in another order: scoring and training differ by one rounding, and so does
a layer that is recomputed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from verifier.platform.patch import Patch, apply, current

CHOICE = "megatron.core.transformer.moe.router:topk_routing_with_score_function"
TAKES = (
    "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias fused router_replay "
    "dense_output precomputed_indices"
)


def install() -> None:
    """Sort the experts of every token in this process, in passes without gradients too.

    Logits of such a pass need no gradient, so nothing is kept for a backward pass.

    Raises:
        UsageError: megatron-core's function is not the one that was read.
    """
    chosen = current(CHOICE)

    @functools.wraps(chosen)
    def in_order(*args: Any, **options: Any) -> Any:
        with torch.enable_grad():
            return chosen(*args, **options)

    apply([Patch(CHOICE, in_order, takes=TAKES)])
