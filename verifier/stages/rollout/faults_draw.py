"""Bugs of the draws of answers in training: seeds that come again, tokens of another distribution than is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

GENERATE = "verifier.engine.client:EngineClient.generate(self, prompts, sampling)"
TOP_K = 5
"""Likeliest tokens of the 32 that `tiny:add` has; 20 of 152,000 in the generation_config of Qwen3."""
ROW: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LGP011",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
        "grpo.group_size=8", "grpo.entropy_weight=0.05",
    ),
}  # fmt: skip
MANY: dict[str, Any] = {
    "caught_by": ("LGP014",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=16", "grpo.group_size=8",
        "grpo.max_answer_tokens=24", "grpo.entropy_weight=0.05", "verify.every=1", "steps=2",
        "batch.micro_batch_size=32",
    ),
}  # fmt: skip
"""A run whose sampled steps have 128 answers, of which few are cut off."""

SEEDED: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.ENGINE, "engine": "vllm", "caught_by": ("LGP018",),
}  # fmt: skip


@fault("verl-project/verl#6857", GENERATE, **ROW)
def one_seed_for_a_group(call: Call) -> Any:
    """A request's seed is that of its prompt, and all answers of a group are one."""
    asked, count = call.sampling, call.sampling.n
    if count == 1:
        return call.original()
    prompts = [prompt for prompt in call.prompts for _ in range(count)]
    each = [dataclasses.replace(asked.of(at), n=1) for at in range(len(call.prompts)) for _ in range(count)]
    found = call.faulty(prompts=prompts, sampling=dataclasses.replace(asked, n=1, each=each))
    return [[own[0] for own in found[at : at + count]] for at in range(0, len(found), count)]


@fault("verl-project/verl#2929", GENERATE, **(ROW | MANY))
def shortest_of_twice_as_many(call: Call) -> Any:
    """More answers are asked than needed and the first to finish are kept: a group has the shortest of its answers."""
    count = call.sampling.n
    if count == 1:
        return call.original()
    found = call.faulty(sampling=dataclasses.replace(call.sampling, n=2 * count))
    return [sorted(own, key=lambda item: len(item.tokens))[:count] for own in found]


@fault("vllm-project/vime#6", GENERATE, **ROW)
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
    "tenstorrent/tt-metal#46350",
    "vllm.v1.worker.gpu_input_batch:InputBatch.condense(self)", **SEEDED,
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
