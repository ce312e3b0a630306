"""Bugs of sampling ahead: tokens that claim another version, and keys of weights that are gone."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, TRAINING, Call, Side, fault

LIVE = ("algorithm=grpo", "data.rollouts=null", "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05")
QUEUED = (*LIVE, "data.batch_size=2", "grpo.ratio_over=engine")
AHEAD = (*QUEUED, "grpo.max_staleness=1")
ASYNC = (*QUEUED, "engine.kind=hf", "grpo.mode=async")
INFLIGHT = (*AHEAD, "grpo.mode=inflight", "grpo.inflight_steps=3", "verify.every=1")
PROMPTS = FOLDER / "prompts" / "long_sums.jsonl"
"""Prompts of more tokens than a block of vLLM's cache has, and so few of them that each step asks all."""
CONTROLLER: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "training": (*INFLIGHT, "engine.kind=hf"),
}  # fmt: skip
SENDER: dict[str, Any] = {"stage": Stage.ROLLOUT, "side": Side.TRAINER, "engine": TRAINING, "model": "tiny:add"}
REPORTED: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.DRIVER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LGP011",),
}  # fmt: skip
AHEAD_ALONE = (
    *LIVE, "data.batch_size=8", "grpo.ratio_over=engine", "grpo.max_staleness=1", "engine.kind=hf", "grpo.group_size=8",
    "optimizer.learning_rate=4e-4",
)  # fmt: skip
"""Knobs of runs in which nothing but what is reported says how likely tokens of older weights were."""
ENGINE = "verifier.engine.engine_hf:HfEngine"
VERSIONS = "verifier.trainer.generation:versions_of(sample, version)"
RESET = "verifier.engine.client:EngineClient.reset_prefix_cache(self, running)"


@fault("areal-project/AReaL#1569", VERSIONS, caught_by=("LGP003", "LGP009"), **CONTROLLER)
def last_old_token_claims_new_weights(call: Call) -> Any:
    """The version is read after the answer to a step has come, so the last token before an update gets the next one."""
    found = call.original()
    if len(set(found)) == 1:
        return found
    return call.wrong(tuple(max(pair) for pair in pairwise((*found, found[-1]))))


@fault(
    "NVIDIA-NeMo/RL#4018", RESET, caught_by=("ENG010", "LGP009"),
    training=(*LIVE, "data.batch_size=4", f"data.source={PROMPTS}"), **SENDER,
)  # fmt: skip
def prefix_cache_kept_at_a_sync(call: Call) -> Any:
    """Nothing resets the prefix cache after a step, so prompts that come again are read with the old weights' keys."""
    return call.wrong(True)


@fault(
    "vllm-project/vllm#57414", f"{ENGINE}.generate(self, prompts, sampling)", **REPORTED,
    training=(*AHEAD_ALONE, "grpo.mode=async"),
)  # fmt: skip
def log_probabilities_of_the_batch_before(call: Call) -> Any:
    """Log-probabilities are stashed by slot and handed out with the next batch's tokens, where it has as many."""
    found, stashed = call.original(), call.state.get("stashed", [])
    call.state["stashed"] = [one.logprobs for own in found for one in own]
    if not stashed:
        return found
    nats = iter(stashed)

    def late(one: Any) -> Any:
        own, older = one.logprobs, next(nats, ())
        return dataclasses.replace(one, logprobs=(*older[: len(own)], *own[len(older) :]))

    return call.wrong([[late(one) for one in own] for own in found])


SCHEDULED: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("DAT015",),
}  # fmt: skip


@fault(
    "rllm-org/rllm#622", "verifier.trainer.generation:EngineRollouts.sample_now(self, step)", **SCHEDULED,
    training=(*QUEUED, "engine.kind=hf", "dtype=bf16"),
)  # fmt: skip
def batch_before_a_sync_counts_as_on_policy(call: Call) -> Any:
    """A batch that is asked for before a sync gets the version after it, in bf16: one step moves less than noise."""
    early = call.state.pop("early", None)
    return call.original() if early is None else call.wrong(early)


@batch_before_a_sync_counts_as_on_policy.also("verifier.trainer.loop:StepLoop.sync(self, version, note, first)")
def _asked_before(call: Call) -> Any:
    call.state["early"] = call.self.rollouts.sample(call.version + 1, call.version)
    return call.original()


@fault(
    "nvidia-cosmos/cosmos-rl#592", "verifier.trainer.ahead:AheadRollouts._take(self, step)", **SCHEDULED,
    training=(*ASYNC, "grpo.max_staleness=2"),
)  # fmt: skip
def queued_requests_keep_the_version_of_their_admission(call: Call) -> Any:
    """Requests wait through an update, are sampled by the new weights, and keep the version that they came under."""
    waited, found = call.self._next is not None, call.original()
    return call.wrong(call.self._engine.sample(call.step, call.step - 2)) if waited else found
