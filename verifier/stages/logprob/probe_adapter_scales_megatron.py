"""Probe of what adapters do in an update: what their first matrix is given, and the factor of their second's output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verifier.core.record import Probe, real
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.logprob.records import AdapterScale, AdapterScales


@contextlib.contextmanager
def adapter_scales(probe: Probe, trainer: TrainerModel, name: str, version: int, *, asked: float) -> Iterator[None]:
    """Record by what each adapter of this rank multiplies its second matrix's output, in the body's first pass.

    And how far what its first matrix is given there is from what the adapter is given.
    """
    found: dict[str, AdapterScale] = {}
    before: dict[str, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    altered: dict[str, float] = {}
    at = trainer.mesh.coordinate(dist.get_rank())

    def own_of(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows that this rank goes on with, of those that ranks have gathered."""
        return rows if len(rows) == len(like) else rows.chunk(len(rows) // len(like))[at.tp]

    with contextlib.ExitStack() as stack:
        for number, chunk in enumerate(trainer.chunks):
            for own, module in chunk.named_modules():
                if type(module).__name__ != "ParallelLinearAdapter":
                    continue
                label = f"{own} (chunk {number})"

                def entered(_: object, inputs: Any, label: str = label) -> None:
                    if label not in found:
                        given[label] = inputs[0]

                def first(_: object, inputs: Any, label: str = label) -> None:
                    rows = given.pop(label, inputs[0])
                    if inputs[0] is not rows:
                        altered[label] = float((own_of(inputs[0].detach(), rows) - rows.detach()).abs().max())

                def inner(_: object, __: object, output: Any, label: str = label) -> None:
                    if label not in found:
                        before[label] = output[0].detach()

                def outer(_: object, __: object, output: torch.Tensor, label: str = label) -> None:
                    if label in before:
                        rows = own_of(before.pop(label), output)
                        found[label] = _scale(label, rows, output.detach(), asked, altered.get(label, 0.0))

                stack.callback(module.register_forward_pre_hook(entered).remove)
                stack.callback(module.linear_in.register_forward_pre_hook(first).remove)
                stack.callback(module.linear_out.register_forward_hook(inner).remove)
                stack.callback(module.register_forward_hook(outer).remove)
        yield
    adapters = tuple(found.values())
    probe.emit(AdapterScales(name=name, version=version, coordinate=str(at), asked=asked, adapters=adapters))


def _scale(name: str, rows: torch.Tensor, output: torch.Tensor, asked: float, altered: float) -> AdapterScale:
    inside, outside = rows.double().flatten(), output.double().flatten()
    squares = float(inside @ inside)
    return AdapterScale(
        name=name, scale=real(float(inside @ outside) / squares if squares else asked),
        gap=real(float((outside - asked * inside).abs().max())), greatest=real(asked * float(inside.abs().max())),
        altered=real(altered),
        dtype="bfloat16" if output.dtype is torch.bfloat16 else "float32",
    )  # fmt: skip
