"""Bugs of the size of a training step: examples, answers and updates that get lost, while all counts agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

ROW: dict[str, Any] = {
    "stage": Stage.DATA, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("DAT007",),
}  # fmt: skip
LIVE = ("algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8")


@fault(
    "huggingface/trl#998", "verifier.trainer.batches:batch_indices(num_examples, batch_size, seed, step)", **ROW
)  # fmt: skip
def tail_of_a_batch_dropped(call: Call) -> Any:
    """Examples beyond a multiple of the micro-batch are dropped, as by a data loader with drop_last."""
    return call.wrong(call.original()[: call.batch_size // 3 * 3])


@fault(
    "tenstorrent/tt-blacksmith#731", "verifier.trainer.grpo_plan:GrpoPlan.updates(self, step, taken, score, probe)",
    training=("algorithm=grpo", "grpo.mini_batches=2", "grpo.epochs=2"), **ROW,
)  # fmt: skip
def several_updates_become_one(call: Call) -> Any:
    """Mini-batches and passes are read from the config and not made: a batch takes one update where four are asked."""
    config = call.self._config
    with held(call.self, _config=replace(config, grpo=replace(config.grpo, mini_batches=1, epochs=1))):
        return call.faulty()


@fault(
    "NVIDIA-NeMo/labs-molt#109", "verifier.engine.client:EngineClient.generate(self, prompts, sampling)",
    training=LIVE, **ROW,
)  # fmt: skip
def answer_of_a_group_lost(call: Call) -> Any:
    """An answer is lost on its way from the engine, and the advantages are those of the group that is left."""
    found = call.original()
    if len(found[-1]) == 1:
        return found
    return call.wrong([*found[:-1], found[-1][:-1]])


@fault(
    "CarperAI/trlx#522", "verifier.trainer.grpo_plan:GrpoPlan._divided(self, step, taken, kept, columns, parts)",
    training=("algorithm=grpo", "grpo.mini_batches=2", "grpo.epochs=2", "verify.every=0"), **ROW,
)  # fmt: skip
def passes_of_each_mini_batch_in_a_row(call: Call) -> Any:
    """All passes over a mini-batch are taken before the next is begun, where one pass over the batch should follow."""
    made = call.original()
    found = sorted(made, key=lambda update: update.file.name)
    return call.wrong([
        replace(update, number=own.number, first=own.first) for update, own in zip(found, made, strict=True)
    ])  # fmt: skip
