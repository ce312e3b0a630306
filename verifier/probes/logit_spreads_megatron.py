"""Probe of the logits of an update: how much each row's log-probabilities spread, which the entropy's gradient has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.core.records_gradients import LogitSpreads
from verifier.model.provider_megatron import TrainerModel

ELEMENTS = 2**22
"""Logits that are read at once."""


@contextlib.contextmanager
def logit_spreads(
    probe: Probe, trainer: TrainerModel, name: str, version: int, *, temperature: float
) -> Iterator[None]:  # fmt: skip
    """Record the variance of the log-probabilities of every row that this rank's loss reads within the body, an update.

    Ranks of the last pipeline stage compute it, by the logits that their model gives, tensor-parallel ranks together;
    of these the first one records it.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        name: of the update, as its records have it.
        version: of the weights.
        temperature: divisor of the logits.
    """
    found: list[torch.Tensor] = []

    def look(_: object, __: object, output: Any) -> None:
        found.append(_spread(output.detach()[0], temperature, trainer.mesh.tp))

    with contextlib.ExitStack() as stack:
        for chunk in trainer.chunks:
            if _is_last(chunk):
                stack.callback(chunk.register_forward_hook(look).remove)
        yield
    at = trainer.mesh.coordinate(dist.get_rank())
    if found and at.tp == 0:
        record = LogitSpreads(name=name, version=version, coordinate=str(at))
        probe.emit(record, {"spread": torch.cat(found).cpu()})


def _is_last(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(chunk, "post_process"))


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
