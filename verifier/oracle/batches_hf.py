"""Sequences of one length, which transformers computes together: no padding, so no mask but the causal one."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from verifier.oracle.routes_hf import Route, Seen, choosing, chosen_experts, mixtures_of
from verifier.oracle.streaming_hf import StreamedModel, Unit, Within

MAX_TOKENS = 2048
"""Most tokens of a batch, unless it is one sequence."""
MAX_LOGITS = 2**22
"""Most logits that are computed at once on the host, unless they are of one token; 32 MiB in float64."""
GPU_LOGITS, LOGIT_BYTES = 2**26, 128
"""The same on a GPU whose free memory has room for so many bytes of each."""

SHARED = 8
"""Fewest tokens that sequences begin with alike and that are computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B sequences of T tokens, whose routers are given experts in the same layers."""

    places: tuple[int, ...]
    """Index of each sequence among all."""
    tokens: torch.Tensor
    """[B, T] ids."""
    experts: Mapping[int, torch.Tensor]
    """[B, T, K] by layer; a layer that is left out chooses by itself."""
    margin: float = math.inf
    """See `choosing`."""


def batches(
    sequences: Sequence[Sequence[int]], routes: Sequence[Sequence[Route]] = (), margin: float = math.inf,
    most: int = MAX_TOKENS,
) -> Iterator[Batch]:  # fmt: skip
    """All sequences, each in one batch, the shorter first.

    `routes` are what the routers of each sequence choose, none where they choose by themselves; for their `margin` see
    `choosing`. A batch has `most` tokens, unless it is one sequence.
    """
    chosen = [
        chosen_experts(rows, len(tokens))
        for tokens, rows in zip(sequences, routes or [()] * len(sequences), strict=True)
    ]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for at, (tokens, experts) in enumerate(zip(sequences, chosen, strict=True)):
        told = tuple((layer, experts[layer].shape[-1]) for layer in sorted(experts))
        alike.setdefault((len(tokens), told), []).append(at)
    for (length, told), members in sorted(alike.items()):
        size = max(1, most // length)
        for begin in range(0, len(members), size):
            places = tuple(members[begin : begin + size])
            yield Batch(
                places=places, tokens=torch.tensor([list(sequences[at]) for at in places], dtype=torch.int64),
                experts={layer: torch.stack([chosen[at][layer] for at in places]) for layer, _ in told},
                margin=margin,
            )  # fmt: skip


def hidden_of(
    model: StreamedModel, batch: Batch, seen: Seen | None = None, past: DynamicCache | None = None
) -> torch.Tensor:
    """[B, T, H] of a batch that the head is given; for `seen` see `choosing`, for `past` `StreamedModel.hidden`."""
    told = {layer: chosen.flatten(0, 1) for layer, chosen in batch.experts.items()}
    with choosing(model.model, told, batch.margin, seen) if told else contextlib.nullcontext():
        return model.hidden(batch.tokens, past)


def choosing_in(model: StreamedModel, batch: Batch) -> Within:
    """Context in which the routers of a unit are given their experts, each time that it is computed."""
    blocks = mixtures_of(model.model) if batch.experts else {}

    def within(unit: Unit) -> contextlib.AbstractContextManager[None]:
        own = set(unit.module.modules())
        told = {layer: chosen.flatten(0, 1) for layer, chosen in batch.experts.items() if blocks.get(layer) in own}
        return choosing(model.model, told, batch.margin) if told else contextlib.nullcontext()

    return within


def at_once(model: StreamedModel) -> int:
    """Most tokens whose logits are computed at once; at least one."""
    most = MAX_LOGITS
    if model.device.type == "cuda":
        most = max(most, min(GPU_LOGITS, torch.cuda.mem_get_info(model.device)[0] // LOGIT_BYTES))
    return max(1, most // int(model.config.get_text_config().vocab_size))


def slices_of(model: StreamedModel, num_tokens: int) -> Iterator[slice]:
    """Tokens whose logits are computed at once; meanwhile the head has its weights."""
    size = at_once(model)
    with model.weights_of(model.head_unit):
        for begin in range(0, max(num_tokens, 1), size):
            yield slice(begin, begin + size)


def remembers(model: StreamedModel) -> bool:
    """True if keys and values of all tokens before are all that a token depends on."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def repeated(past: DynamicCache, times: int) -> DynamicCache:
    """Keys and values of one sequence, for a batch of so many."""
    found = copy.deepcopy(past)
    found.batch_repeat_interleave(times)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens from `begin` to `end` that some sequences have in common, and the token after them."""

    begin: int
    end: int
    members: Sequence[int]
    """Places of these sequences."""
    after: int | None
    """Index of the run that ends where this one begins; None at the first token."""


def alike(sequences: Sequence[Sequence[int]]) -> tuple[list[Run], list[int | None]]:
    """Runs of tokens to compute once, each after the one that it goes on from; and of each sequence its last run.

    Sequences of a run have the token after it in common too, so that the same is scored after each of its tokens. None
    stands for a sequence that is in no run.
    """
    runs, last = list[Run](), list[int | None]([None] * len(sequences))
    order = sorted(range(len(sequences)), key=lambda at: tuple(sequences[at]))
    left: list[tuple[list[int], int, int | None]] = [(order, 0, None)]
    while left:
        group, begin, after = left.pop()
        if len(group) < 2:
            continue
        first, final = (sequences[group[at]] for at in (0, -1))
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, final, strict=False)))
        if common - 1 - begin >= SHARED:
            runs.append(Run(begin, common - 1, group, after))
            begin, after = common - 1, len(runs) - 1
            for at in group:
                last[at] = after
        rest = groupby(group, key=lambda at: sequences[at][common : common + 1])
        left += [([*members], begin, after) for key, members in rest if key]
    return runs, last
