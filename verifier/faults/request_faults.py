"""Bugs of the rollout among requests: another request's row, block, place in the answer or sampling parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FireCounter, Side, fault

LLM = "vllm.entrypoints.llm:LLM"
TOPK = "vllm.v1.sample.ops.topk_topp_sampler"
WORKER: dict[str, Any] = {"stage": Stage.ROLLOUT, "engine": "vllm", "side": Side.ENGINE}
DRIVER: dict[str, Any] = {"stage": Stage.ROLLOUT, "engine": "vllm", "side": Side.DRIVER}


@fault(
    "vllm.v1.worker.gpu_input_batch:InputBatch.condense(self)",
    id="temperature-left-in-the-row", reproduces="jundot/omlx#1845", caught_by=("LGP003",), **WORKER,
)  # fmt: skip
def temperature_left_in_the_row(original: Any, fire: FireCounter, self: Any) -> None:
    """A request moves into the row of one that has ended, and is sampled at the other's temperature."""
    before, seen = self.temperature_cpu.copy(), len(self.batch_update_builder.moved)
    original(self)
    for _, place, _ in self.batch_update_builder.moved[seen:]:
        if self.temperature_cpu[place] != before[place]:
            fire()
        self.temperature_cpu[place] = before[place]


@fault(
    f"{LLM}.generate("
    "self, prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, mm_processor_kwargs)",
    id="last-requests-sampling-for-all", reproduces="EvolvingLMMs-Lab/lmms-eval#1326", caught_by=("LGP003",), **DRIVER,
)  # fmt: skip
def last_requests_sampling_for_all(
    original: Any, fire: FireCounter, self: Any, prompts: Any, sampling_params: Any = None, **options: Any
) -> Any:
    """Every request of a batch is sampled as the last one asks for."""
    if isinstance(sampling_params, list):
        seeds = [item.seed for item in sampling_params]
        sampling_params = [sampling_params[-1].clone() for _ in seeds]
        for item, seed in zip(sampling_params, seeds, strict=True):
            item.seed = seed
        fire()
    return original(self, prompts, sampling_params, **options)


@fault(
    f"{LLM}._run_engine(self, output_type, use_tqdm)",
    id="answers-as-they-end", reproduces="vllm-project/vllm#394", caught_by=("LGP003",), **DRIVER,
)  # fmt: skip
def answers_as_they_end(original: Any, fire: FireCounter, self: Any, *args: Any, **options: Any) -> Any:
    """Answers come back in the order in which they end, not in that of their prompts."""
    step = self.llm_engine.step
    ended: list[str] = []

    def watched() -> Any:
        outputs = step()
        ended.extend(item.request_id for item in outputs if item.finished)
        return outputs

    self.llm_engine.step = watched
    try:
        found = original(self, *args, **options)
    finally:
        del self.llm_engine.step
    if ended != [item.request_id for item in found]:
        fire()
    return sorted(found, key=lambda item: ended.index(item.request_id))


@fault(
    "vllm.v1.engine.parallel_sampling:ParentRequest.get_outputs(self, child_request_id, completion_output)",
    id="logprobs-of-the-next-sample", reproduces="vllm-project/vllm#16863", caught_by=("LGP003",), **DRIVER,
)  # fmt: skip
def logprobs_of_the_next_sample(original: Any, fire: FireCounter, *args: Any) -> Any:
    """Samples of one request override each other: tokens of the one, log-probabilities of the next."""
    outputs, finished = original(*args)
    if finished and len(outputs) > 1:
        nats = [[next(iter(row.values())).logprob for row in item.logprobs] for item in outputs]
        for item, row in zip(outputs, nats[1:] + nats[:1], strict=True):
            item.logprobs = [
                {token: dataclasses.replace(held, logprob=value) for token, held in place.items()}
                for place, value in zip(item.logprobs, row, strict=True)
            ]
        fire()
    return outputs, finished


