"""Bugs of sampling ahead: tokens that claim another version, and keys of weights that are gone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

LIVE = ("algorithm=grpo", "data.rollouts=null", "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05")
QUEUED = (*LIVE, "data.batch_size=2", "grpo.ratio_over=engine")
AHEAD = (*QUEUED, "grpo.max_staleness=1")
ASYNC = (*QUEUED, "engine.kind=hf", "grpo.mode=async")
INFLIGHT = (*AHEAD, "grpo.mode=inflight", "grpo.inflight_steps=3", "verify.every=1")
PROMPTS = Path(__file__).parent / "prompts" / "long_sums.jsonl"
"""Prompts of more tokens than a block of vLLM's cache has, and so few of them that each step asks all."""
CONTROLLER: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "training": (*INFLIGHT, "engine.kind=hf"),
}  # fmt: skip
SENDER: dict[str, Any] = {"stage": Stage.ROLLOUT, "side": Side.TRAINER, "engine": TRAINING, "model": "tiny:add"}
VERSIONS = "verifier.trainer.generation:versions_of(sample, version)"
RESET = "verifier.engine.client:EngineClient.reset_prefix_cache(self, running)"


@fault("areal-project/AReaL#1569", VERSIONS, caught_by=("LGP003", "LGP009"), **CONTROLLER)
def last_old_token_claims_new_weights(call: Call) -> Any:
    """The version is read after the answer to a step has come, so the last token before an update gets the next one."""
    found = call.original()
    if len(set(found)) == 1:
        return found
    return call.wrong(tuple(max(pair) for pair in pairwise((*found, found[-1]))))


@fault("vllm-project/vllm#54443", VERSIONS, caught_by=("LGP003",), **CONTROLLER)
def first_new_token_claims_old_weights(call: Call) -> Any:
    """A token that is scheduled before an update and sampled after it keeps the version of its schedule."""
    found = call.original()
    if len(set(found)) == 1:
        return found
    return call.wrong(tuple(min(pair) for pair in pairwise((found[0], *found))))


@fault("NVIDIA-NeMo/RL#3152", RESET, caught_by=("LGP003", "LGP009"), training=INFLIGHT, **SENDER)
def keys_kept_where_recomputed_is_asked(call: Call) -> Any:
    """The switch for recomputing does not reach the engine, so requests go on with the keys of the old weights."""
    if not call.running:
        return call.original()
    call.faulty(running=False)
    return True


@fault(
    "NVIDIA-NeMo/RL#4018", RESET, caught_by=("LGP009",),
    training=(*LIVE, "data.batch_size=4", f"data.source={PROMPTS}"), **SENDER,
)  # fmt: skip
def prefix_cache_kept_at_a_sync(call: Call) -> Any:
    """Nothing resets the prefix cache after a step, so prompts that come again are read with the old weights' keys."""
    return call.wrong(True)
