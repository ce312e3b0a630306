"""Bugs of packing: rollouts to the rows that each rank works on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh


def _packed_from(
    fired: Fired, change: Callable[[Callable[..., Any], Any, Any, Fired], Any]
) -> contextlib.AbstractContextManager[None]:
    """Micro-batches are packed by `change`, which is handed the right packing."""

    def make(original: Any) -> Any:
        def pack(rollouts: Any, alignment: Any, **options: Any) -> Any:
            return change(original, rollouts, alignment, fired)

        return pack

    return replaced("verifier.train.step_megatron:pack", "rollouts, alignment, pad_token, extra", make)


def _mask_of_the_input(original: Callable[..., Any], rollouts: Any, alignment: Any, fired: Fired) -> Any:
    fired()
    packed = original(rollouts, alignment)
    return dataclasses.replace(packed, loss_mask_T=packed.loss_mask_T.roll(1))


def _padding_as_tokens(original: Callable[..., Any], rollouts: Any, alignment: Any, fired: Fired) -> Any:
    fired()
    packed = original(rollouts, alignment)
    return dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens_padded)


def _other_order_on_rank_1(original: Callable[..., Any], rollouts: Any, alignment: Any, fired: Fired) -> Any:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        fired()
        rollouts = list(reversed(rollouts))
    return original(rollouts, alignment)


FAULTS = (
    Fault(
        id="mask-of-input-not-label",
        stage=Stage.PACK,
        reproduces="verl-project/verl#3287",
        summary="the loss mask is that of each row's input, not of the token that the row predicts",
        caught_by=("PCK001", "LSS001"),
        inject=lambda fired: _packed_from(fired, _mask_of_the_input),
    ),
    Fault(
        id="padding-taken-for-tokens",
        stage=Stage.PACK,
        reproduces="NVIDIA/Megatron-LM#5541",
        summary="padded boundaries stand where attention expects those of the tokens",
        caught_by=("PCK002",),
        inject=lambda fired: _packed_from(fired, _padding_as_tokens),
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="batch-differs-on-one-rank",
        stage=Stage.PACK,
        reproduces="sii-research/siiRL#69",
        summary="one rank of a group packs the same sequences in another order than its peers",
        caught_by=("PCK003", "LGP001"),
        inject=lambda fired: _packed_from(fired, _other_order_on_rank_1),
        mesh=Mesh(tp=2, ep=2),
    ),
)
