"""Bugs of an engine that samples for a training run: weights, tables and constants between one sync and the next."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
    "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0",
)  # fmt: skip
ROW: dict[str, Any] = {
    "stage": Stage.ENGINE, "side": Side.DRIVER, "engine": TRAINING, "model": "tiny:add", "training": LIVE,
}  # fmt: skip
ENGINE = "verifier.engine.engine_hf:HfEngine"


@fault("huggingface/trl#5312", f"{ENGINE}.generate(self, prompts, sampling)", caught_by=("ENG009", "LGP009"), **ROW)
def checkpoint_read_again_when_asked(call: Call) -> Any:
    """An engine that wakes to sample reads its checkpoint once more, over the weights that the sync has brought."""
    state = call.self.model.state_dict()
    if "read" not in call.state:
        call.state["read"] = {name: tensor.clone() for name, tensor in state.items()}
        return call.original()
    for name, tensor in state.items():
        tensor.copy_(call.state["read"][name])
    return call.faulty()
