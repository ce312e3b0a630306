"""Bugs of evaluations in a training run: older weights, draws, another reward, problems that count twice or never."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

ROW: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LGP015",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "grpo.temperature=0.8", "evaluation.num_problems=12",
        "evaluation.every=1",
    ),
}  # fmt: skip


@fault(
    "marin-community/marin#7179", "verifier.trainer.generation:encode_prompt(example, tokenizer)",
    **{**ROW, "stage": Stage.DATA, "caught_by": ("DAT013",)},
)  # fmt: skip
def evaluated_without_the_first_token(call: Call) -> Any:
    """Held-out prompts are encoded without the token that begins a text, and those of the training set with it."""
    from verifier.data.arithmetic import is_held_out

    found = call.original()
    return call.wrong(found[1:]) if is_held_out(call.example.prompt) else found


@fault(
    "tensorflow/ranking#350", "verifier.trainer.generation:EngineRollouts._evaluated(self, step)",
    **{**ROW, "stage": Stage.DATA, "caught_by": ("DAT016",)},
)  # fmt: skip
def evaluated_on_other_problems(call: Call) -> Any:
    """An evaluation asks problems of the training set in the place of those that are held out."""
    count = len(call.self._held_out)
    with held(call.self, _held_out=call.self._examples[:count], _held_out_prompts=call.self._prompts[:count]):
        return call.faulty()
