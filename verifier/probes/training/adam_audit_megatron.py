"""Audit of each update on one rank: Adam in float64 on some of the tensors that the rank's optimizer holds.

A few elements of some tensors are kept around the update, others in each, so that every tensor has its turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verifier.core.record import real
from verifier.core.records_trainer import AdamAudit, AuditedTensor, ParameterGroup
from verifier.core.store import Recorder
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.training.gradient_sums_megatron import Places, Sums, UpdateSums
from verifier.train.masters_megatron import Owned, models_of, owned_masters
from verifier.train.optimizer_megatron import StepSettings
from verifier.train.written_megatron import Stepped

TENSORS = 32
"""Tensors that an update is audited on, at most."""
ELEMENTS = 1024
"""Elements of each, at most."""
STEPPED = 8
"""Tensors of an update, of which the files of a checkpoint are compared with what it left, at most."""
ROUNDINGS = 3
"""Roundings of a weight in float32 in a step of Adam: 1 - rate * decay, which is near 1, the decay, and the move."""
MOMENT_ROUNDINGS = 16
"""Roundings of a moment in float32: of the clip factor, the product with it, its square, both terms and their sum."""
LEAST = 2.0**-126
"""Least normal number of float32: what is below it may be lost."""
CLIP_EPSILON = 1e-6
"""Number that is added to the norm of the gradient, which clips (torch.nn.utils.clip_grad_norm_)."""


def groups_of(optimizer: Any, *, known: bool) -> list[ParameterGroup]:
    """Groups of parameters of a rank, with the rates of the next step; counted if masters are `known`."""
    found = []
    for part in optimizer.chained_optimizers if known else ():
        if getattr(part, "is_stub_optimizer", False):
            continue
        shapes = models_of(part)
        for group in part.optimizer.param_groups:
            flat = [shapes[id(item)].ndim == 1 for item in group["params"] if id(item) in shapes]
            vectors = sum(flat)
            found.append(
                ParameterGroup(
                    learning_rate=real(group["lr"]), weight_decay=real(group["weight_decay"]), vectors=vectors,
                    others=len(flat) - vectors,
                )
            )  # fmt: skip
    if found:
        return found
    groups = optimizer.param_groups
    return [
        ParameterGroup(
            learning_rate=real(item["lr"]), weight_decay=real(item["weight_decay"]), vectors=0, others=0
        )
        for item in groups
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some elements of a part."""

    of: Owned
    begin: int
    size: int

    def _cut(self, flat: torch.Tensor, shift: int = 0) -> torch.Tensor:
        return flat.detach().view(-1)[shift + self.begin : shift + self.begin + self.size]

    def state(self) -> list[torch.Tensor]:
        """Master, both moments, and weight, on the weight's device."""
        moments, device = self.of.moments(), self.of.model.device
        zero = torch.zeros(self.size, device=device)
        pair = [self._cut(moments[name]) if name in moments else zero for name in ("exp_avg", "exp_avg_sq")]
        return [self._cut(self.of.master).to(device), *(item.to(device) for item in pair), self.weight()]

    def weight(self) -> torch.Tensor:
        """Weight as the passes have it."""
        return self._cut(self.of.model, self.of.offset)

    def is_stray(self) -> bool:
        """Tell whether weights are not the masters, rounded to the weights' dtype."""
        weight = self.weight()
        return not torch.equal(self._cut(self.of.master).to(weight.device, weight.dtype), weight)

    def gradient(self) -> torch.Tensor:
        """Gradient as it is in the model's buffer."""
        return self._cut(self.of.model.main_grad, self.of.offset)  # type: ignore[attr-defined]


