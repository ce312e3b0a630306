"""The independent oracle of logprobs: transformers, float32 weights, float64 log-softmax, one sequence at a time.

On a GPU float32 means float32: no TF32, and of state-space layers transformers' own operations, not the kernels that
the trainer and the engine call. Routers of a mixture can be given the experts to choose. Functions whose first argument
is unused are requests of an engine server.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from verifier.engine.api import Sampling
from verifier.engine.shaping import shaped
from verifier.errors import ContractError
from verifier.model.transformers_hf import hold_model, token_logprobs

Route = Sequence[int]
"""Position, global layer and experts of one token in one layer. A token without, such as a last one, gets the first
experts: nothing that is scored depends on it."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def score(
    _: object,
    path: str,
    sequences: Sequence[Sequence[int]],
    dtype: str,
    device: str = "cpu",
    temperature: float = 1.0,
    routes: Sequence[Sequence[Route]] = (),
) -> list[list[float]]:
    """Teacher-forced log-probabilities, nats.

    Args:
        path: the checkpoint; its weights are brought to the dtype before anything is computed.
        sequences: token ids, each of at least 2.
        dtype: "float32"; "bfloat16" to measure what that dtype alone costs, "float64" what "float32" does.
        device: "cpu", or "cuda".
        temperature: divisor of the logits; 0 as `token_logprobs` has it.
        routes: of each sequence, what its routers choose; none where they choose by themselves.

    Returns:
        Per sequence, entry t is log p(token t + 1 | tokens 0..t).

    Raises:
        ContractError: transformers finds a tensor missing or superfluous, or see `choosing`.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model = hold_model(path, getattr(torch, dtype), device)
    found = []
    for tokens, rows in zip(sequences, routes or [()] * len(sequences), strict=True):
        with choosing(model, rows, len(tokens)):
            found.append(token_logprobs(model, tokens, torch.float64, temperature).tolist())
    return found


@torch.inference_mode()
def next_token(
    _: object, path: str, tokens: Sequence[int], device: str = "cpu", temperature: float = 1.0,
    bias: Sequence[tuple[int, float]] = (),
) -> list[float]:  # fmt: skip
    """Log-probability of every token of the vocabulary after these, at least 1, by float32 weights, nats.

    `bias` has tokens and the nats that the request adds to their logits, before the temperature divides them.
    """
    model = hold_model(path, torch.float32, device)
    logits = model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0, -1].double()
    for token, nats in bias:
        logits[token] += nats
    return torch.log_softmax(logits / temperature, dim=-1).tolist()


@torch.inference_mode()
def end_probabilities(
    _: object, path: str, sequences: Sequence[Sequence[int]], ends: Sequence[int], dtype: str, temperature: float,
    routes: Sequence[Sequence[Route]] = (),
) -> list[list[float]]:  # fmt: skip
    """Probability that a draw is an end token, after each token of some sequences but its last.

    Args:
        path: see `score`.
        sequences: token ids, each of at least 2.
        ends: the end tokens, whose probabilities are added.
        dtype: see `score`.
        temperature: divisor of the logits, above 0.
        routes: see `score`.

    Returns:
        Per sequence, entry t is p(token t + 1 is an end token | tokens 0..t).
    """
    model, found = hold_model(path, getattr(torch, dtype), "cpu"), []
    for tokens, rows in zip(sequences, routes or [()] * len(sequences), strict=True):
        with choosing(model, rows, len(tokens)):
            logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].double()
        found.append(torch.softmax(logits / temperature, dim=-1)[:, list(ends)].sum(-1).tolist())
    return found


@torch.inference_mode()
def places(
    _: object, path: str, rows: Sequence[Sequence[Any]], shares: Sequence[float], num_earlier: int, device: str = "cpu"
) -> list[list[Any]]:
    """Describe the distribution at each sampled token by float32 weights: a row of `OracleOfPlaces` a token.

    `rows` are [prompt, sampled tokens, temperature above 0]; `num_earlier` is the number of earlier tokens.
    """
    model = hold_model(path, torch.float32, device)
    found: list[list[Any]] = []
    for prompt, tokens, temperature in rows:
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        for at, share in enumerate(torch.softmax(logits / temperature, dim=-1).cpu()):
            likeliest, order = share.sort(descending=True, stable=True)
            reached = likeliest.cumsum(0)
            kept = (torch.searchsorted(reached, torch.tensor(shares, dtype=torch.float64)) + 1).tolist()
            before = [tokens[at - back] if back <= at else None for back in range(1, num_earlier + 1)]
            earlier = [math.nan if token is None else float(share[token]) for token in before]
            rest = [float(likeliest[end:].sum()) for end in kept]
            rank = int((order == tokens[at]).nonzero())
            found.append([rank, kept, rest, earlier, [token == tokens[at] for token in before]])
    return found


@torch.inference_mode()
def shaped_logprobs(
    _: object, path: str, rows: Sequence[Sequence[Any]], slack: float, device: str = "cpu"
) -> list[list[tuple[float, float]]]:
    """Bounds of the log-probabilities of sampled tokens by float32 weights, nats, as their requests shape them.

    They lie apart only where rounding decides whether truncation keeps a token.

    Args:
        path: the checkpoint.
        rows: [prompt, sampled tokens, the request's `Sampling`] each.
        slack: by how much rounding may move the edge of a truncated distribution.
        device: "cpu", or "cuda".
    """
    model = hold_model(path, torch.float32, device)
    found = []
    for prompt, tokens, asked in rows:
        sampling = msgspec.convert(asked, Sampling)
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().cpu()
        row = []
        for at, token in enumerate(tokens):
            most, least = (
                float(shaped(logits[at], prompt, tokens[:at], sampling, by)[token]) for by in (-slack, slack)
            )
            row.append((least, most if math.isfinite(most) else least))
        found.append(row)
    return found


def mixtures_of(model: nn.Module) -> dict[int, nn.Module]:
    """The blocks that hold a router and experts, by global layer index."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "experts") and hasattr(module, "gate") and (layer := _LAYER.search(f".{name}.")):
            found[int(layer[1])] = module
    return found


@contextlib.contextmanager
def choosing(model: Any, rows: Sequence[Route], num_tokens: int) -> Iterator[None]:
    """Within, the choice of each layer's router is what the rows say: of all experts, the best K.

    What else a router chooses, such as groups of experts, it chooses by itself: the choice that counts comes last.
    Layers without rows choose by themselves.

    Raises:
        ContractError: a router does not choose by `torch.topk`, so that its choice cannot be given.
    """
    experts: dict[int, torch.Tensor] = {}
    for position, layer, *chosen in rows:
        first = torch.arange(len(chosen)).repeat(num_tokens, 1)
        experts.setdefault(layer, first)[position] = torch.tensor(chosen)
    blocks, topk = mixtures_of(model), torch.topk
    given: list[tuple[int, torch.Tensor]] = []
    obeyed = set()

    def choose(scores: torch.Tensor, k: int, *rest: Any, **options: Any) -> Any:
        if given and (scores.shape[-1], k) == (given[-1][0], given[-1][1].shape[-1]):
            obeyed.add(id(given[-1][1]))
            return scores.gather(-1, given[-1][1]), given[-1][1]
        return topk(scores, k, *rest, **options)

    with contextlib.ExitStack() as hooks:
        for layer, chosen_TK in experts.items():
            block = blocks[layer]
            entry = (int(block.gate.weight.shape[0]), chosen_TK.to(model.device))
            hooks.callback(block.register_forward_pre_hook(lambda *_, entry=entry: given.append(entry)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: given.pop() and None).remove)
        hooks.callback(setattr, torch, "topk", topk)
        setattr(torch, "topk", choose)  # noqa: B010 - a module's function has no other type
        yield
    if len(obeyed) < len(experts):
        raise ContractError(f"{len(experts) - len(obeyed)} of {len(experts)} routers of transformers took no routes")
