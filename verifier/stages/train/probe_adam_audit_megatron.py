"""Sample of each update on one rank: elements of some of the tensors that the rank's optimizer holds.

They are others in each update, so that every tensor has its turn.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from verifier.core.record import real
from verifier.core.store import Recorder
from verifier.megatron.optimizer_megatron import StepSettings, models_of, owned_masters
from verifier.megatron.written_megatron import Stepped
from verifier.model.provider_megatron import READS_IMAGES, TrainerModel
from verifier.stages.train.probe_adam_elements import Slice, UpdateSample, chosen, greatest_moment, group_of
from verifier.stages.train.probe_gradient_sums_megatron import Places, Sums, UpdateSums
from verifier.stages.train.records import ParameterGroup

STEPPED = 8
"""Tensors of an update, of which the files of a checkpoint are compared with what it left, at most."""


def groups_of(optimizer: Any, *, known: bool) -> list[ParameterGroup]:
    """Groups of parameters of a rank, with the rates of the next step; counted if masters are `known`."""
    found = []
    for part in optimizer.chained_optimizers if known else ():
        if getattr(part, "is_stub_optimizer", False):
            continue
        shapes = models_of(part)
        for group in part.optimizer.param_groups:
            found.append(group_of(group, [shapes[id(item)].ndim for item in group["params"] if id(item) in shapes]))
    return found or [group_of(group, ()) for group in optimizer.param_groups]


class Audits:
    """Audits of one rank's updates.

    Args:
        trainer: of the rank.
        optimizer: of the rank, not of Megatron-FSDP.
        settings: of Adam, as the config asks for them.
        places: what is where in the rank's model, as `gradient_sums_megatron.Sums` takes it; None audits no sums.
        rank: of the trainer.
    """

    def __init__(
        self, trainer: TrainerModel, optimizer: Any, settings: StepSettings, places: Places | None = None,
        rank: int = 0,
    ) -> None:  # fmt: skip
        self._trainer, self._optimizer, self.settings = trainer, optimizer, settings
        self._sums = None if places is None else Sums(trainer, places, rank)
        self.sample: UpdateSample | None = None
        """Sample of the update before, with what it left."""
        self.last = 0
        """Number of its update."""

    def of(self, number: int, name: str) -> Audit:
        """Audit of an update, by its number from 1."""
        owned = sorted(owned_masters(self._trainer, self._optimizer), key=lambda item: item.name)
        sample = UpdateSample(chosen(owned, number))
        audit = Audit(self, sample, number, name, None if self._sums is None else self._sums.of(number))
        if number == 1:
            sample.facts["begun_with"] = real(greatest_moment(owned))
        if not self.last:
            audit.loaded = [Slice(item, 0, item.master.numel()) for item in owned]
        return audit

    def stepped(self, number: int) -> list[Stepped]:
        """Elements of some tensors as an update left them; nothing if it was not the last one that was audited.

        Weights that the passes of the next update gather are among them, as the rank that steps them has them.
        """
        sample = self.sample if number == self.last else None
        if sample is None:
            return []
        parts = zip(*(each.split([item.size for item in sample.slices]) for each in sample.after), strict=True)
        found = []
        for item, (*states, weights) in list(zip(sample.slices, parts, strict=True))[:STEPPED]:
            states.append(weights.to(item.of.model.dtype))  # joined with those of other dtypes
            at = item.of.offset + item.begin
            found.append(Stepped(chunk=item.of.chunk, local=item.of.local, begin=at, states=states))
        return found if self._sums is None else [*found, *self._sums.own_weights(number + 1)]

    def left_ungathered(self, number: int) -> contextlib.AbstractContextManager[None]:
        """See `gradient_sums_megatron.Sums.left_ungathered`; nothing where no sums are audited."""
        return contextlib.nullcontext() if self._sums is None else self._sums.left_ungathered(number)

    def frozen(self) -> tuple[str, ...]:
        """Parameters that are not trained, those that read images aside; in an adapted model, of the adapters."""
        every = [item for chunk in self._trainer.chunks for item in chunk.named_parameters()]
        named = [(name.replace("module.", ""), parameter) for name, parameter in every]
        adapted = {name for name, _ in named if ".adapter." in name}
        trained = adapted or {name for name, _ in named if not name.startswith(READS_IMAGES)}
        return tuple(name for name, parameter in named if name in trained and not parameter.requires_grad)


class Audit:
    """Audit of one update: `begin` before its passes, `gradients` between them and the step, `record` after it."""

    def __init__(
        self, audits: Audits, sample: UpdateSample, number: int, name: str, sums: UpdateSums | None = None
    ) -> None:
        self._audits, self._sample, self._number, self._name, self._sums = audits, sample, number, name, sums
        self.loaded: list[Slice] = []
        """Whole masters, before the first update of this process."""

    @torch.no_grad()
    def begin(self) -> None:
        """Look at what the step begins with."""
        if self._sums is not None:
            self._sums.begin()
        sample, audits = self._sample, self._audits
        if not sample.slices:
            return
        sample.look_back(audits.sample)
        audits.sample = None
        sample.take_gradient()
        found, sizes = sample.gradient.abs(), [item.size for item in sample.slices]
        sample.left = [float(part.max()) for part in found.split(sizes)] if found.any() else [0.0] * len(sizes)

    @torch.no_grad()
    def gradients(self) -> None:
        """Keep what the update begins with."""
        if self._sums is not None:
            self._sums.end()
        sample = self._sample
        if not sample.slices:
            return
        sample.begin()
        sample.facts["strays"] = tuple(item.of.name for item in self.loaded or sample.slices if item.is_stray())
        sample.take_gradient()

    @torch.no_grad()
    def record(self, probe: Recorder, version: int, norm: float, coordinate: str) -> None:
        """Record what the update left, beside what it began with; the optimizer clipped by `norm`."""
        if self._sums is not None:
            self._sums.record(probe, self._name, version, coordinate)
        sample, audits = self._sample, self._audits
        if not sample.slices:
            return
        sample.end()
        audits.sample, audits.last = sample, self._number
        settings = audits.settings
        record, arrays = sample.record(
            [self._number] * len(sample.slices), name=self._name, version=version, coordinate=coordinate,
            clip_grad=settings.clip_grad, grad_norm=real(norm), beta_1=settings.beta_1, beta_2=settings.beta_2,
            epsilon=settings.epsilon, frozen=audits.frozen(),
        )  # fmt: skip
        probe.emit(record, arrays)
