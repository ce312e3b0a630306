"""Bugs of a training run whose steps no oracle computes: gradients that are not added up, norms, frozen adapters."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

ATTACH = "verifier.train.lora_megatron:attach(chunks, lora)"
in_sums = functools.partial(
    fault, stage=Stage.TRAIN, engine=TRAINING, model="tiny:add", caught_by=("TRN006",), training=("verify.every=0",)
)
"""Faults of what an optimizer is given, in updates that no oracle computes."""


@in_sums("huggingface/trl#3926", ATTACH, caught_by=("TRN005",), training=("verify.every=0", "lora.rank=8"))
def half_of_each_adapter_frozen(call: Call) -> Any:
    """A is frozen with the base, and B alone is trained."""
    chunks = call.original()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter.linear_in." in name:
                call.fire()
                parameter.requires_grad = False
    return chunks
