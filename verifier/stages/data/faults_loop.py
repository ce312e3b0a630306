"""Bugs of the loop: checkpoints removed or passed over, evaluations not made, flags and limits that are lost."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.stages.data.faults_turn import STEP_WISE


@fault(
    "modelscope/ms-swift#7838 (kin: there the last turn alone was in the loss)",
    "verifier.trainer.generation:rows_of(turns, row, step_wise)", stage=Stage.DATA, side=Side.CONTROLLER,
    engine=TRAINING, model="tiny:add", caught_by=("DAT006",), training=STEP_WISE,
)  # fmt: skip
def earlier_turns_lost(call: Call) -> Any:
    """An episode gives the sample of its last turn alone, and no earlier one is trained on."""
    found = call.original()
    return call.wrong(found[-1:]) if len(found) > 1 else found
