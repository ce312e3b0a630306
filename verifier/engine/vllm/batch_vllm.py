"""Requests of vLLM that run on while weights are updated between two steps of its engine."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from verifier.engine.api import NO_SEED, Sample, weights_of
from verifier.errors import ContractError

_NUMBERS = itertools.count()
_OF_NO_SHAPE = frozenset({
    "n", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids",
    "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "skip_clone", "output_text_buffer_length", "extra_args", "skip_reading_prefix_cache",
})  # fmt: skip
"""Knobs of vLLM's requests that change no token's distribution: counts, ends, and what is reported."""


class RunningBatches:
    """Batches of requests that are sampled side by side, and how far each sample had come when weights were updated.

    The engine's scheduler ends a step before it begins the next. `held` is the version of the weights; None for an
    engine that gets adapters.
    """

    def __init__(self, engine: LLMEngine, held: int | None = None) -> None:
        self._engine, self.held = engine, held
        self._batches = deque[_Batch]()
        self._inner: dict[str, str] = {}
        self._found: dict[tuple[str, int], Sample] = {}
        self._sampled_by: dict[tuple[str, int], list[int]] = {}

    def begin(
        self, prompts: Sequence[Sequence[int]], asked: Sequence[SamplingParams], adapter: LoRARequest | None = None
    ) -> None:
        """Add a batch behind the others."""
        number = next(_NUMBERS)
        batch = _Batch(prompts, {f"batch {number} request {at}": own for at, own in enumerate(asked)}, [])
        for (name, params), prompt in zip(batch.asked.items(), prompts, strict=True):
            params.output_kind = RequestOutputKind.CUMULATIVE
            self._inner[name] = self._engine.add_request(name, tokens_input([*prompt]), params, lora_request=adapter)
        self._batches.append(batch)

    def prompts(self) -> list[Sequence[Sequence[int]]]:
        """Prompts of each batch, the first to begin first."""
        return [batch.prompts for batch in self._batches]

    def step(self, count: int | None = None, first: bool = False) -> None:
        """Take so many steps of the engine, or all that are left; if `first`, of the first batch."""
        asked, taken = {name: own for batch in self._batches for name, own in batch.asked.items()}, 0
        last = self._batches[0].asked.keys() if first else asked.keys()
        while self._inner.keys() & last and (count is None or taken < count):
            for output in self._engine.step():
                for item in output.outputs:
                    key = output.request_id, item.index
                    self._found[key] = sample_of(item, output, asked[output.request_id])
                    if self.held is not None:
                        named = self._sampled_by.setdefault(key, [])
                        named += [self.held] * (len(item.token_ids) - len(named))
                if output.finished:
                    self._inner.pop(output.request_id, None)
            taken += 1

    def updated(self, version: int) -> None:
        """Count a weight update: tokens from here on are sampled by the new weights, of this version."""
        self.held = None if self.held is None else version
        counts = {key: len(sample.tokens) for key, sample in self._found.items()}
        for batch in self._batches:
            batch.before.append(counts)

    def finish(self) -> list[list[Sample]]:
        """Sample the first batch to its end; returns the samples of each of its prompts."""
        if not self._batches:
            raise ContractError("no batch has begun, so there is none to finish")
        self.step(first=True)
        batch = self._batches.popleft()
        return [[self._with_updates(batch, name, at) for at in range(own.n)] for name, own in batch.asked.items()]

    def abandon(self) -> None:
        """End and forget all batches."""
        self._engine.abort_request([*self._inner.values()], internal=True)
        for each in (self._batches, self._inner, self._found, self._sampled_by):
            each.clear()

    def _with_updates(self, batch: _Batch, name: str, at: int) -> Sample:
        sample = self._found.pop((name, at))
        before = [counts.get((name, at), 0) for counts in batch.before]
        found = (sum(count <= place for count in before) for place in range(len(sample.tokens)))
        weights = weights_of(self._sampled_by.pop((name, at), ()))
        return replace(sample, updates=tuple(found), shaped=shaped_by(batch.asked[name]), weights=weights)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests of a batch, by name."""

    prompts: Sequence[Sequence[int]]
    asked: dict[str, SamplingParams]
    before: list[dict[tuple[str, int], int]]
    """Tokens of each sample before each update since the batch was begun."""


def nats_of(row: Mapping[int, Any], token: int) -> float:
    """Return a token's log-probability; NaN if vLLM reports another token's."""
    return row[token].logprob if token in row else math.nan


def words_of(asked: SamplingParams, output: RequestOutput) -> str:
    """Knobs of an answered request, and the adapter that vLLM answered it with; see `Sample.shaped`."""
    adapter = "" if output.lora_request is None else f"adapter={output.lora_request.lora_name}"
    return ", ".join(text for text in (adapter, shaped_by(asked)) if text)


def shaped_by(asked: SamplingParams) -> str:
    """Knobs of a request that change the next token's distribution; see `Sample.shaped`."""
    neutral = SamplingParams()
    names = sorted(item.name for item in msgspec.structs.fields(asked) if not item.name.startswith("_"))
    differ = [name for name in names if name not in _OF_NO_SHAPE and getattr(asked, name) != getattr(neutral, name)]
    return ", ".join(f"{name}={getattr(asked, name)!r}" for name in differ)


def sample_of(item: CompletionOutput, output: RequestOutput, asked: SamplingParams) -> Sample:
    """Convert one of vLLM's completions of a request, as far as it has come.

    The seed is that of a child of vLLM 0.21's `ParentRequest`.
    """
    logprobs = (nats_of(row, token) for token, row in zip(item.token_ids, item.logprobs, strict=True))
    return Sample(
        tokens=tuple(item.token_ids), logprobs=tuple(logprobs), ended=item.finish_reason or "",
        cached_tokens=output.num_cached_tokens or 0, seed=NO_SEED if asked.seed is None else asked.seed + item.index,
    )  # fmt: skip
