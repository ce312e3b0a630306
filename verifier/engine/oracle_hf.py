"""The independent oracle of logprobs: transformers, float32 weights, float64 log-softmax, one sequence at a time.

On a GPU float32 means float32: no TF32, and of state-space layers transformers' own operations, not the kernels that
the trainer and the engine call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from verifier.engine.model_hf import load_model, token_logprobs


def oracle_logprobs(
    path: Path | str,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """Teacher-forced logprobs of a checkpoint directory.

    Args:
        path: the checkpoint.
        sequences: token ids, each of at least 2.
        dtype: the weights are brought to this before anything is computed.
        device: where it is computed.
        temperature: what logits are divided by.

    Returns:
        Per sequence [len - 1] float32, nats.

    Raises:
        ContractError: transformers finds a tensor missing or superfluous.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model = load_model(path, dtype).to(device)
    return [token_logprobs(model, tokens, torch.float64, temperature) for tokens in sequences]


@torch.inference_mode()
def next_token(
    _: object, path: str, tokens: Sequence[int], device: str = "cpu", temperature: float = 1.0
) -> list[float]:
    """Log-probability of every token of the vocabulary after these, nats; a request of an engine host.

    Args:
        path: the checkpoint; its weights are brought to float32.
        tokens: token ids, at least 1.
        device: "cpu", or "cuda".
        temperature: what logits are divided by.
    """
    model = load_model(path, torch.float32).to(device)
    logits = model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1).tolist()


def score(
    _: object, path: str, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu", temperature: float = 1.0
) -> list[list[float]]:
    """`oracle_logprobs` as a request of an engine host: JSON in, JSON out.

    Args:
        path: the checkpoint.
        sequences: token ids, each of at least 2.
        dtype: "float32"; "bfloat16" to measure what that dtype alone costs, "float64" what "float32" does.
        device: "cpu", or "cuda".
        temperature: what logits are divided by.
    """
    return [row.tolist() for row in oracle_logprobs(path, sequences, getattr(torch, dtype), device, temperature)]