@fault(
    "vllm.v1.core.kv_cache_utils:hash_block_tokens("
    "hash_function, parent_block_hash, curr_block_token_ids, extra_keys)",
    id="block-hash-without-parent", reproduces="vllm-project/vllm#12621", caught_by=("LGP003",), **DRIVER,
)  # fmt: skip
def block_hash_without_parent(
    original: Any, fire: FireCounter, function: Any, parent: Any, tokens: Any, extra: Any = None
) -> Any:
    """Two blocks of the prefix cache have one hash: the same tokens, after others."""
    if parent:
        fire()
    return original(function, None, tokens, extra)


@fault(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(self, request)",
    id="cached-tokens-not-scored", reproduces="vllm-project/vllm#42019", caught_by=("LGP002",), **DRIVER,
)  # fmt: skip
def cached_tokens_not_scored(original: Any, fire: FireCounter, self: Any, request: Any) -> Any:
    """Prompt log-probabilities of tokens that the prefix cache knows are whatever the memory held."""
    held, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
    try:
        found = original(self, request)
    finally:
        request.skip_reading_prefix_cache = held
    if held and found[1]:
        fire()
    return found


@fault(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict("
    "self, hidden_states, num_scheduled_tokens)",
    id="later-chunk-scored-from-another-row", reproduces="vllm-project/vllm#4139", caught_by=("LGP002",), **WORKER,
)  # fmt: skip
def later_chunk_scored_from_another_row(
    original: Any, fire: FireCounter, self: Any, hidden_states: Any, num_scheduled_tokens: Any
) -> Any:
    """Prompt log-probabilities are right in the first chunk of a prompt alone."""
    hidden = hidden_states.clone()
    for name in self.num_prompt_logprobs:
        length = num_scheduled_tokens.get(name, 0)
        if length and self.requests[name].num_computed_tokens:
            at = int(self.query_start_loc.np[self.input_batch.req_id_to_index[name]])
            hidden[at : at + length] = hidden_states[at : at + length].roll(1, 0)
            fire()
    return original(self, hidden, num_scheduled_tokens)


@fault(
    f"{TOPK}:apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync)",
    id="top-k-of-a-neighbour", reproduces="vllm-project/vllm#14301", caught_by=("LGP003",), **WORKER,
)  # fmt: skip
def top_k_of_a_neighbour(
    original: Any, fire: FireCounter, logits: Any, k: Any, p: Any, allow_cpu_sync: bool = False
) -> Any:
    """A request that asks for no top-k has that of another in its batch."""
    if k is not None and (k != k.min()).any():
        fire()
        k = k.min().expand_as(k).clone()
    return original(logits, k, p, allow_cpu_sync)


@fault(
    "vllm.v1.sample.sampler:apply_all_penalties("
    "logits, prompt_token_ids, presence_penalties, frequency_penalties, repetition_penalties, output_token_ids)",
    id="penalty-without-the-prompt", reproduces="vllm-project/vllm#5639", caught_by=("LGP003",), **WORKER,
)  # fmt: skip
def penalty_without_the_prompt(original: Any, fire: FireCounter, logits: Any, prompt_token_ids: Any, *rest: Any) -> Any:
    """The repetition penalty counts the sampled tokens, and not those of the prompt."""
    fire()
    return original(logits, prompt_token_ids * 0 + logits.shape[1], *rest)


@fault(
    f"{TOPK}:compiled_random_sample(logits)",
    id="one-noise-for-a-batch", reproduces="vllm-project/vllm#50440", caught_by=("LGP005",), **WORKER,
)  # fmt: skip
def one_noise_for_a_batch(original: Any, fire: FireCounter, logits: Any) -> Any:
    """Requests of a batch draw with one noise, and so samples of one prompt are all the same."""
    fire()
    waits = logits.new_empty(1, logits.shape[1]).exponential_()
    return (logits.softmax(dim=-1) / waits).argmax(dim=-1)
