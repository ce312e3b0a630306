"""Bugs of live answers in training: end tokens out of the loss, answers that count as cut off, lost stop tokens."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

GENERATION = "verifier.trainer.generation:EngineRollouts"
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=8", "grpo.max_answer_tokens=8",
    "grpo.group_size=8", "grpo.entropy_weight=0.05",
)  # fmt: skip
ROW: dict[str, Any] = {
    "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "training": LIVE, "caught_by": ("DAT008",),
}  # fmt: skip


@fault(
    "huggingface/trl#4970", f"{GENERATION}._rows(self, version, place, which, example, turns)", stage=Stage.DATA, **ROW
)  # fmt: skip
def end_of_an_answer_masked(call: Call) -> Any:
    """The mask is made of token values, and the end token, which pads too, is out of the loss."""
    from msgspec.structs import replace

    rows, end = call.original(), call.self._tokenizer.eos_id
    if any(end in row.response for row in rows):
        call.fire()
    return [
        replace(row, mask=tuple(own and token != end for own, token in zip(row.mask, row.response, strict=True)))
        for row in rows
    ]
