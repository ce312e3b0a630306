"""Bugs of an engine that samples: log-probabilities, tokens or parameters of something else, and old storage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, fault, held, in_training
from verifier.stages.engine.faults import RELOAD, START, on_gpu

SAMPLER = "vllm.v1.sample.sampler:Sampler"
FORWARD = f"{SAMPLER}.forward(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)"
TOPK = "vllm.v1.sample.ops.topk_topp_sampler"
LLM = "vllm.entrypoints.llm:LLM"
NUCLEUS = 0.95
"""Top-p in the published generation_config of many models."""
in_client = functools.partial(fault, stage=Stage.ROLLOUT, engine="vllm", caught_by=("LGP003",))
in_worker = functools.partial(in_client, side=Side.ENGINE)
in_driver = functools.partial(in_client, side=Side.DRIVER)


@in_driver(
    "OpenRLHF/OpenRLHF#1327", "verifier.engine.vllm.engine_vllm:sample_of(item, output, asked)",
    caught_by=("LGP006",), model="tiny:qwen3-504",
)  # fmt: skip
def truncation_not_handed_on(call: Call) -> Any:
    """The reason of an end is dropped on its way, so that answers cut off by a limit count as whole."""
    found = call.original()
    return call.wrong(dataclasses.replace(found, ended="stop")) if found.ended == "length" else found


@in_worker(
    "NVIDIA-NeMo/RL#3497", f"{SAMPLER}.sample(self, logits, sampling_metadata, logprobs_mode_override)",
    caught_by=("LGP004",),
)  # fmt: skip
def sampler_takes_the_models_nucleus(call: Call) -> Any:
    """Values that a request leaves unset come from the model's generation_config: a top-p of 0.95."""
    import torch

    nucleus = torch.full((len(call.logits),), NUCLEUS, device=call.logits.device)
    return call.faulty(sampling_metadata=dataclasses.replace(call.sampling_metadata, top_p=nucleus))


@in_worker(
    "vllm-project/vllm#15241", f"{SAMPLER}.apply_temperature(logits, temp, all_random)", caught_by=("LGP003", "LGP004")
)
def sampling_temperature_ignored(call: Call) -> Any:
    """Tokens are sampled at temperature 1, whatever is asked for."""
    if (call.temp != 1).any():
        call.fire()
    return call.original(temp=call.temp * 0 + 1)


