"""vLLM as the engine: its driver runs in this process, its workers in their own."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed.device_communicators import shm_broadcast
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from verifier.config_json import keeps_states
from verifier.core.prefixes import Asked
from verifier.core.seal import seal_of_array
from verifier.engine.api import (
    NO_SEED,
    Engine,
    EngineConfig,
    EngineSlice,
    EngineTensor,
    Limits,
    Poisoned,
    Sample,
    Sampling,
    value_of,
    weights_of,
)
from verifier.engine.kv_cache import cache_bytes, holds_all, most_on_gpu
from verifier.engine.vllm.batch_vllm import RunningBatches, nats_of, sample_of, words_of
from verifier.engine.vllm.worker_vllm import BACKEND
from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.families import FAMILIES, moe_layers_of
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt

_CPU_BLOCK = 32
"""Number of tokens of a KV-cache block on a CPU. vLLM's own 128 would put a whole prompt into one block."""
_GPU_SHARE = 0.15
"""Fraction of a GPU's memory that must be free at the start; a trainer may run on the same GPU."""
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Graphs of whole passes that sample, without compilation. Prompts run without graphs: in sleep mode the capture of
their attention ended in an illegal memory access."""
_MOST_IN_GRAPH = 1024
"""Greatest number of sequences with a graph; passes of more run eagerly."""
_LINEARS = {
    "linear_qkv": "qkv_proj", "linear_proj": "o_proj", "linear_fc1": "gate_up_proj", "linear_fc2": "down_proj",
}  # fmt: skip
"""Linear in Megatron's words -> in vLLM's. With an adapter on the head, vLLM 0.21 has none for the rows of prompt
log-probabilities: it fails on a CPU, and reads beyond its table on a GPU."""
_RPC_DEADLINE_S = 600
_STDERR = 2
"""Descriptor that a forked process keeps when its log takes the place of what it inherited."""


@functools.cache
def preload() -> None:
    """Import vLLM's workers and the model classes of all families.

    vLLM inspects an imported class directly; otherwise it starts an interpreter that imports vLLM.
    """
    importlib.import_module(f"vllm.v1.worker.{'gpu' if torch.cuda.is_available() else 'cpu'}_worker")
    importlib.import_module("vllm.v1.executor.multiproc_executor")
    for architecture in sorted({family.architecture for family in FAMILIES.values()}):
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    # xgrammar's tvm_ffi handles SIGSEGV for 2.6 s before the process ends, and says nothing of Python.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable(_STDERR)


class VllmEngine(Engine):
    """See `Engine`. Prefix caching is on; nothing is compiled; log-probabilities are of the shaped distribution."""

    library = "vLLM"

    def __init__(self, config: EngineConfig) -> None:
        if config.routes and find_spec("vllm.distributed.aux_output_connector") is not None:
            raise UsageError("this vLLM reports routes in another way than 0.22, which is not read: replay none")
        checkpoint = open_checkpoint(config.checkpoint)
        cached = not keeps_states(checkpoint.config) and not config.routes
        self.config = config
        self._limits = Limits.of(checkpoint.config, config)
        self._carried = checkpoint.names()
        self._adapter: LoRARequest | None = None
        self._asked = Asked()
        if not torch.cuda.is_available():
            wait_asleep()
        self._llm = LLM(
            model=config.checkpoint,
            dtype=config.dtype,
            tensor_parallel_size=config.tp,
            pipeline_parallel_size=config.pp,
            enable_expert_parallel=config.ep > 1,
            distributed_executor_backend=None if torch.cuda.is_available() else ForkingExecutor,
            seed=0,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.pass_tokens(cuda=torch.cuda.is_available()),
            block_size=None if torch.cuda.is_available() else _CPU_BLOCK,
            kv_cache_memory_bytes=_cache_bytes(config, checkpoint),
            gpu_memory_utilization=_GPU_SHARE if torch.cuda.is_available() else 0.9,
            enforce_eager=not config.cuda_graphs,
            compilation_config={**_GRAPHS, "cudagraph_capture_sizes": _graph_sizes(config.max_num_seqs)}
            if config.cuda_graphs
            else None,
            enable_sleep_mode=config.sleep_level > 0,
            quantization=config.quantization,
            enable_lora=config.lora_rank > 0,
            **(_room_for_adapters(config) if config.lora_rank else {}),
            # Off where layers keep states, as by vLLM's default: cached states are experimental in 0.21, and copied by
            # a Triton kernel, which a CPU does not have.
            # And off beside routes: vLLM reports expert 0 for every token that it finds in the cache.
            enable_prefix_caching=cached,
            # Without the cache prompts are cut at the end of a pass, for which 0.21 winds a seeded request's generator
            # back, and on a CPU fails: "CPU Generator does not use offset".
            enable_chunked_prefill=None if cached or torch.cuda.is_available() else False,
            enable_return_routed_experts=config.routes,
            # A step that is scheduled ahead is sampled by the weights before an update, and comes after it.
            async_scheduling=False if config.routes or config.inflight else None,
            # FlashInfer, which 0.21 takes on Hopper without a look at what is installed, is left out (ADR 0056).
            additional_config={"gdn_prefill_backend": "triton"},
            skip_tokenizer_init=True,
            language_model_only=bool(checkpoint.config.get("vision_config")),
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            weight_transfer_config={"backend": BACKEND},
            worker_extension_cls="verifier.engine.vllm.worker_vllm.VerifierWorker",
        )
        self._running = RunningBatches(self._llm.llm_engine, None if config.lora_rank else 0)
        self._rpc("verifier_unlink_shared")
        self._routers = len(moe_layers_of(checkpoint.config)) if config.routes else 0

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.logprobs`: one prefill per sequence; vLLM does not read the prefix cache for it."""
        self._limits.check(sequences, spare=1)
        asked = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, detokenize=False)
        outputs = self._sampled(sequences, asked)
        self._asked.add(sequences)
        return [
            [nats_of(row, token) for token, row in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`. Seeded samples do not depend on batching.

        vLLM seeds sample k of a request with the request's seed plus k. On a CPU it ignores seeds if a request of the
        batch has none or is greedy (vllm #51226), so the generator that serves all requests is seeded too.
        """
        requests = self._limits.requests(prompts, sampling)
        self._generator = self._rpc("verifier_seed", seed=sampling.seed)[0]
        if self._routers:  # of a request of several samples vLLM reports the routes of one sample's prompt
            pairs = zip(prompts, requests, strict=True)
            each = [(prompt, asked, number) for prompt, asked in pairs for number in range(asked.n)]
            params = [_params(replace(asked, n=1, seed=asked.seed + number)) for _, asked, number in each]
            outputs = zip(self._sampled([prompt for prompt, _, _ in each], params), params, strict=True)
            return [[self._routed(*next(outputs)) for _ in range(asked.n)] for asked in requests]
        params = [_params(item) for item in requests]
        outputs = zip(self._sampled(prompts, params), params, strict=True)
        found = [[self._named(item, output, own) for item in output.outputs] for output, own in outputs]
        most = self._asked.common(prompts, [[sample.tokens for sample in own] for own in found])
        cache = self._llm.llm_engine.vllm_config.cache_config
        if not holds_all(prompts, requests, cache.num_gpu_blocks or 0, cache.block_size):
            return found
        return [[replace(each, common_tokens=at) for each in own] for own, at in zip(found, most, strict=True)]

    def begin_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, steps: int) -> None:
        """See `Engine.begin_batch`; seeds are those of `generate`."""
        asked = [_params(item) for item in self._limits.requests(prompts, sampling)]
        self._rpc("verifier_seed", seed=sampling.seed)
        self._running.begin(prompts, asked, self._adapter)
        self._asked.add(prompts)
        self._running.step(steps)

    def finish_batch(self) -> list[list[Sample]]:
        """See `Engine.finish_batch`.

        Raises:
            ContractError: no batch has begun.
        """
        prompts, found = self._running.prompts(), self._running.finish()
        self._asked.common(prompts[0], [[sample.tokens for sample in own] for own in found])
        return found

    def state(self) -> list[list[EngineTensor]]:
        """See `Engine.state`."""
        return self._rpc("verifier_state", list[EngineTensor])

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """See `Engine.checkpoint_view`."""
        return self._rpc("verifier_view", list[EngineSlice], carried=self._carried)

    def poison(self) -> list[list[Poisoned]]:
        """See `Engine.poison`."""
        return self._rpc("verifier_poison", list[Poisoned], carried=self._carried)

    def connect(self, address: Address) -> None:
        """See `Engine.connect`; by the worker's `init_weight_transfer_engine`. Batches of another sender end."""
        self._running.abandon()
        self._rpc("init_weight_transfer_engine", init_info=asdict(address))

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """See `Engine.begin_update`; by the worker's `start_weight_update`, once all members have the same plan."""
        return self._rpc("verifier_begin", Agreement, plan=plan.to_json())

    def receive(self, chunk: int) -> list[Receipt]:
        """See `Engine.receive`; by the worker's `update_weights`."""
        return self._rpc("verifier_receive", Receipt, chunk=chunk)

    def finish_update(self, version: int) -> None:
        """See `Engine.finish_update`; by the worker's `verifier_finish`.

        Raises:
            ContractError: a layer's weights do not fit it; the next update starts from the previous weights.
        """
        self._rpc("verifier_finish", otherwise=ContractError)
        self._asked = Asked()
        for prompts in self._running.prompts():
            self._asked.add(prompts)
        self._running.updated(version)

    def reset_prefix_cache(self, running: bool = False) -> bool:
        """See `Engine.reset_prefix_cache`."""
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running))

    def load_adapter(self, path: str) -> None:
        """See `Engine.load_adapter`. Each gets a new number: vLLM would not load an adapter with a known one.

        The folder's name is the adapter's. Cached prefixes belong to a name, so that no version reads another's.

        Raises:
            ContractError: vLLM did not load it.
        """
        number = 1
        if self._adapter is not None:
            number += self._adapter.lora_int_id
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        self._rpc("verifier_poison_adapter")
        self._asked = Asked()
        self._adapter = LoRARequest(Path(path).name, number, path)
        if not self._llm.llm_engine.add_lora(self._adapter):
            raise ContractError(f"vLLM did not load the adapter in {path}")

    def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self._llm.sleep(level=level)

    def wake_up(self, tag: str) -> None:
        """See `Engine.wake_up`."""
        self._llm.wake_up(tags=[tag])

    def call(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """See `Engine.call`."""
        return self._rpc("verifier_call", function=function, arguments=arguments)

    def shutdown(self) -> None:
        """End the workers."""
        self._llm.llm_engine.engine_core.shutdown()

    def _routed(self, output: RequestOutput, asked: SamplingParams) -> Sample:
        """Convert a request's only completion, with its routes, of which vLLM has columns for dense layers too."""
        item = output.outputs[0]
        of_prompt = getattr(output, "prompt_routed_experts", None)  # vLLM 0.22 has all routes in one array
        parts = [np.asarray(part) for part in (of_prompt, item.routed_experts) if part is not None]
        routes = np.concatenate(parts)[:, : self._routers].astype(np.int32)
        rows = tuple(tuple(map(tuple, token)) for token in routes.tolist())
        return replace(self._named(item, output, asked), routes=rows, routes_seal=seal_of_array(routes))

    def _named(self, item: CompletionOutput, output: RequestOutput, asked: SamplingParams) -> Sample:
        """Convert a completion, and name the weights that are held, where no update comes before its end."""
        held = self._running.held
        weights = () if held is None else weights_of([held] * len(item.token_ids))
        found = replace(sample_of(item, output, asked), shaped=words_of(asked, output), weights=weights)
        return found if asked.seed is not None else replace(found, seed=NO_SEED - 1 - self._generator)

    def _sampled(self, prompts: Sequence[Sequence[int]], asked: SamplingParams | list[SamplingParams]) -> list[Any]:
        self._running.step()  # to its end: vLLM's `generate` would drop its tokens
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(tokens, asked, use_tqdm=False, lora_request=self._adapter)

    def _rpc(
        self, method: str, kind: Any = Any, *, otherwise: type[VerifierError] = InternalError, **arguments: Any
    ) -> list[Any]:
        """Call a method on every worker, and convert what each returns; the first rank that failed speaks for all."""
        asked = {"method": method, "arguments": arguments}
        try:
            replies = self._llm.collective_rpc("verifier_request", timeout=_RPC_DEADLINE_S, kwargs=asked)
        except TimeoutError as error:
            raise InternalError(f"vLLM's workers did not answer `{method}` within {_RPC_DEADLINE_S} s") from error
        return [
            msgspec.convert(
                value_of(reply, f"engine rank {rank} failed in `{method}`", otherwise, party=f"engine rank {rank}"),
                kind,
            )
            for rank, reply in enumerate(replies)
        ]


def _cache_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    if not config.kv_cache_share or not torch.cuda.is_available():
        return config.kv_cache_bytes
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    most = most_on_gpu(config.kv_cache_share, device_bytes, checkpoint.num_bytes, config)
    return cache_bytes(
        None, checkpoint.config, dtype=config.dtype, engine=config, length=config.max_model_len,
        count=config.max_num_seqs, most=most,
    )  # fmt: skip


def _graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that get a CUDA graph each; a pass is padded to the next.

    Source:
        vLLM 0.21's default up to 512 (`VllmConfig._set_cudagraph_sizes`); it captures none above.
    """
    most = min(max(max_num_seqs, 16), _MOST_IN_GRAPH)
    every = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, _MOST_IN_GRAPH, 32)]
    return [*(size for size in every if size < most), most]


def _room_for_adapters(config: EngineConfig) -> dict[str, Any]:
    """Options by which vLLM holds one adapter at a time, on linears only."""
    modules = [_LINEARS[target] for target in config.lora_targets]
    return {"max_loras": 1, "max_lora_rank": config.lora_rank, "lora_target_modules": modules}


def _params(sampling: Sampling) -> SamplingParams:
    shape = sampling.shape
    return SamplingParams(
        n=sampling.n, seed=sampling.seed if sampling.seeded else None, temperature=sampling.temperature,
        max_tokens=sampling.max_tokens, min_tokens=shape.least, stop_token_ids=list(sampling.stop),
        ignore_eos=sampling.ignore_end, top_k=shape.top_k, top_p=shape.top_p, min_p=shape.min_p,
        repetition_penalty=shape.repetition, presence_penalty=shape.presence, frequency_penalty=shape.frequency,
        logit_bias=dict(shape.bias) or None, allowed_token_ids=list(shape.allowed) or None, logprobs=0,
        detokenize=False,
    )  # fmt: skip


_SPIN_S = 0.005
"""Seconds that a reader looks for the next message before it sleeps: some steps of a small model."""
_LOOK_MS = 20
"""Milliseconds after which a sleeping reader looks by itself: a notice that is sent before it is connected is lost."""


class ForkingExecutor(MultiprocExecutor):
    """Forks workers on a CPU too, where vLLM's platform asks for interpreters of their own: 13 processor seconds each.

    A new interpreter is for OpenMP: it reads the cores that its threads are bound to when it begins. Workers of this
    executor are bound to no core (`VLLM_CPU_OMP_THREADS_BIND=nobind`), and have `OMP_NUM_THREADS` threads. They are
    killed at the end: on their way out they would collect garbage in all that they share with this process,
    which copies it.

    Source:
        vLLM 0.21, vllm/platforms/cpu.py (check_and_update_config), vllm/utils/ompmultiprocessing.py, and
        vllm/distributed/parallel_state.py (cleanup_dist_env_and_memory).
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, int(os.environ["OMP_NUM_THREADS"])))
        super()._init_executor()

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[Any]) -> None:
        for process in worker_procs:
            process.kill()
        for process in worker_procs:
            process.join()


def wait_asleep() -> None:
    """Have this process, and workers that are forked from it, sleep while they wait for messages of vLLM.

    vLLM's readers look for the next message for a second after each: on a CPU they take a core from the worker that
    they wait for, or from ranks of the trainer. A version without such readers keeps its own way.

    Source:
        vLLM 0.21, vllm/distributed/device_communicators/shm_broadcast.py.
    """
    reader = getattr(shm_broadcast, "SpinCondition", None)
    if reader is not None and "busy_loop_s" in inspect.signature(reader).parameters:
        reader.wait = _asleep(reader.wait)


def _asleep(spinning: Callable[[Any, int | None], None]) -> Callable[[Any, int | None], None]:
    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = min(condition.busy_loop_s, _SPIN_S)
        spinning(condition, _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

    return wait
