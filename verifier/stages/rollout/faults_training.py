"""Bugs of a training run's answers: requests, seeds, versions, evaluations, and what an engine reports of them."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, HF_SAMPLES, SAMPLES, Call, Side, fault, held, in_training
from verifier.stages.data.faults import GENERATE, GENERATION, on_answers, on_ends, on_evaluation, on_routes

SAMPLING = (
    "verifier.trainer.generation:Sampling("
    "seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end, ends)"
)
TOP_K = 5
"""Likeliest tokens of the 32 that `tiny:add` has; 20 of 152,000 in the generation_config of Qwen3."""
in_rollout = functools.partial(
    in_training, stage=Stage.ROLLOUT, side=Side.CONTROLLER, caught_by=("LGP011",),
    training=(*HF_SAMPLES, "grpo.max_answer_tokens=16", "grpo.group_size=8", "grpo.entropy_weight=0.05"),
)  # fmt: skip
on_many = functools.partial(
    in_rollout, caught_by=("LGP014",),
    training=(
        *SAMPLES, "engine.kind=hf", "data.batch_size=16", "grpo.group_size=8", "grpo.max_answer_tokens=24",
        "grpo.entropy_weight=0.05", "verify.every=1", "steps=2", "batch.micro_batch_size=32",
    ),
)  # fmt: skip
"""A run whose sampled steps have 128 answers, of which few are cut off."""


@in_rollout("verl-project/verl#6857", GENERATE)
def one_seed_for_a_group(call: Call) -> Any:
    """A request's seed is that of its prompt, and all answers of a group are one."""
    asked, count = call.sampling, call.sampling.n
    if count == 1:
        return call.original()
    prompts = [prompt for prompt in call.prompts for _ in range(count)]
    each = [dataclasses.replace(asked.of(at), n=1) for at in range(len(call.prompts)) for _ in range(count)]
    found = call.faulty(prompts=prompts, sampling=dataclasses.replace(asked, n=1, each=each))
    return [[own[0] for own in found[at : at + count]] for at in range(0, len(found), count)]


@on_many("verl-project/verl#2929", GENERATE)
def shortest_of_twice_as_many(call: Call) -> Any:
    """More answers are asked than needed and the first to finish are kept: a group has the shortest of its answers."""
    count = call.sampling.n
    if count == 1:
        return call.original()
    found = call.faulty(sampling=dataclasses.replace(call.sampling, n=2 * count))
    return [sorted(own, key=lambda item: len(item.tokens))[:count] for own in found]


@in_rollout("vllm-project/vime#6", GENERATE)
def sampled_by_the_models_top_k(call: Call) -> Any:
    """The engine takes the top-k of the model's generation_config, and reports what the full distribution gives."""
    return under(call, top_k=TOP_K)


def under(call: Call, **knobs: float) -> Any:
    """Answers under further knobs, with the log-probabilities of the full distribution."""
    shape = dataclasses.replace(call.sampling.shape, **knobs)
    found = call.faulty(sampling=dataclasses.replace(call.sampling, shape=shape))
    rows = [(*prompt, *one.tokens) for prompt, own in zip(call.prompts, found, strict=True) for one in own]
    nats = iter(call.self.logprobs(rows))
    return [[dataclasses.replace(one, logprobs=tuple(next(nats)[-len(one.tokens) :])) for one in own] for own in found]


@fault(
    "tenstorrent/tt-metal#46350", "vllm.v1.worker.gpu_input_batch:InputBatch.condense(self)",
    stage=Stage.ROLLOUT, side=Side.ENGINE, engine="vllm", caught_by=("LGP018",),
)  # fmt: skip
def generator_lost_in_another_row(call: Call) -> None:
    """A request moves into the row of one that has ended, and its generator stays behind."""
    import torch

    moved = call.self.batch_update_builder.moved
    seen = len(moved)
    call.original()
    for _, place, _ in moved[seen:]:
        if call.self.generators.get(place) is not None:
            call.fire()
            call.self.generators[place] = torch.Generator().manual_seed(place)


on_adapter = functools.partial(
    in_training, stage=Stage.ROLLOUT, side=Side.DRIVER, caught_by=("LGP011",),
    training=(
        "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "optimizer.warmup_steps=0", "lora.rank=8",
        "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "dtype=bf16",
    ),
)  # fmt: skip
VLLM_ENGINE = "verifier.engine.vllm.engine_vllm:VllmEngine"


@on_adapter("radixark/miles#2075", f"{VLLM_ENGINE}._sampled(self, prompts, asked)")
def requests_without_the_adapter(call: Call) -> Any:
    """Requests do not name the adapter that the engine was given, and answers are those of the base."""
    with held(call.self, _adapter=None):
        return call.faulty()


@on_ends("NovaSky-AI/SkyRL#1319", f"{GENERATION}._asked(self, step, number, indices)", stage=Stage.ROLLOUT)
def stop_token_not_asked_for(call: Call) -> Any:
    """The stop token does not reach the engine, and answers run on past their end token up to the limit."""
    prompts, sampling = call.original()
    return call.wrong((prompts, dataclasses.replace(sampling, stop=())))


KNOBS = (
    *HF_SAMPLES, "grpo.max_answer_tokens=16", "grpo.group_size=4", "grpo.entropy_weight=0.05", "steps=2",
)  # fmt: skip
SCORED = "verifier.trainer.grpo_plan:GrpoPlan._scored(self, step, given, parts, score)"


