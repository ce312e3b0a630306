"""Bugs of the loop: checkpoints removed or passed over, evaluations not made, flags and limits that are lost."""

from __future__ import annotations

from typing import Any

from verifier.faults.fault import Call, fault
from verifier.stages.data.faults_evaluation import ROW as EVALUATION

SAMPLING = (
    "verifier.trainer.generation:Sampling(seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end)"
)


@fault("huggingface/trl#4970", SAMPLING, **{**EVALUATION, "caught_by": ("LGP015",)})
def evaluated_answers_run_on(call: Call) -> Any:
    """No stop token reaches the engine with an evaluation, whose answers run on past their end."""
    return call.faulty(stop=()) if call.temperature == 0 else call.original()