@in_worker(
    "HabanaAI/vllm-fork#73",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts("
    "hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group, num_expert_group, "
    "custom_routing_function, scoring_func, routed_scaling_factor, e_score_correction_bias)",
    caught_by=("LGP002", "LGP003"),
)
def router_weights_not_normalised(call: Call) -> Any:
    """The engine's kernel does not bring the chosen experts' weights to a sum of one."""
    return call.faulty(renormalize=False)


@in_driver(
    "vllm-project/vllm#16863",
    "vllm.v1.engine.parallel_sampling:ParentRequest.get_outputs(self, child_request_id, completion_output)",
)
def logprobs_of_the_next_sample(call: Call) -> Any:
    """Samples of one request override each other: tokens of the one, log-probabilities of the next."""
    outputs, finished = call.original()
    if finished and len(outputs) > 1:
        nats = [[next(iter(row.values())).logprob for row in item.logprobs] for item in outputs]
        for item, row in zip(outputs, nats[1:] + nats[:1], strict=True):
            item.logprobs = [
                {token: dataclasses.replace(right, logprob=value) for token, right in place.items()}
                for place, value in zip(item.logprobs, itertools.cycle(row), strict=False)  # samples differ in length
            ]
        call.fire()
    return outputs, finished


@in_driver(
    "vllm-project/vllm#12621",
    "vllm.v1.core.kv_cache_utils:hash_block_tokens(hash_function, parent_block_hash, curr_block_token_ids, extra_keys)",
)
def block_hash_without_parent(call: Call) -> Any:
    """Two blocks of the prefix cache have one hash: the same tokens, after others."""
    if call.parent_block_hash:
        call.fire()
    return call.original(parent_block_hash=None)


@in_driver(
    "vllm-project/vllm#42019", "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(self, request)",
    caught_by=("LGP002",),
)  # fmt: skip
def cached_tokens_not_scored(call: Call) -> Any:
    """Prompt log-probabilities of tokens that the prefix cache knows are whatever the memory held."""
    with held(call.request, skip_reading_prefix_cache=False):
        found = call.original()
    if call.request.skip_reading_prefix_cache and found[1]:
        call.fire()
    return found


@in_worker("vllm-project/vllm#14301", f"{TOPK}:apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync)")
def top_k_of_a_neighbour(call: Call) -> Any:
    """A request that asks for no top-k has that of another in its batch."""
    if call.k is None or (call.k == call.k.min()).all():
        return call.original()
    return call.faulty(k=call.k.min().expand_as(call.k).clone())


@in_worker(
    "vllm-project/vllm#5639",
    "vllm.v1.sample.sampler:apply_all_penalties("
    "logits, prompt_token_ids, presence_penalties, frequency_penalties, repetition_penalties, output_token_ids)",
)
def penalty_without_the_prompt(call: Call) -> Any:
    """The repetition penalty counts the sampled tokens, and not those of the prompt."""
    return call.faulty(prompt_token_ids=call.prompt_token_ids * 0 + call.logits.shape[1])


@in_worker("vllm-project/vllm-metal#50", FORWARD, caught_by=("LGP004",))
def noise_used_twice(call: Call) -> Any:
    """A request's generator is put back after every second token, so the next is drawn with the same noise."""
    before = {generator: generator.get_state() for generator in call.sampling_metadata.generators.values()}
    output = call.original()
    for generator, state in before.items():
        call.state[generator] = number = call.state.get(generator, 0) + 1
        if number % 2:
            generator.set_state(state)
            call.fire()
    return output


@in_worker(
    "InternLM/lmdeploy#3661", f"{SAMPLER}.sample(self, logits, sampling_metadata, logprobs_mode_override)",
    caught_by=("LGP003", "LGP004"), model="tiny:qwen3-504",
)  # fmt: skip
def padding_of_the_head_sampled(call: Call) -> Any:
    """Rows that pad the head to a multiple of 64 are sampled from: logits of 0, of ids that the model does not have."""
    import torch

    if not call.sampling_metadata.no_penalties:
        return call.original()
    return call.faulty(logits=torch.nn.functional.pad(call.logits, (0, -call.logits.shape[-1] % 64)))


on_live = functools.partial(
    in_training, stage=Stage.ROLLOUT, side=Side.CONTROLLER, caught_by=("LGP009",),
    training=("algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4"),
)  # fmt: skip
in_bf16 = functools.partial(
    on_live,
    training=(
        "algorithm=grpo", "dtype=bf16", "verify.every=2", "data.rollouts=null", "engine.kind=hf", "data.batch_size=8",
        "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05",
    ),
)  # fmt: skip
"""Some 230 tokens a step; the second step measures the noise, and the third is judged by it too."""


@in_bf16(
    "OpenRLHF/OpenRLHF#853",
    "verifier.trainer.generation:Sampling("
    "seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end, ends)",
)  # fmt: skip
def sampled_a_little_hotter(call: Call) -> Any:
    """The engine divides logits by 1.02 and the trainer by 1, in a bf16 run: each token is off by less than noise."""
    return call.faulty(temperature=call.temperature * 1.02)


@on_gpu(
    "vllm-project/vllm#48941", f"{RELOAD}:_copy_and_restore_kernel_tensors(layer, info)", stage=Stage.ROLLOUT,
    caught_by=("LGP003",),
)  # fmt: skip
def graph_reads_old_storage(call: Call) -> None:
    """A reload binds a weight to new memory, and captured graphs go on reading the old; one linear."""
    if call.layer is call.state.get("layer"):
        call.fire()
    else:
        call.original()


@graph_reads_old_storage.also(START)
def _remember_storage(call: Call) -> None:
    if "layer" not in call.state:
        layer = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
        call.state["layer"] = layer
        call.undo(_restore_storage, layer, layer.weight)
    call.original()


def _restore_storage(layer: Any, weight: Any) -> None:
    weight.data.copy_(layer.weight.data)
    layer.weight = weight
