"""The independent oracle of logprobs: transformers, float32 weights, float64 log-softmax, one sequence at a time.

On a GPU float32 means float32: no TF32, and of state-space layers transformers' own operations, not the kernels that
the trainer and the engine call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from verifier.engine.api import Sampling
from verifier.engine.shaping import shaped
from verifier.model.transformers_hf import hold_model, token_logprobs


def score(
    _: object, path: str, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu", temperature: float = 1.0
) -> list[list[float]]:
    """Teacher-forced log-probabilities, nats; a request of an engine server.

    Args:
        path: the checkpoint; its weights are brought to the dtype before anything is computed.
        sequences: token ids, each of at least 2.
        dtype: "float32"; "bfloat16" to measure what that dtype alone costs, "float64" what "float32" does.
        device: "cpu", or "cuda".
        temperature: divisor of the logits; 0 as `token_logprobs` has it.

    Returns:
        Per sequence, entry t is log p(token t + 1 | tokens 0..t).

    Raises:
        ContractError: transformers finds a tensor missing or superfluous.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model = hold_model(path, getattr(torch, dtype), device)
    return [token_logprobs(model, tokens, torch.float64, temperature).tolist() for tokens in sequences]


@torch.inference_mode()
def next_token(
    _: object, path: str, tokens: Sequence[int], device: str = "cpu", temperature: float = 1.0
) -> list[float]:
    """Log-probability of every token of the vocabulary after these, nats; a request of an engine server.

    Args:
        path: the checkpoint; its weights are brought to float32.
        tokens: token ids, at least 1.
        device: "cpu", or "cuda".
        temperature: divisor of the logits.
    """
    model = hold_model(path, torch.float32, device)
    logits = model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1).tolist()


@torch.inference_mode()
def shaped_logprobs(
    _: object, path: str, rows: Sequence[Sequence[Any]], slack: float, device: str = "cpu"
) -> list[list[tuple[float, float]]]:
    """Bounds of the log-probabilities of sampled tokens, nats, as their requests shape them; a server's request.

    They lie apart only where rounding decides whether truncation keeps a token.

    Args:
        path: the checkpoint; its weights are brought to float32.
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
