"""Bugs of packing a batch's columns: weights and advantages that reach the row of another token, or another size."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

PACK = "verifier.train.step_megatron:pack(rollouts, alignment, numbers, columns)"
ROW: dict[str, Any] = {
    "stage": Stage.PACK, "caught_by": ("PCK004",), "engine": TRAINING, "model": "tiny:add",
}  # fmt: skip
GRPO: dict[str, Any] = {**ROW, "training": ("algorithm=grpo",)}


@fault(
    "PrimeIntellect-ai/prime-rl#583",
    PACK,
    **ROW,
    mesh=Mesh(dp=2),
    training=("aggregation=sequence_mean", "algorithm=grpo"),
)
def weights_normalised_by_rank(call: Call) -> Any:
    """A data-parallel rank normalises the weights once more over its own micro-batch, so its few tokens count more."""
    weights = (call.columns or {}).get("weight", [])
    total, num_tokens = sum(float(part.sum()) for part in weights), sum(int(item.mask.sum()) for item in call.rollouts)
    if not total:
        return call.original()
    return call.faulty(columns={**call.columns, "weight": [part * num_tokens / total for part in weights]})


@fault("modelscope/ms-swift#8427", PACK, **GRPO, mesh=Mesh(cp=2))
def advantages_of_the_token_before(call: Call) -> Any:
    """Advantages are aligned with each row's input, not with the token that it predicts."""
    import numpy as np

    values = (call.columns or {}).get("advantage")
    if not values:
        return call.original()
    return call.faulty(columns={**call.columns, "advantage": [np.roll(part, 1) for part in values]})
