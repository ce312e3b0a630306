"""transformers as the engine, for architectures that vLLM has no CPU kernels for; one rank, the same update path."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

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
from verifier.engine.shaping import shaped
from verifier.engine.weights import poison_stored, prefixed_modules, restore, stored
from verifier.errors import ContractError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.transformers_hf import checkpoint_places, load_model, token_logprobs
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import digest_tensor
from verifier.transport.buffer import dtype_name
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Agreement, Receipt


class HfEngine:
    """See `Engine`. Eager attention; no prefix cache, so nothing can be stale in it."""

    num_ranks = 1

    def __init__(self, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(config.checkpoint)
        self.model = load_model(config.checkpoint, getattr(torch, config.dtype), fixes=config.fixes)
        self.receiver = ChunkReceiver(0)
        self._max_len = config.max_model_len
        self._vocab_size = int(checkpoint.config["vocab_size"])
        self._carried = frozenset(holder for holder, _ in checkpoint_places(self.model).values())
        self._aside: dict[str, torch.Tensor] = {}
        self._unseeded = torch.Generator().manual_seed(config.seed)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """One forward per sequence; log-softmax in float32."""
        check_sequences(sequences, vocab_size=self._vocab_size, max_len=self._max_len)
        return [token_logprobs(self.model, tokens, torch.float32).tolist() for tokens in sequences]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """One sample at a time, each with its own generator; every token but the first recomputes its whole prefix."""
        requests = [sampling.of(index) for index in range(len(prompts))]
        longest = max((item.max_tokens for item in requests), default=0)
        check_sequences(prompts, vocab_size=self._vocab_size, max_len=self._max_len - longest, least=1)
        found = []
        for prompt, asked in zip(prompts, requests, strict=True):
            first = self._distribution(prompt, (), asked)
            seeds = (asked.seed + sample if asked.seeded else None for sample in range(asked.n))
            samples = tuple(self._sample(prompt, first, self._generator(seed), asked) for seed in seeds)
            found.append(Generation(prompt=tuple(prompt), samples=samples))
        return found

    def state(self) -> list[list[HeldTensor]]:
        """See `held.stored`."""
        return [
            [
                HeldTensor(
                    name=held.name,
                    kind=held.kind,
                    dtype=dtype_name(held.tensor.dtype),
                    shape=tuple(held.tensor.shape),
                    digest=digest_tensor(held.tensor.detach()),
                )
                for prefix, module in prefixed_modules(self.model)
                for held in stored(prefix, module)
            ]
        ]

    def checkpoint_view(self) -> list[list[HeldSlice]]:
        """Every tensor is whole; a tied one is there once per parameter that a forward reads it from."""
        places = [(name, holder, tensor) for name, (holder, tensor) in checkpoint_places(self.model).items()]
        for name, source in self.model.all_tied_weights_keys.items():
            places.append((source, name, self.model.get_parameter(name).data))
        return [
            [
                HeldSlice(
                    name=name,
                    holder=holder,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    digest=digest_tensor(tensor),
                    box=tuple((0, size) for size in tensor.shape),
                )
                for name, holder, tensor in places
            ]
        ]

    def poison(self) -> list[list[Poisoned]]:
        """See `held.poison_stored`."""
        return [
            [
                Poisoned(name=held.name, how=poison_stored(held, self._carried, self._aside))
                for prefix, module in prefixed_modules(self.model)
                for held in stored(prefix, module)
            ]
        ]

    def connect(self, address: Address) -> None:
        """As engine rank 0."""
        self.receiver.connect(address)

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """Agree, then bring back what no update carries."""
        agreement = self.receiver.agree(plan)
        if agreement.reached:
            restore(self.model, self._aside)
        return [agreement]

    def receive(self, chunk: int) -> list[Receipt]:
        """Take one chunk and copy it in place."""
        return [self.receiver.receive(chunk, self.load)]

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        """Copy tensors to their places, by checkpoint name.

        Returns:
            The engine's own names of the parameters and buffers that took something up.

        Raises:
            ContractError: the model has no such tensor, or it has another shape.
        """
        places = checkpoint_places(self.model)
        written: set[int] = set()
        for name, tensor in tensors:
            if name not in places:
                raise ContractError(f"the engine's model has no place for `{name}`")
            place = places[name][1]
            if place.shape != tensor.shape:
                raise ContractError(f"`{name}` came as {list(tensor.shape)}, the engine holds {list(place.shape)}")
            place.copy_(tensor)
            written.add(place.data_ptr())
        held = (item for prefix, module in prefixed_modules(self.model) for item in stored(prefix, module))
        tied = {item.name for item in held if item.kind == "parameter" and item.tensor.data_ptr() in written}
        return sorted(tied | {places[name][0] for name, _ in tensors})

    def finish_update(self) -> None:
        """Nothing is packed or derived, so nothing is left to do."""

    def reset_prefix_cache(self) -> bool:
        """There is none."""
        return True

    def load_adapter(self, path: str) -> None:
        """Its adapters would be merged weights, which come by an update."""
        raise ContractError("the engine of transformers takes no adapters")

    def sleep(self, level: int) -> None:
        """It has no GPU memory to give up."""
        raise ContractError("the engine of transformers does not sleep")

    def wake_up(self, tag: str) -> None:
        """It never sleeps."""
        raise ContractError("the engine of transformers does not sleep")

    def call(self, module: str, function: str, arguments: Sequence[Any]) -> list[Any]:
        """With this engine as the worker."""
        return [getattr(importlib.import_module(module), function)(self, *arguments)]

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self.receiver.close()

    @torch.inference_mode()
    def _distribution(self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[V] log-probabilities of the next token."""
        logits = self.model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1]
        return shaped(logits.float(), prompt, answer, sampling)

    def _generator(self, seed: int | None) -> torch.Generator:
        """One of the seed, or the engine's own."""
        return self._unseeded if seed is None else torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def _sample(
        self,
        prompt: Sequence[int],
        first: torch.Tensor,
        generator: torch.Generator,
        sampling: Sampling,
    ) -> Sample:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in sampling.stop):
            distribution = self._distribution(prompt, tokens, sampling) if tokens else first
            # An exponential race, as vLLM draws: from weights that are not finite it samples too, and does not refuse.
            waits = torch.empty_like(distribution).exponential_(generator=generator)
            token = int((distribution.exp() / waits if sampling.temperature else distribution).argmax())
            tokens.append(token)
            logprobs.append(float(distribution[token]))
        return Sample(tokens=tuple(tokens), logprobs=tuple(logprobs))
