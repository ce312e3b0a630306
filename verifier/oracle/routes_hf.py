"""Experts that the routers of a mixture in transformers are given to choose."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verifier.errors import ContractError

Route = Sequence[int]
"""Position, global layer and experts of one token in one layer. A token without, such as a last one, gets the first
experts: nothing that is scored depends on it."""
Seen = Callable[[int, torch.Tensor], None]
"""Gets a global layer, and [tokens, experts] what its router chooses the greatest of."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def mixtures_of(model: nn.Module) -> dict[int, nn.Module]:
    """The blocks that hold a router and experts, by global layer index."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "experts") and router_of(module) and (layer := _LAYER.search(f".{name}.")):
            found[int(layer[1])] = module
    return found


def router_of(block: nn.Module) -> nn.Module | None:
    """The router of a block, whose weight is [experts, hidden]; None if it has none."""
    return getattr(block, "gate", None) or getattr(block, "router", None)


def chosen_experts(rows: Sequence[Route], num_tokens: int) -> dict[int, torch.Tensor]:
    """Experts of every token of one sequence, [T, K] by layer; no layer that no row names."""
    experts: dict[int, torch.Tensor] = {}
    for position, layer, *chosen in rows:
        first = torch.arange(len(chosen)).repeat(num_tokens, 1)
        experts.setdefault(layer, first)[position] = torch.tensor(chosen)
    return experts


@contextlib.contextmanager
def choosing(
    model: Any, experts: Mapping[int, torch.Tensor], margin: float = math.inf, seen: Seen | None = None
) -> Iterator[None]:
    """Within, the choice of each layer's router is the one given: of all experts, the best K of each token, [T, K].

    What else a router chooses, such as groups of experts, it chooses by itself: the choice that counts comes last.
    Layers that are not given choose by themselves. The tokens are those of all sequences of a batch.

    Experts are by layer. A token's are chosen only where none of them scores below the K-th best by more than `margin`,
    a share of the greatest magnitude of its scores; elsewhere the router chooses by itself. `seen` is called with the
    scores by which each of these routers chooses.

    Raises:
        ContractError: a router does not choose by `torch.topk`, so that its choice cannot be given.
    """
    blocks, topk = mixtures_of(model), torch.topk
    given: list[tuple[int, int, torch.Tensor]] = []
    obeyed = set()

    def choose(scores: torch.Tensor, k: int, *rest: Any, **options: Any) -> Any:
        if given and (scores.shape[-1], k) == (given[-1][1], given[-1][2].shape[-1]):
            layer, _, chosen = given[-1]
            obeyed.add(id(chosen))
            chosen = chosen.to(scores.device)
            if seen is not None:
                seen(layer, scores)
            if margin < math.inf:
                best = topk(scores, k, *rest, **options)
                size = scores.where(scores.isfinite(), 0.0).abs().amax(-1, keepdim=True)
                least = best.values.amin(-1, keepdim=True) - margin * size
                near = scores.gather(-1, chosen).amin(-1, keepdim=True) >= least
                chosen = torch.where(near, chosen, best.indices)
            return scores.gather(-1, chosen), chosen
        return topk(scores, k, *rest, **options)

    with contextlib.ExitStack() as hooks:
        for layer, chosen_TK in experts.items():
            block = blocks.get(layer)
            if block is None:
                raise ContractError(
                    f"transformers' layer {layer} has no block of a router and experts to give routes to"
                )
            router: Any = router_of(block)
            entry = (layer, int(router.weight.shape[0]), chosen_TK)
            hooks.callback(block.register_forward_pre_hook(lambda *_, entry=entry: given.append(entry)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: given.pop() and None).remove)
        hooks.callback(setattr, torch, "topk", topk)
        setattr(torch, "topk", choose)  # noqa: B010 - a module's function has no other type
        yield
    if len(obeyed) < len(experts):
        raise ContractError(f"{len(experts) - len(obeyed)} of {len(experts)} routers of transformers took no routes")
