"""Bugs of the rollout among requests: whose row, whose block, whose place in the answer, whose sampling parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
LLM = "vllm.entrypoints.llm:LLM"
TOPK = "vllm.v1.sample.ops.topk_topp_sampler"


@contextlib.contextmanager
def _temperature_stays(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def condense(self: Any) -> None:
            before, seen = self.temperature_cpu.copy(), len(self.batch_update_builder.moved)
            original(self)
            for _, place, _ in self.batch_update_builder.moved[seen:]:
                if self.temperature_cpu[place] != before[place]:
                    fired()
                self.temperature_cpu[place] = before[place]

        return condense

    with replaced(f"{BATCH}.condense", "self", make):
        yield


@contextlib.contextmanager
def _last_for_all(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def generate(self: Any, prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
            if isinstance(sampling_params, list):
                seeds = [item.seed for item in sampling_params]
                sampling_params = [sampling_params[-1].clone() for _ in seeds]
                for item, seed in zip(sampling_params, seeds, strict=True):
                    item.seed = seed
                fired()
            return original(self, prompts, sampling_params, **options)

        return generate

    parameters = "self, prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, "
    with replaced(f"{LLM}.generate", f"{parameters}mm_processor_kwargs", make):
        yield


@contextlib.contextmanager
def _as_they_end(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def run(self: Any, *args: Any, **options: Any) -> Any:
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
                fired()
            return sorted(found, key=lambda item: ended.index(item.request_id))

        return run

    with replaced(f"{LLM}._run_engine", "self, output_type, use_tqdm", make):
        yield


@contextlib.contextmanager
def _of_the_next_sample(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def get_outputs(self: Any, child_request_id: str, completion_output: Any) -> Any:
            outputs, finished = original(self, child_request_id, completion_output)
            if finished and len(outputs) > 1:
                nats = [[next(iter(row.values())).logprob for row in item.logprobs] for item in outputs]
                for item, row in zip(outputs, nats[1:] + nats[:1], strict=True):
                    item.logprobs = [
                        {token: dataclasses.replace(held, logprob=value) for token, held in place.items()}
                        for place, value in zip(item.logprobs, row, strict=True)
                    ]
                fired()
            return outputs, finished

        return get_outputs

    target = "vllm.v1.engine.parallel_sampling:ParentRequest.get_outputs"
    with replaced(target, "self, child_request_id, completion_output", make):
        yield


@contextlib.contextmanager
def _without_parent(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def hash_block_tokens(function: Any, parent: Any, tokens: Any, extra: Any = None) -> Any:
            if parent:
                fired()
            return original(function, None, tokens, extra)

        return hash_block_tokens

    parameters = "hash_function, parent_block_hash, curr_block_token_ids, extra_keys"
    with replaced("vllm.v1.core.kv_cache_utils:hash_block_tokens", parameters, make):
        yield


@contextlib.contextmanager
def _scores_from_the_cache(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            held, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
            try:
                found = original(self, request)
            finally:
                request.skip_reading_prefix_cache = held
            if held and found[1]:
                fired()
            return found

        return get_computed_blocks

    with replaced("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", "self, request", make):
        yield


@contextlib.contextmanager
def _chunk_of_the_row_before(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def prompt_logprobs(self: Any, hidden_states: Any, num_scheduled_tokens: Any) -> Any:
            hidden = hidden_states.clone()
            for name in self.num_prompt_logprobs:
                length = num_scheduled_tokens.get(name, 0)
                if length and self.requests[name].num_computed_tokens:
                    at = int(self.query_start_loc.np[self.input_batch.req_id_to_index[name]])
                    hidden[at : at + length] = hidden_states[at : at + length].roll(1, 0)
                    fired()
            return original(self, hidden, num_scheduled_tokens)

        return prompt_logprobs

    target = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict"
    with replaced(target, "self, hidden_states, num_scheduled_tokens", make):
        yield


@contextlib.contextmanager
def _top_k_for_all(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def apply(logits: Any, k: Any, p: Any, allow_cpu_sync: bool = False) -> Any:
            if k is not None and (k != k.min()).any():
                fired()
                k = k.min().expand_as(k).clone()
            return original(logits, k, p, allow_cpu_sync)

        return apply

    with replaced(f"{TOPK}:apply_top_k_top_p_pytorch", "logits, k, p, allow_cpu_sync", make):
        yield


@contextlib.contextmanager
def _prompt_not_penalised(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def apply(logits: Any, prompt_token_ids: Any, *rest: Any) -> Any:
            fired()
            return original(logits, prompt_token_ids * 0 + logits.shape[1], *rest)

        return apply

    parameters = "logits, prompt_token_ids, presence_penalties, frequency_penalties, repetition_penalties, "
    with replaced("vllm.v1.sample.sampler:apply_all_penalties", f"{parameters}output_token_ids", make):
        yield


@contextlib.contextmanager
def _one_noise(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def sample(logits: Any) -> Any:
            fired()
            waits = logits.new_empty(1, logits.shape[1]).exponential_()
            return (logits.softmax(dim=-1) / waits).argmax(dim=-1)

        return sample

    with replaced(f"{TOPK}:compiled_random_sample", "logits", make):
        yield


def _fault(name: str, reproduces: str, summary: str, caught_by: str, inject: Any, side: Side = Side.ENGINE) -> Fault:
    return Fault(
        id=name, stage=Stage.ROLLOUT, reproduces=reproduces, summary=summary, caught_by=(caught_by,), inject=inject,
        side=side, engine="vllm",
    )  # fmt: skip


FAULTS = (
    _fault(
        "temperature-left-in-the-row",
        "jundot/omlx#1845",
        "a request moves into the row of one that has ended, and is sampled at the other's temperature",
        "LGP003",
        _temperature_stays,
    ),
    _fault(
        "last-requests-sampling-for-all",
        "EvolvingLMMs-Lab/lmms-eval#1326",
        "every request of a batch is sampled as the last one asks for",
        "LGP003",
        _last_for_all,
        Side.DRIVER,
    ),
    _fault(
        "answers-as-they-end",
        "vllm-project/vllm#394",
        "answers come back in the order in which they end, not in that of their prompts",
        "LGP003",
        _as_they_end,
        Side.DRIVER,
    ),
    _fault(
        "logprobs-of-the-next-sample",
        "vllm-project/vllm#16863",
        "samples of one request override each other: tokens of the one, log-probabilities of the next",
        "LGP003",
        _of_the_next_sample,
        Side.DRIVER,
    ),
    _fault(
        "block-hash-without-parent",
        "vllm-project/vllm#12621",
        "two blocks of the prefix cache have one hash: the same tokens, after others",
        "LGP003",
        _without_parent,
        Side.DRIVER,
    ),
    _fault(
        "cached-tokens-not-scored",
        "vllm-project/vllm#42019",
        "prompt log-probabilities of tokens that the prefix cache knows are what the memory held",
        "LGP002",
        _scores_from_the_cache,
        Side.DRIVER,
    ),
    _fault(
        "later-chunk-scored-from-another-row",
        "vllm-project/vllm#4139",
        "prompt log-probabilities are right in the first chunk of a prompt alone",
        "LGP002",
        _chunk_of_the_row_before,
    ),
    _fault(
        "top-k-of-a-neighbour",
        "vllm-project/vllm#14301",
        "a request that asks for no top-k has that of another in its batch",
        "LGP003",
        _top_k_for_all,
    ),
    _fault(
        "penalty-without-the-prompt",
        "vllm-project/vllm#5639",
        "the repetition penalty counts what was sampled, and forgets the prompt",
        "LGP003",
        _prompt_not_penalised,
    ),
    _fault(
        "one-noise-for-a-batch",
        "vllm-project/vllm#50440",
        "requests of a batch draw with one noise, and so samples of one prompt are all the same",
        "LGP005",
        _one_noise,
    ),
)
