"""vLLM as the engine: its driver in this process, its workers in theirs."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest

from verifier.engine.engine import (
    EngineConfig,
    Generation,
    HeldSlice,
    HeldTensor,
    Poisoned,
    Sample,
    Sampling,
    check_sequences,
)
from verifier.engine.errors import raise_record
from verifier.engine.vllm.worker_vllm import BACKEND
from verifier.errors import ContractError, InternalError, VerifierError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import FAMILIES
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt

_KV_CACHE_BYTES = 128 * 2**20
_CPU_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU, so that a prompt is several: vLLM takes 128 there, and 16 on a GPU."""
_CPU_TOKENS = 440
"""Tokens of one forward pass on a CPU. A round trip scores its conversations in more than one, so that prompts are
parted; it samples from fewer at a time, as vLLM 0.21 cannot part a prompt there that a seeded request samples from."""
_GPU_SHARE = 0.15
"""Of a GPU's memory that must be free at the start: a trainer may live on the same GPU."""
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
"""One graph of the whole model per number of sequences that are being sampled; vLLM's own choice would compile as well.
Prompts are scored without: in sleep mode the capture of their attention ended in an illegal memory access."""
_ADAPTERS = {"max_loras": 1, "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
"""One adapter at a time, on linears alone: with one on the head, vLLM 0.21 finds no adapter for the rows of a prompt
whose log-probabilities are asked for; on a CPU it fails there, on a GPU it reads on behind its table."""
_RPC_DEADLINE_S = 600


@functools.cache
def preload() -> None:
    """Import vLLM's workers and the classes of all families' models.

    vLLM looks at a class that it finds imported here, and starts no interpreter that imports vLLM to look at it.
    """
    importlib.import_module(f"vllm.v1.worker.{'gpu' if torch.cuda.is_available() else 'cpu'}_worker")
    importlib.import_module("vllm.v1.executor.multiproc_executor")
    for architecture in sorted({family.architecture for family in FAMILIES.values()}):
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


class VllmEngine:
    """See `Engine`. Prefix caching on, logprobs of the raw distribution, nothing compiled."""

    def __init__(self, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(config.checkpoint)
        self.num_ranks = config.tp
        self._max_len = config.max_model_len
        self._vocab_size = int(checkpoint.config["vocab_size"])
        self._carried = checkpoint.names()
        self._adapter: LoRARequest | None = None
        self._llm = LLM(
            model=config.checkpoint,
            dtype=config.dtype,
            tensor_parallel_size=config.tp,
            seed=config.seed,
            max_model_len=config.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=None if torch.cuda.is_available() else max(_CPU_TOKENS, config.max_model_len),
            block_size=None if torch.cuda.is_available() else _CPU_BLOCK,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            gpu_memory_utilization=_GPU_SHARE if torch.cuda.is_available() else 0.9,
            enforce_eager=not config.cuda_graphs,
            compilation_config=_GRAPHS if config.cuda_graphs else None,
            enable_sleep_mode=config.sleep_level > 0,
            quantization=config.quantization,
            enable_lora=config.lora_rank > 0,
            **({"max_lora_rank": config.lora_rank, **_ADAPTERS} if config.lora_rank else {}),
            # Off for hybrids, as vLLM itself decides: their cached states are experimental in 0.21.
            enable_prefix_caching=checkpoint.config.get("mamba_num_heads") is None,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            weight_transfer_config={"backend": BACKEND},
            worker_extension_cls="verifier.engine.vllm.worker_vllm.VerifierWorker",
        )
        self._rpc("verifier_unlink_shared")

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """One prefill per sequence; vLLM does not read the prefix cache for prompt logprobs."""
        check_sequences(sequences, vocab_size=self._vocab_size, max_len=self._max_len - 1)
        asked = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, detokenize=False)
        outputs = self._llm.generate(_prompts(sequences), asked, use_tqdm=False, lora_request=self._adapter)
        return [
            [_nats(row, token) for token, row in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """Every sample has its own seeded generator, if asked for, so batching does not change the samples.

        vLLM seeds sample k of a request with the request's seed plus k. On a CPU it heeds no seed if a request of the
        batch has none, or is greedy (vllm #51226), so the generator that then serves them all is seeded too.
        """
        requests = [sampling.of(index) for index in range(len(prompts))]
        longest = max((item.max_tokens for item in requests), default=0)
        check_sequences(prompts, vocab_size=self._vocab_size, max_len=self._max_len - longest, least=1)
        asked = [_params(item) for item in requests]
        self._rpc("verifier_seed", seed=sampling.seed)
        outputs = self._llm.generate(_prompts(prompts), asked, use_tqdm=False, lora_request=self._adapter)
        return [
            Generation(
                prompt=tuple(prompt),
                samples=tuple(
                    Sample(
                        tokens=tuple(item.token_ids),
                        logprobs=tuple(
                            _nats(row, token) for token, row in zip(item.token_ids, item.logprobs, strict=True)
                        ),
                        cached_tokens=output.num_cached_tokens or 0,
                    )
                    for item in output.outputs
                ),
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def state(self) -> list[list[HeldTensor]]:
        """See `held_vllm.held_tensors`."""
        return [
            [HeldTensor(**{**item, "shape": tuple(item["shape"])}) for item in rank]
            for rank in self._rpc("verifier_state")
        ]

    def checkpoint_view(self) -> list[list[HeldSlice]]:
        """See `view_vllm.checkpoint_slices`."""
        return [
            [
                HeldSlice(**{**item, "shape": tuple(item["shape"]), "box": tuple(map(tuple, item["box"]))})
                for item in rank
            ]
            for rank in self._rpc("verifier_view", carried=self._carried)
        ]

    def poison(self) -> list[list[Poisoned]]:
        """See `held_vllm.poison_model`."""
        return [[Poisoned(**item) for item in rank] for rank in self._rpc("verifier_poison", carried=self._carried)]

    def connect(self, address: Address) -> None:
        """By the worker's `init_weight_transfer_engine`."""
        self._rpc("init_weight_transfer_engine", init_info=address.to_json())

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """By the worker's `start_weight_update`, once all members hold the same plan."""
        agreements = [Agreement(said=tuple(said)) for said in self._rpc("verifier_begin", plan=plan.to_json())]
        if all(agreement.reached for agreement in agreements):
            self._rpc("start_weight_update", is_checkpoint_format=True)
        return agreements

    def receive(self, chunk: int) -> list[Receipt]:
        """By the worker's `update_weights`."""
        self._rpc("update_weights", update_info={"chunk": chunk})
        return [Receipt.from_json(row) for row in self._rpc("verifier_receipt")]

    def finish_update(self) -> None:
        """By the worker's `finish_weight_update`.

        Raises:
            ContractError: a layer's weights do not fit it; the next update starts from what was there before.
        """
        self._rpc("finish_weight_update", otherwise=ContractError)

    def reset_prefix_cache(self) -> bool:
        """As vLLM itself does it."""
        return bool(self._llm.reset_prefix_cache())

    def load_adapter(self, path: str) -> None:
        """Under a name and a number of its own: vLLM takes an adapter that it knows by number for loaded.

        Raises:
            ContractError: vLLM did not take it.
        """
        number = 1
        if self._adapter is not None:
            number += self._adapter.lora_int_id
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        self._rpc("verifier_poison_adapter")
        self._adapter = LoRARequest(f"adapter {number}", number, path)
        if not self._llm.llm_engine.add_lora(self._adapter):
            raise ContractError(f"vLLM did not load the adapter in {path}")

    def sleep(self, level: int) -> None:
        """As vLLM itself does it."""
        self._llm.sleep(level=level)

    def wake_up(self, tag: str) -> None:
        """As vLLM itself does it."""
        self._llm.wake_up(tags=[tag])

    def call(self, module: str, function: str, arguments: Sequence[Any]) -> list[Any]:
        """On every worker."""
        return self._rpc("verifier_call", module=module, function=function, arguments=list(arguments))

    def shutdown(self) -> None:
        """End the workers."""
        self._llm.llm_engine.engine_core.shutdown()

    def _rpc(self, method: str, *, otherwise: type[VerifierError] = InternalError, **arguments: Any) -> list[Any]:
        """Ask every worker; the first rank that failed speaks for all."""
        asked = {"method": method, "arguments": arguments}
        try:
            replies = self._llm.collective_rpc("verifier_request", timeout=_RPC_DEADLINE_S, kwargs=asked)
        except TimeoutError as error:
            raise InternalError(f"vLLM's workers did not answer `{method}` within {_RPC_DEADLINE_S} s") from error
        for rank, reply in enumerate(replies):
            raise_record(reply, f"engine rank {rank} failed in `{method}`", otherwise)
        return [reply["value"] for reply in replies]


def _nats(row: Mapping[int, Any], token: int) -> float:
    """A token's log-probability; NaN where vLLM reports another token's in its place."""
    return row[token].logprob if token in row else math.nan


def _params(sampling: Sampling) -> SamplingParams:
    """One request's sampling in vLLM's words."""
    shape = sampling.shape
    return SamplingParams(
        n=sampling.n,
        seed=sampling.seed if sampling.seeded else None,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        min_tokens=shape.least,
        stop_token_ids=list(sampling.stop),
        top_k=shape.top_k,
        top_p=shape.top_p,
        min_p=shape.min_p,
        repetition_penalty=shape.repetition,
        presence_penalty=shape.presence,
        frequency_penalty=shape.frequency,
        logit_bias=dict(shape.bias) or None,
        allowed_token_ids=list(shape.allowed) or None,
        logprobs=0,
        detokenize=False,
    )


def _prompts(sequences: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(tokens)} for tokens in sequences]
