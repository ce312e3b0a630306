"""Oracle of replayed routes: transformers, whose routers are given the experts to choose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verifier.errors import ContractError
from verifier.model.transformers_hf import hold_model, token_logprobs

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def score_routed(
    _: object,
    path: str,
    sequences: Sequence[Sequence[int]],
    routes: Sequence[Sequence[Sequence[int]]],
    dtype: str,
    device: str = "cpu",
) -> list[list[float]]:
    """Teacher-forced log-probabilities of a mixture whose routers obey; a request of an engine server.

    Args:
        path: the checkpoint.
        sequences: token ids, each of at least 2.
        routes: per sequence, one row per token and layer: position, global layer, experts. A token without a row, such
            as a last one, gets the first experts: nothing that is scored depends on it.
        dtype: the weights are brought to this before anything is computed.
        device: "cpu", or "cuda".

    Returns:
        Per sequence, entry t is log p(token t + 1 | tokens 0..t), nats.

    Raises:
        ContractError: a router does not choose by `torch.topk`, so that its choice cannot be given.
    """
    model = hold_model(path, getattr(torch, dtype), device)
    blocks = mixtures_of(model)
    found = []
    for tokens, rows in zip(sequences, routes, strict=True):
        with choosing(blocks, experts_of(rows, len(tokens), device)):
            found.append(token_logprobs(model, tokens, torch.float64).tolist())
    return found


def mixtures_of(model: nn.Module) -> dict[int, nn.Module]:
    """The blocks that hold a router and experts, by global layer index."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "experts") and hasattr(module, "gate") and (layer := _LAYER.search(f".{name}.")):
            found[int(layer[1])] = module
    return found


def experts_of(rows: Sequence[Sequence[int]], num_tokens: int, device: str) -> dict[int, torch.Tensor]:
    """Layer to experts [T, K], from rows of position, layer and experts; no layer where there are none."""
    experts: dict[int, torch.Tensor] = {}
    for position, layer, *chosen in rows:
        first = torch.arange(len(chosen)).repeat(num_tokens, 1)
        experts.setdefault(layer, first)[position] = torch.tensor(chosen)
    return {layer: chosen.to(device) for layer, chosen in experts.items()}


@contextlib.contextmanager
def choosing(blocks: Mapping[int, nn.Module], experts: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within, the choice of each layer's router is what is given: of all experts, the best K.

    What else a router chooses, such as groups of experts, it chooses by itself: the choice that counts comes last.
    """
    topk = torch.topk
    given: list[tuple[int, torch.Tensor]] = []
    obeyed = set()

    def choose(scores: torch.Tensor, k: int, *rest: Any, **options: Any) -> Any:
        if given and (scores.shape[-1], k) == (given[-1][0], given[-1][1].shape[-1]):
            obeyed.add(id(given[-1][1]))
            return scores.gather(-1, given[-1][1]), given[-1][1]
        return topk(scores, k, *rest, **options)

    with contextlib.ExitStack() as hooks:
        for layer, chosen in experts.items():
            block = blocks[layer]
            entry = (int(block.gate.weight.shape[0]), chosen)
            hooks.callback(block.register_forward_pre_hook(lambda *_, entry=entry: given.append(entry)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: given.pop() and None).remove)
        hooks.callback(setattr, torch, "topk", topk)
        setattr(torch, "topk", choose)  # noqa: B010 - a module's function has no other type
        yield
    if len(obeyed) < len(experts):
        raise ContractError(f"{len(experts) - len(obeyed)} of {len(experts)} routers of transformers took no routes")