def _states(slices: list[_Slice]) -> list[torch.Tensor]:
    """Masters, both moments, and weights of all slices, copied one after another."""
    return [torch.cat(parts) for parts in zip(*(item.state() for item in slices), strict=True)]


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
        self.left: tuple[list[_Slice], list[torch.Tensor]] = ([], [])
        """Slices of the audit before, and what its update left of them."""
        self.last = 0
        """Number of its update."""

    def of(self, number: int, name: str) -> Audit:
        """Audit of an update.

        Args:
            number: of the optimizer step, from 1.
            name: of the update, as its records have it.
        """
        owned = sorted(owned_masters(self._trainer, self._optimizer), key=lambda item: item.name)
        count = min(TENSORS, len(owned))
        chosen = []
        for turn in range((number - 1) * count, number * count):
            item, round_ = owned[turn % len(owned)], turn // len(owned)
            num_slices = -(-item.master.numel() // ELEMENTS)
            begin = round_ % num_slices * ELEMENTS
            chosen.append(_Slice(item, begin, min(ELEMENTS, item.master.numel() - begin)))
        audit = Audit(self, chosen, number, name, None if self._sums is None else self._sums.of(number))
        if number == 1:
            audit.begun_with = greatest_moment(owned)
        if not self.last:
            audit.loaded = [_Slice(item, 0, item.master.numel()) for item in owned]
        return audit

    def stepped(self, number: int) -> list[Stepped]:
        """Elements of some tensors as an update left them; nothing if it was not the last one that was audited.

        Weights that the passes of the next update gather are among them, as the rank that steps them has them.
        """
        slices, states = self.left if number == self.last else ([], [])
        if not slices:
            return []
        parts = zip(*(each.split([item.size for item in slices]) for each in states), strict=True)
        found = [
            Stepped(chunk=item.of.chunk, local=item.of.local, begin=item.of.offset + item.begin, states=values)
            for item, values in list(zip(slices, parts, strict=True))[:STEPPED]
        ]
        return found if self._sums is None else [*found, *self._sums.own_weights(number + 1)]

    def left_ungathered(self, number: int) -> contextlib.AbstractContextManager[None]:
        """See `gradient_sums_megatron.Sums.left_ungathered`; nothing where no sums are audited."""
        return contextlib.nullcontext() if self._sums is None else self._sums.left_ungathered(number)

    def frozen(self) -> tuple[str, ...]:
        """Parameters that are not trained; in an adapted model, of the adapters."""
        named = [item for chunk in self._trainer.chunks for item in chunk.named_parameters()]
        adapted = {name for name, _ in named if ".adapter." in name}
        trained = adapted or {name for name, _ in named}
        return tuple(
            name.replace("module.", "") for name, parameter in named if name in trained and not parameter.requires_grad
        )


def greatest_moment(owned: Sequence[Owned]) -> float:
    """Greatest element of either moment of any master, 0 where Adam has made none yet."""
    moments = [state.get(name) for state in (item.moments() for item in owned) for name in ("exp_avg", "exp_avg_sq")]
    found = [item.detach().abs().max().float() for item in moments if item is not None]
    return float(torch.stack([item.to(found[0].device) for item in found]).max()) if found else 0.0


class Audit:
    """Audit of one update: `begin` before its passes, `gradients` between them and the step, `record` after it."""

    def __init__(
        self, audits: Audits, slices: list[_Slice], number: int, name: str, sums: UpdateSums | None = None
    ) -> None:
        self._audits, self._slices, self._number, self._name, self._sums = audits, slices, number, name, sums
        self.begun_with: float | None = None
        """See `AdamAudit`."""
        self.loaded: list[_Slice] = []
        """Whole masters, before the first update of this process."""
        self._left: list[float] = []
        self._moved: list[str] = []
        self._strays: list[str] = []
        self._remembered = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Look at what the step begins with."""
        if self._sums is not None:
            self._sums.begin()
        if not self._slices:
            return
        (remembered, before), self._audits.left = self._audits.left, ([], [])
        self._remembered = len(remembered)
        now = _states(remembered) if remembered else []
        if not all(map(torch.equal, now, before)):
            sizes = [item.size for item in remembered]
            parts = zip(*(each.split(sizes) for each in now), *(each.split(sizes) for each in before), strict=True)
            self._moved = [
                item.of.name for item, (*ours, a, b, c, d) in zip(remembered, parts, strict=True)
                if not all(map(torch.equal, ours, (a, b, c, d)))
            ]  # fmt: skip
        found = torch.cat([item.gradient() for item in self._slices]).abs()
        sizes = [item.size for item in self._slices]
        self._left = [float(part.max()) for part in found.split(sizes)] if found.any() else [0.0] * len(sizes)

    @torch.no_grad()
    def gradients(self) -> None:
        """Keep what the update begins with."""
        if self._sums is not None:
            self._sums.end()
        if not self._slices:
            return
        self._before = _states(self._slices)
        self._strays = [item.of.name for item in self.loaded or self._slices if item.is_stray()]
        self._gradient = torch.cat([item.gradient() for item in self._slices])
        self._rates = [(float(item.of.group["lr"]), float(item.of.group["weight_decay"])) for item in self._slices]

    @torch.no_grad()
    def record(self, probe: Recorder, version: int, norm: float, coordinate: str) -> None:
        """Compare what the update left with the formula.

        Args:
            probe: of the rank.
            version: of the weights.
            norm: of all gradients, by which the optimizer clipped.
            coordinate: of the rank.
        """
        if self._sums is not None:
            self._sums.record(probe, self._name, version, coordinate)
        if not self._slices:
            return
        after = _states(self._slices)
        self._audits.left, self._audits.last = (self._slices, after), self._number
        settings = self._audits.settings
        clip = settings.clip_grad
        factor = min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
        sizes = torch.tensor([item.size for item in self._slices])
        rate, decay = (torch.tensor(each).double().repeat_interleave(sizes) for each in zip(*self._rates, strict=True))
        before = [each.cpu().double() for each in self._before]
        gradient = self._gradient.cpu().double() * factor
        masters, *moments, weights = (each.cpu().double() for each in after)
        formula = [
            _moment(before[1], gradient, settings.beta_1), _moment(before[2], gradient.square(), settings.beta_2)
        ]  # fmt: skip
        stepped = _stepped(before, formula, self._number, rate, decay, settings)
        rounding = ROUNDINGS * _half_step(torch.maximum(masters.abs(), stepped.abs()))
        excess = ((masters - stepped).abs() - rounding).clamp(min=0)
        gaps = torch.where(excess == 0, 0.0, excess / rate).split(sizes.tolist())
        apart = [item.apart(actual) for item, actual in zip(formula, moments, strict=True)]
        far = torch.maximum(*apart).split(sizes.tolist())
        kept = zip(masters.split(sizes.tolist()), weights.split(sizes.tolist()), strict=True)
        tensors = [
            AuditedTensor(
                name=item.of.name, begin=item.of.offset + item.begin, elements=item.size, gap=real(float(gap.max())),
                copied=torch.equal(master.to(item.of.model.dtype).double(), weight), left=real(there),
                moments=real(float(moment.max())),
            )
            for item, gap, moment, (master, weight), there in zip(
                self._slices, gaps, far, kept, self._left, strict=True
            )
        ]  # fmt: skip
        probe.emit(
            AdamAudit(
                name=self._name, version=version, coordinate=coordinate, tensors=tuple(tensors),
                remembered=self._remembered, moved=tuple(self._moved), frozen=self._audits.frozen(),
                strays=tuple(self._strays),
                begun_with=None if self.begun_with is None else real(self.begun_with),
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment after an update by Adam's formula, float64."""

    value: torch.Tensor
    rounding: torch.Tensor
    """Greatest change by float32, that of the decay included, which moves what is left of 1 by as much."""

    def apart(self, actual: torch.Tensor) -> torch.Tensor:
        """Distance of what the optimizer holds, in what float32 may round it by."""
        return (actual - self.value).abs() / self.rounding


def _moment(before: torch.Tensor, given: torch.Tensor, beta: float) -> _Moment:
    kept, new = beta * before, (1 - beta) * given
    rounding = MOMENT_ROUNDINGS * (kept.abs() + new.abs()) + given.abs()
    return _Moment(kept + new, torch.finfo(torch.float32).eps / 2 * rounding + LEAST)


def _stepped(
    before: list[torch.Tensor], moments: list[_Moment], step: int, rate: torch.Tensor, decay: torch.Tensor,
    settings: StepSettings,
) -> torch.Tensor:  # fmt: skip
    """Masters moved by Adam (Kingma and Ba 2015, algorithm 1), with decay (Loshchilov and Hutter 2019, algorithm 2)."""
    first, second = (item.value for item in moments)
    denominator = (second / (1 - settings.beta_2**step)).sqrt() + settings.epsilon
    return (1 - rate * decay) * before[0] - rate * (first / (1 - settings.beta_1**step)) / denominator


def _half_step(magnitude: torch.Tensor) -> torch.Tensor:
    """Half the distance between float32 neighbours at these magnitudes."""
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, torch.finfo(torch.float32).eps / 4), exponent)
