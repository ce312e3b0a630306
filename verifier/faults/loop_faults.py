"""Bugs of the loop: checkpoints removed or passed over, evaluations not made, flags and limits that are lost."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from verifier.core.stage import Stage
from verifier.faults.evaluation_faults import ROW as EVALUATION
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.faults.mode_faults import ASYNC
from verifier.faults.turn_faults import STEP_WISE

KEPT: dict[str, Any] = {
    "stage": Stage.CHECKPOINT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "caught_by": ("CKP001",),
}  # fmt: skip
CHECKPOINTS = "verifier.trainer.checkpoint_folder:Checkpoints"
SAMPLING = (
    "verifier.trainer.generation:Sampling(seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end)"
)


@fault(
    "NVIDIA-NeMo/RL#3837", "verifier.data.recorded:decoded(fields)", stage=Stage.DATA, side=Side.CONTROLLER,
    engine=TRAINING, model="tiny:add", caught_by=("DAT012",), training=("algorithm=grpo", "grpo.drop_overlong=true"),
)  # fmt: skip
def recorded_answers_count_as_whole(call: Call) -> Any:
    """Recorded rollouts lose their mark of having been cut off, and the filter of overlong answers does nothing."""
    found = call.original()
    return call.wrong(structs.replace(found, truncated=False)) if found.truncated else found


@fault("huggingface/trl#4970", SAMPLING, **{**EVALUATION, "caught_by": ("LGP015",)})
def evaluated_answers_run_on(call: Call) -> Any:
    """No stop token reaches the engine with an evaluation, whose answers run on past their end."""
    return call.faulty(stop=()) if call.temperature == 0 else call.original()


@fault(
    "modelscope/ms-swift#7838 (kin: there the last turn alone was in the loss)",
    "verifier.trainer.generation:rows_of(turns, row, step_wise)", stage=Stage.DATA, side=Side.CONTROLLER,
    engine=TRAINING, model="tiny:add", caught_by=("DAT006",), training=STEP_WISE,
)  # fmt: skip
def earlier_turns_lost(call: Call) -> Any:
    """An episode gives the sample of its last turn alone, and no earlier one is trained on."""
    found = call.original()
    return call.wrong(found[-1:]) if len(found) > 1 else found


@fault(
    "NVIDIA-NeMo/RL#2632", f"{CHECKPOINTS}.last_whole(self, before)",
    **{**KEPT, "training": (*ASYNC, "grpo.max_staleness=1")},
)  # fmt: skip
def batch_ahead_not_saved(call: Call) -> Any:
    """A checkpoint has no batch that was sampled ahead, and a resume samples its prompts anew."""
    found, refused = call.original()
    return call.wrong((structs.replace(found, rollouts=[]), refused)) if found is not None else (found, refused)
