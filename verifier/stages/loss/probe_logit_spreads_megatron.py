"""Probe of the logits of an update: how large they are, and how much each row's log-probabilities spread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.loss.records import LogitSpreads

ELEMENTS = 2**22
"""Logits that are read at once."""


@contextlib.contextmanager
def logit_spreads(
    probe: Probe, trainer: TrainerModel, name: str, version: int, *, temperature: float, spread: bool
) -> Iterator[None]:  # fmt: skip
    """Record how large the logits of every row are that this rank's loss reads within the body, an update.

    Ranks of the last pipeline stage compute it, by the logits that their model gives, tensor-parallel ranks together;
    of these the first one records it.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        name: of the update, as its records have it.
        version: of the weights.
        temperature: divisor of the logits.
        spread: the variance of log-probabilities too, which takes an exponential of each logit.
    """
    found: dict[str, list[torch.Tensor]] = {"size": [], **({"spread": []} if spread else {})}

    def look(_: object, __: object, output: Any) -> None:
        logits_TV = output.detach()[0]
        found["size"].append(_size(logits_TV, trainer.mesh.tp) / temperature)
        if spread:
            found["spread"].append(_spread(logits_TV, temperature, trainer.mesh.tp))

    with contextlib.ExitStack() as stack:
        for chunk in trainer.chunks:
            if _is_last(chunk):
                stack.callback(chunk.register_forward_hook(look).remove)
        yield
    at = trainer.mesh.coordinate(dist.get_rank())
    if found["size"] and at.tp == 0:
        record = LogitSpreads(name=name, version=version, coordinate=str(at))
        probe.emit(record, {each: torch.cat(parts).cpu() for each, parts in found.items()})


def _is_last(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(chunk, "post_process"))


def _size(logits_TV: torch.Tensor, tp: int) -> torch.Tensor:
    """[T] greatest magnitude of the logits of a row, float32."""
    size_T = torch.maximum(logits_TV.amax(-1), -logits_TV.amin(-1)).float()
    _reduce(size_T, dist.ReduceOp.MAX, tp)
    return size_T


def _spread(logits_TV: torch.Tensor, temperature: float, tp: int) -> torch.Tensor:
    """[T] variance of the log-probabilities of a row under its own distribution, float64, nats squared."""
    parts = [
        _variance(rows.double() / temperature, tp) for rows in logits_TV.split(max(1, ELEMENTS // logits_TV.shape[1]))
    ]  # fmt: skip
    return torch.cat(parts)


def _variance(scaled_CV: torch.Tensor, tp: int) -> torch.Tensor:
    top_C = scaled_CV.amax(-1)
    _reduce(top_C, dist.ReduceOp.MAX, tp)
    shifted_CV = scaled_CV - top_C[:, None]
    share_CV = shifted_CV.exp()
    sums_2C = torch.stack([share_CV.sum(-1), (share_CV * shifted_CV).sum(-1)])
    _reduce(sums_2C, dist.ReduceOp.SUM, tp)
    squares_C = (share_CV * (shifted_CV - (sums_2C[1] / sums_2C[0])[:, None]).square()).sum(-1)
    _reduce(squares_C, dist.ReduceOp.SUM, tp)
    return squares_C / sums_2C[0]


def _reduce(values: torch.Tensor, how: Any, tp: int) -> None:
    if tp > 1:
        from megatron.core import parallel_state

        dist.all_reduce(values, op=how, group=parallel_state.get_tensor_model_parallel_group())
