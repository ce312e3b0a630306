"""transformers as the engine: one rank, the same update path, for architectures without CPU kernels in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verifier.engine.api import Engine, EngineConfig, EngineSlice, EngineTensor, Limits, Poisoned, Sample, Sampling
from verifier.engine.shaping import shaped
from verifier.engine.stored_tensors import poison_stored, restore, slice_of, stored_in_model
from verifier.errors import ContractError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.transformers_hf import checkpoint_places, load_model, token_logprobs
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Agreement, Receipt


class HfEngine(Engine):
    """See `Engine`. Attention is eager; there is no prefix cache."""

    library = "transformers"

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = load_model(config.checkpoint, getattr(torch, config.dtype), fixes=config.fixes)
        self.receiver = ChunkReceiver(0)
        self._limits = Limits.of(open_checkpoint(config.checkpoint).config, config)
        self._carried = frozenset(holder for holder, _ in checkpoint_places(self.model).values())
        self._saved: dict[str, torch.Tensor] = {}
        self._unseeded = torch.Generator().manual_seed(config.seed)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.logprobs`: one forward per sequence, log-softmax in float32."""
        self._limits.check(sequences)
        return [token_logprobs(self.model, tokens, torch.float32).tolist() for tokens in sequences]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`: the samples of a prompt side by side; every token recomputes its whole prefix."""
        requests = self._limits.requests(prompts, sampling)
        return [self._samples(prompt, asked) for prompt, asked in zip(prompts, requests, strict=True)]

    def state(self) -> list[list[EngineTensor]]:
        """See `Engine.state`."""
        return [[item.describe() for item in stored_in_model(self.model)]]

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """See `Engine.checkpoint_view`: every tensor is whole; a tied one appears once per parameter."""
        whole = [slice_of(name, *place) for name, place in checkpoint_places(self.model).items()]
        tied = self.model.all_tied_weights_keys.items()
        return [[*whole, *(slice_of(source, name, self.model.get_parameter(name).data) for name, source in tied)]]

    def poison(self) -> list[list[Poisoned]]:
        """See `Engine.poison`."""
        return [[poison_stored(item, self._carried, self._saved) for item in stored_in_model(self.model)]]

    def connect(self, address: Address) -> None:
        """See `Engine.connect`."""
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
        """Copy tensors to their places by checkpoint name; return the engine's names of what was written.

        Raises:
            ContractError: the model has no such tensor or one of another shape.
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
        stored = stored_in_model(self.model)
        tied = {item.name for item in stored if item.kind == "parameter" and item.tensor.data_ptr() in written}
        return sorted(tied | {places[name][0] for name, _ in tensors})

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self.receiver.close()

    @torch.inference_mode()
    def _samples(self, prompt: Sequence[int], asked: Sampling) -> list[Sample]:
        generators = [
            torch.Generator().manual_seed(asked.seed + sample) if asked.seeded else self._unseeded
            for sample in range(asked.n)
        ]
        rows: list[tuple[list[int], list[float]]] = [([], []) for _ in generators]
        for length in range(asked.max_tokens):
            running = [at for at, (tokens, _) in enumerate(rows) if not (tokens and tokens[-1] in asked.stop)]
            if not running:
                break
            ids = [[*prompt, *rows[at][0]] for at in (running if length else running[:1])]  # they begin alike
            logits = self.model(input_ids=torch.tensor(ids), use_cache=False).logits[:, -1].float()
            for at, logits_V in zip(running, logits.expand(len(running), -1), strict=True):
                tokens, nats = rows[at]
                distribution = shaped(logits_V, prompt, tokens, asked)
                # An exponential race, as in vLLM: it also samples from weights that are not finite.
                waits = torch.empty_like(distribution).exponential_(generator=generators[at])
                tokens.append(int((distribution.exp() / waits if asked.temperature else distribution).argmax()))
                nats.append(float(distribution[tokens[-1]]))
        return [Sample(tokens=tuple(tokens), logprobs=tuple(nats)) for tokens, nats in rows]