@on_answers(
    "unslothai/unsloth-zoo#891 (found in review)", SCORED,
    training=(*KNOBS, "verify.every=1", "grpo.weight_level=token"),
)  # fmt: skip
def trainer_scores_for_the_engines(call: Call) -> Any:
    """The trainer's log-probabilities stand in for the engine's, and every importance weight is 1."""
    import numpy as np

    found = call.faulty()
    for at, (item, old) in enumerate(zip(call.given, found.old, strict=True)):
        call.given[at] = dataclasses.replace(item, logprobs=np.where(item.sampled, old, np.nan).astype(np.float32))
    return found


@on_routes(
    "vllm-project/vllm#39568 (kin: there routes were misaligned after a preemption)",
    "verifier.engine.vllm.engine_vllm:VllmEngine._routed(self, output, asked)", stage=Stage.ROLLOUT, side=Side.DRIVER,
    caught_by=("LGP003", "LGP009"), training=(*on_routes.keywords["training"], "dtype=bf16", "verify.every=1"),
)  # fmt: skip
def route_of_the_token_before_reported(call: Call) -> Any:
    """The experts that vLLM reports of an answer's first token are those of the token before it."""
    import numpy as np

    from verifier.core.seal import seal_of_array

    sample, at = call.original(), len(call.output.prompt_token_ids)
    if len(sample.routes) <= at:
        return sample
    routes = (*sample.routes[:at], sample.routes[at - 1], *sample.routes[at + 1 :])
    return call.wrong(dataclasses.replace(sample, routes=routes, routes_seal=seal_of_array(np.array(routes, np.int32))))


SHORT = ("algorithm=grpo", "data.rollouts=null", "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05")
QUEUED = (*SHORT, "data.batch_size=2", "grpo.ratio_over=engine")
AHEAD = (*QUEUED, "grpo.max_staleness=1")
ASYNC = (*QUEUED, "engine.kind=hf", "grpo.mode=async")
INFLIGHT = (*AHEAD, "grpo.mode=inflight", "grpo.inflight_steps=3", "verify.every=1")
PROMPTS = FOLDER / "prompts" / "long_sums.jsonl"
"""Prompts of more tokens than a block of vLLM's cache has, and so few of them that each step asks all."""
in_controller = functools.partial(
    in_training, stage=Stage.ROLLOUT, side=Side.CONTROLLER, training=(*INFLIGHT, "engine.kind=hf"),
)  # fmt: skip
in_sender = functools.partial(in_training, stage=Stage.ROLLOUT, side=Side.TRAINER)
on_report = functools.partial(in_sender, side=Side.DRIVER, caught_by=("LGP011",))
on_schedule = functools.partial(in_sender, side=Side.CONTROLLER, caught_by=("DAT015",))
AHEAD_ALONE = (
    *SHORT, "data.batch_size=8", "grpo.ratio_over=engine", "grpo.max_staleness=1", "engine.kind=hf",
    "grpo.group_size=8", "optimizer.learning_rate=4e-4",
)  # fmt: skip
"""Knobs of runs in which nothing but what is reported says how likely tokens of older weights were."""
ENGINE = "verifier.engine.engine_hf:HfEngine"
VERSIONS = "verifier.trainer.generation:versions_of(sample, held)"
RESET = "verifier.engine.client:EngineClient.reset_prefix_cache(self, running)"


@in_controller("areal-project/AReaL#1569", VERSIONS, caught_by=("LGP003", "LGP009"))
def last_old_token_claims_new_weights(call: Call) -> Any:
    """The version is read after the answer to a step has come, so the last token before an update gets the next one."""
    found = call.original()
    if len(set(found)) == 1:
        return found
    return call.wrong(tuple(max(pair) for pair in pairwise((*found, found[-1]))))


@in_sender(
    "NVIDIA-NeMo/RL#4018", RESET, caught_by=("ENG010", "LGP009"),
    training=(*SHORT, "data.batch_size=4", f"data.source={PROMPTS}"),
)  # fmt: skip
def prefix_cache_kept_at_a_sync(call: Call) -> Any:
    """Nothing resets the prefix cache after a step, so prompts that come again are read with the old weights' keys."""
    return call.wrong(True)


@on_report(
    "vllm-project/vllm#57414", f"{ENGINE}.generate(self, prompts, sampling)",
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


@on_schedule(
    "nvidia-cosmos/cosmos-rl#592", "verifier.trainer.ahead:AheadRollouts._take(self, step)",
    training=(*ASYNC, "grpo.max_staleness=2"),
)  # fmt: skip
def queued_requests_keep_the_version_of_their_admission(call: Call) -> Any:
    """Requests wait through an update, are sampled by the new weights, and keep the version that they came under."""
    waited, found = call.step > 1, call.original()
    return call.wrong(call.self._engine.sample(call.step, max(call.step - 3, 0))) if waited else found


@on_evaluation("linhaowei1/NLPDL-2025Fall#31", "verifier.trainer.loop:StepLoop._evaluate(self, step)")
def evaluated_before_the_sync(call: Call) -> Any:
    """An evaluation is answered before the engine gets the weights of its step, so it shows the step before."""
    return call.wrong(call.state["found"])


@evaluated_before_the_sync.also("verifier.trainer.loop:StepLoop.sync(self, version, note, first)")
def _evaluate_first(call: Call) -> Any:
    if call.version:
        call.state["found"] = call.self.rollouts.evaluate(call.version)
    return call.original()


@on_evaluation("huggingface/trl#4970", SAMPLING)
def evaluated_answers_run_on(call: Call) -> Any:
    """No stop token reaches the engine with an evaluation, whose answers run on past their end."""
    return call.faulty(stop=()) if call.temperature == 0 else call.original()
