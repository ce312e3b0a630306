"""The oracle of a training step: transformers' own gradients, and Adam in float64 from the trainer's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verifier.engine.model_hf import checkpoint_places, load_model
from verifier.model.checkpoint import open_checkpoint

Batch = Sequence[tuple[Sequence[int], Sequence[bool]]]
BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8


def judge_steps(
    _: object, source: str, work: str, batches: Sequence[Batch], learning_rate: float, clip: float
) -> list[dict[str, Any]]:
    """Measure every step of a run against the oracle; a request of an engine host.

    Args:
        source: checkpoint of version 0.
        work: folder with ``gradients-v`` and ``live-v`` for each version v.
        batches: token ids of each step, and for each token whether it is in the loss.
        learning_rate: of every step.
        clip: greatest L2 norm of the gradient.

    Returns:
        One record per (version, tensor): "gradient_gap", greatest |trainer - transformers|, "gradient_scale", greatest
        |transformers|; "gradient_norm", L2 norm of all the trainer's gradients of that version; "step_gap", greatest
        |live - Adam| in units of the learning rate.
    """
    records = []
    before, moments = Path(source), {}
    for version, batch in enumerate(batches, start=1):
        found, live = Path(work) / f"gradients-{version}", Path(work) / f"live-{version}"
        if not found.is_dir() or not live.is_dir():
            break
        expected = dict(gradients(before, batch))
        actual = _tensors(found)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in actual.values()))
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        old, new = _tensors(before), _tensors(live)
        for name, gradient in expected.items():
            row: dict[str, Any] = {"version": version, "name": name, "gradient_norm": norm}
            row["gradient_scale"] = float(gradient.abs().max())
            if name in actual:
                row["gradient_gap"] = float((actual[name].double() - gradient.double()).abs().max())
                stepped = _adam(old[name], actual[name].double() * scale, moments, name, version, learning_rate)
                row["step_gap"] = float((new[name].double() - stepped).abs().max()) / learning_rate
            records.append(row)
        before = live
    return records


def gradients(checkpoint: Path, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradient of the mean token loss by transformers in float32, one sequence at a time, by checkpoint name."""
    model = load_model(checkpoint, torch.float32).requires_grad_(True)
    num_tokens = sum(sum(mask) for _, mask in batch)
    for tokens, mask in batch:
        ids = torch.tensor([list(tokens)])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        nats = torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:], reduction="none")
        (nats[torch.tensor(mask[1:])].sum() / num_tokens).backward()
    buffers = {name for name, _ in model.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for name, (holder, tensor) in checkpoint_places(model).items():
        if holder not in buffers:
            yield name, tensor


def _adam(
    old: torch.Tensor, gradient: torch.Tensor, moments: dict[str, Any], name: str, step: int, learning_rate: float
) -> torch.Tensor:
    """One step of Adam without weight decay, in float64 (Kingma and Ba 2015, algorithm 1)."""
    first, second = moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
    first = BETA_1 * first + (1 - BETA_1) * gradient
    second = BETA_2 * second + (1 - BETA_2) * gradient.square()
    moments[name] = (first, second)
    denominator = (second / (1 - BETA_2**step)).sqrt() + EPSILON
    return old.double() - learning_rate * (first / (1 - BETA_1**step)) / denominator


def _tensors(path: Path) -> Mapping[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names()}
