"""transformers as the engine: one rank, the same update path, for architectures without CPU kernels in vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

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
    Shape,
    weights_of,
)
from verifier.engine.shaping import shaped
from verifier.engine.stored_tensors import poison_stored, restore, slice_of, stored_in_model
from verifier.errors import ContractError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import is_served
from verifier.model.transformers_hf import checkpoint_places, load_model, token_logprobs
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Agreement, Receipt

_BATCH_TOKENS = 1024
"""Most tokens of a batch, padding included, unless one sequence has more: every one has logits."""


class HfEngine(Engine):
    """See `Engine`. Attention is eager; there is no prefix cache."""

    library = "transformers"

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = load_model(config.checkpoint, getattr(torch, config.dtype), fixes=config.fixes)
        self.receiver = ChunkReceiver(0)
        self._source = open_checkpoint(config.checkpoint)
        self._limits = Limits.of(self._source.config, config)
        self._carried = frozenset(holder for holder, _ in self._places().values())
        self._saved: dict[str, torch.Tensor] = {}
        self._batches = deque[tuple[int, list[list[_Running]]]]()
        self._updates = self._held = 0
        self._unseeded = torch.Generator()

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.logprobs`: one forward per sequence, log-softmax in float32."""
        self._limits.check(sequences)
        return [token_logprobs(self.model, tokens, torch.float32).tolist() for tokens in sequences]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`: all samples side by side; every token recomputes its whole prefix."""
        samples = self._begun(prompts, sampling)
        self._draw(samples)
        return [[one.sample() for one in each] for each in samples]

    def begin_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, steps: int) -> None:
        """See `Engine.begin_batch`."""
        self._batches.append((self._updates, self._begun(prompts, sampling)))
        self._draw([each for _, batch in self._batches for each in batch], steps)

    def finish_batch(self) -> list[list[Sample]]:
        """See `Engine.finish_batch`."""
        if not self._batches:
            raise ContractError("no batch has begun, so there is none to finish")
        before, samples = self._batches.popleft()
        self._draw(samples)
        return [
            [replace(one.sample(), updates=tuple(count - before for count in one.updates)) for one in each]
            for each in samples
        ]

    def state(self) -> list[list[EngineTensor]]:
        """See `Engine.state`."""
        return [[item.describe() for item in stored_in_model(self.model)]]

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """See `Engine.checkpoint_view`: every tensor is whole; a tied one appears once per parameter."""
        whole = [slice_of(name, *place) for name, place in self._places().items()]
        tied = self.model.all_tied_weights_keys.items()
        return [[*whole, *(slice_of(source, name, self.model.get_parameter(name).data) for name, source in tied)]]

    def poison(self) -> list[list[Poisoned]]:
        """See `Engine.poison`."""
        return [[poison_stored(item, self._carried, self._saved) for item in stored_in_model(self.model)]]

    def connect(self, address: Address) -> None:
        """See `Engine.connect`. Batches of another sender end."""
        self._batches.clear()
        self.receiver.connect(address)

    def begin_update(self, plan: ChunkPlan) -> list[Agreement]:
        """See `Engine.begin_update`; restores what no update carries."""
        agreement = self.receiver.agree(plan)
        if agreement.reached:
            restore(self.model, self._saved)
        return [agreement]

    def receive(self, chunk: int) -> list[Receipt]:
        """See `Engine.receive`."""
        return [self.receiver.receive(chunk, self.load)]

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        """Copy tensors that it serves to their places by checkpoint name; return the engine's names of those.

        Raises:
            ContractError: the model has no such tensor or one of another shape.
        """
        places = self._places()
        written: set[int] = set()
        tensors = [pair for pair in tensors if pair[0] in places or is_served(pair[0], self._source.config)]
        for name, tensor in tensors:
            if name not in places:
                raise ContractError(f"the engine's model has no place for `{name}`")
            place = places[name][1]
            if place.shape != tensor.shape:
                raise ContractError(f"`{name}` came as {list(tensor.shape)}, the engine holds {list(place.shape)}")
            place.copy_(tensor)
            written.add(place.data_ptr())
        stored = stored_in_model(self.model)
        tied = {item.name for item in stored if item.kind == "parameter" and item.tensor.data_ptr() in written}
        return sorted(tied | {places[name][0] for name, _ in tensors})

    def finish_update(self, version: int) -> None:
        """See `Engine.finish_update`."""
        self._updates, self._held = self._updates + 1, version

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self.receiver.close()

    def _places(self) -> dict[str, tuple[str, torch.Tensor]]:
        return checkpoint_places(self.model, self._source.names())

    def _begun(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[_Running]]:
        pairs = zip(prompts, self._limits.requests(prompts, sampling), strict=True)
        self._unseeded.manual_seed(sampling.seed)
        return [[_Running(each, asked, at, self._unseeded) for at in range(asked.n)] for each, asked in pairs]

    def _draw(self, samples: Sequence[Sequence[_Running]], steps: int | None = None) -> None:
        """Draw so many tokens of each sample, or all that are left."""
        taken = 0
        while running := [sample for each in samples for sample in each if not sample.ended]:
            if taken == steps:
                return
            logits = self._next([(*sample.prompt, *sample.tokens) for sample in running])
            for sample, logits_V in zip(running, logits, strict=True):
                sample.draw(logits_V)
                sample.updates.append(self._updates)
                sample.held.append(self._held)
            taken += 1

    @torch.inference_mode()
    def _next(self, sequences: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Logits [V] float32 of the token after each sequence; batches are padded behind, where nothing looks back."""
        found: dict[tuple[int, ...], torch.Tensor] = {}
        left = sorted(set(sequences), key=len)
        while left:
            batch = [left.pop()]  # the longest
            while left and (len(batch) + 1) * len(batch[0]) <= _BATCH_TOKENS:
                batch.append(left.pop())
            ids = [[*row, *[0] * (len(batch[0]) - len(row))] for row in batch]
            logits = self.model(input_ids=torch.tensor(ids), use_cache=False).logits
            found |= {row: logits[at, len(row) - 1].float() for at, row in enumerate(batch)}
        return [found[sequence] for sequence in sequences]


class _Running:
    """One sample, as far as it has come."""

    def __init__(self, prompt: Sequence[int], asked: Sampling, at: int, unseeded: torch.Generator) -> None:
        self._generator = torch.Generator().manual_seed(asked.seed + at) if asked.seeded else unseeded
        seed = self._generator.initial_seed()
        self._seed = seed if asked.seeded else NO_SEED - 1 - seed
        self.prompt, self._asked, self.ended = prompt, asked, not asked.max_tokens
        self.tokens, self.nats, self.updates, self.held = list[int](), list[float](), list[int](), list[int]()

    def sample(self) -> Sample:
        """The whole of it, once it has ended."""
        stopped = bool(self.tokens) and self.tokens[-1] in self._asked.stop
        ended = "stop" if stopped else "length"
        return Sample(
            tokens=tuple(self.tokens), logprobs=tuple(self.nats), ended=ended, seed=self._seed,
            shaped=_words(self._asked), weights=weights_of(self.held),
        )  # fmt: skip

    def draw(self, logits_V: torch.Tensor) -> None:
        """Add the next token."""
        distribution = shaped(logits_V, self.prompt, self.tokens, self._asked)
        # An exponential race, as in vLLM: it also samples from weights that are not finite.
        waits = torch.empty_like(distribution).exponential_(generator=self._generator)
        self.tokens.append(int((distribution.exp() / waits if self._asked.temperature else distribution).argmax()))
        self.nats.append(float(distribution[self.tokens[-1]]))
        self.ended = len(self.tokens) == self._asked.max_tokens or self.tokens[-1] in self._asked.stop


def _words(asked: Sampling) -> str:
    """Knobs of a request that change the next token's distribution; see `Sample.shaped`."""
    values = {"temperature": asked.temperature, **asdict(asked.shape)}
    neutral = {"temperature": 1.0, **asdict(Shape())}
    differ = (name for name in sorted(values) if (values[name] or None) != (neutral[name] or None))
    return ", ".join(f"{name}={values[name]!r}" for name in differ)
