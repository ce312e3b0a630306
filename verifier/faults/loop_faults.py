"""Bugs of the loop: checkpoints removed or passed over, evaluations not made, flags and limits that are lost."""

from __future__ import annotations

import shutil
from typing import Any

from msgspec import structs

from verifier.core.stage import Stage
from verifier.faults.evaluation_faults import ROW as EVALUATION
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.faults.mode_faults import ASYNC
from verifier.faults.turn_faults import KNOBS, STEP_WISE
from verifier.mesh import Mesh

KEPT: dict[str, Any] = {
    "stage": Stage.CHECKPOINT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "caught_by": ("CKP003",),
}  # fmt: skip
CHECKPOINTS = "verifier.trainer.checkpoint_folder:Checkpoints"
SAMPLING = (
    "verifier.trainer.generation:Sampling(seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end)"
)


@fault("deepset-ai/FARM#282", f"{CHECKPOINTS}.finish(self, state)", training=("checkpoint.keep=1",), **KEPT)
def newest_checkpoint_removed(call: Call) -> Any:
    """Checkpoints beyond those that are kept are removed from the wrong end of their list: the newest goes."""
    keep, call.self._keep = call.self._keep, 10
    try:
        folder = call.original()
    finally:
        call.self._keep = keep
    for step in call.self._steps()[keep:]:
        call.fire()
        shutil.rmtree(call.self.path(step))
    return folder


@fault(
    "nvidia-cosmos/cosmos-rl#232", f"{CHECKPOINTS}.last_whole(self, before)", training=("checkpoint.keep=3",), **KEPT
)
def resumed_from_an_older_checkpoint(call: Call) -> Any:
    """The list of checkpoints is in another order than that of their steps, and a run goes on from an older one."""
    found, refused = call.original()
    if found is None or found.step == 1:
        return found, refused
    return call.wrong(call.original(before=found.step))


@fault(
    "PrimeIntellect-ai/prime-rl#1513", "verifier.trainer.loop:StepLoop._evaluate(self, step)",
    **{**EVALUATION, "stage": Stage.LOSS, "caught_by": ("MET002",)},
)  # fmt: skip
def due_evaluation_not_made(call: Call) -> Any:
    """An evaluation that is due is passed over, and the curve has a gap where nobody looks for a point."""
    return call.wrong({}) if call.step == 2 else call.original()


@fault(
    "NVIDIA-NeMo/RL#3837", "verifier.data.recorded:decoded(fields)", stage=Stage.DATA, side=Side.CONTROLLER,
    engine=TRAINING, model="tiny:add", caught_by=("DAT012",), training=("algorithm=grpo", "grpo.drop_overlong=true"),
)  # fmt: skip
def recorded_answers_count_as_whole(call: Call) -> Any:
    """Recorded rollouts lose their mark of having been cut off, and the filter of overlong answers does nothing."""
    found = call.original()
    return call.wrong(structs.replace(found, truncated=False)) if found.truncated else found


@fault("OpenBMB/RLPR#25", SAMPLING, **{**EVALUATION, "caught_by": ("LGP015",)})
def evaluated_answers_cut_short(call: Call) -> Any:
    """The limit of an evaluation's answers is one of its own, and what the config says does nothing."""
    return call.faulty(max_tokens=call.max_tokens // 2) if call.temperature == 0 else call.original()


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
    **{**KEPT, "caught_by": ("CKP001",), "training": (*ASYNC, "grpo.max_staleness=1")},
)  # fmt: skip
def batch_ahead_not_saved(call: Call) -> Any:
    """A checkpoint has no batch that was sampled ahead, and a resume samples its prompts anew."""
    found, refused = call.original()
    return call.wrong((structs.replace(found, rollouts=[]), refused)) if found is not None else (found, refused)


@fault(
    "NVIDIA-NeMo/RL#1089", "verifier.trainer.episodes:Episodes.play(self, sampler, prompts, sampling, stride)",
    stage=Stage.DATA, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("DAT006",),
    training=(*KNOBS, "evaluation.num_problems=8", "evaluation.every=1"),
)  # fmt: skip
def evaluated_by_the_first_turn(call: Call) -> Any:
    """An evaluation takes one turn of each episode, and the tool is there in training alone."""
    found = call.original()
    return found if call.sampling.n > 1 else call.wrong([[[turns[0]] for turns in own] for own in found])


@fault(
    "PaddlePaddle/PaddleFormers#4744", "verifier.trainer.run_folder:RunFolder.rewind(self, step)",
    **{**KEPT, "caught_by": ("MET002",), "training": ("verify.every=0",)},
)  # fmt: skip
def lines_stay_of_steps_taken_again(call: Call) -> Any:
    """The file of metrics keeps the lines of steps behind the checkpoint, and each of them is there twice."""
    file = call.self.path / "metrics.jsonl"
    before, found = file.read_text(), call.original()
    if file.read_text() != before:
        call.fire()
        file.write_text(before)
    return found


@fault(
    "roboflow/rf-detr#1321", "verifier.trainer.run_folder:RunFolder.add_metrics(self, values)",
    **{**KEPT, "stage": Stage.LOSS, "saved_on": Mesh(), "caught_by": ("MET002",), "training": ("verify.every=0",)},
)  # fmt: skip
def lines_overwritten_by_a_resume(call: Call) -> Any:
    """The file of metrics is opened anew by the first line after a resume, and all steps before it are gone."""
    if not call.state.setdefault("opened", False):
        call.state["opened"] = True
        call.fire()
        (call.self.path / "metrics.jsonl").unlink()
    return call.original()


@fault(
    "fvisin/main_loop_tf#22", "verifier.trainer.metrics:Metrics._add_event(self, step, numbers)",
    **{**KEPT, "stage": Stage.LOSS, "saved_on": Mesh(), "caught_by": ("MET002",), "training": ("verify.every=0",)},
)  # fmt: skip
def points_stay_of_steps_taken_again(call: Call) -> Any:
    """TensorBoard is not told of a restart, and its curves keep the points of steps that are taken again."""
    call.self._restarted = True
    return call.faulty()
