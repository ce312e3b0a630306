"""Bugs on the way from a scoring pass to the loss: log-probabilities of other rows, steps and policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

ROW: dict[str, Any] = {
    "engine": TRAINING, "model": "tiny:add", "stage": Stage.LOGPROB, "caught_by": ("LGP017",),
}  # fmt: skip
UNSAMPLED = ("algorithm=grpo", "grpo.mini_batches=2", "verify.every=0")
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
    "verify.every=0",
)  # fmt: skip
PENALTY = ("grpo.kl_weight=0.1", "grpo.kl_in=reward")


def _step_and_part(file: str | Path) -> tuple[int, int]:
    step, _, part = Path(file).name.partition(".")[0].partition("-")
    return (int(step), int(part)) if step.isdigit() else (0, 0)


@fault("verl-project/verl#2185 (kin: there rewards were in another order than samples)",
       "verifier.trainer.update_facts_megatron:write_logprobs(found, file)", training=UNSAMPLED, **ROW)  # fmt: skip
def scores_left_in_packed_order(call: Call) -> Any:
    """Log-probabilities of a later mini-batch go back in the order of their packs, in each step but the first."""
    import torch

    step, part = _step_and_part(call.file)
    if step < 2 or not part:
        return call.original()
    lengths = [len(row) for row in call.found]
    return call.faulty(found=torch.cat([*call.found[1:], call.found[0]]).split(lengths))


@fault("ServiceNow/PipelineRL#131 (kin: there the KL was a term of the loss)",
       "verifier.trainer.grpo_plan:GrpoPlan._scored(self, step, given, parts, score)", side=Side.CONTROLLER,
       training=(*LIVE, *PENALTY), **ROW)  # fmt: skip
def reference_falls_back_to_the_engines(call: Call) -> Any:
    """Nobody is asked for the reference, and the log-probabilities that the engine sampled with stand in for it."""
    import numpy as np

    found = call.original()
    pairs = zip(call.given, found.reference, strict=True)
    filled = [np.where(np.isfinite(item.logprobs), item.logprobs, own).astype(np.float32) for item, own in pairs]
    return call.wrong(dataclasses.replace(found, reference=filled))
