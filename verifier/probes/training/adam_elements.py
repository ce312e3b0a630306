"""Elements of an optimizer around a step, beside Adam in float64; torch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from verifier.core.record import real
from verifier.core.records_trainer import AuditedTensor

TENSORS = 32
"""Tensors that an update is audited on, at most."""
ELEMENTS = 1024
"""Elements of each, at most."""
ROUNDINGS = 3
"""Roundings of a weight in float32 in a step of Adam: 1 - rate * decay, which is near 1, the decay, and the move."""
MOMENT_ROUNDINGS = 16
"""Roundings of a moment in float32: of the clip factor, the product with it, its square, both terms and their sum."""
LEAST = 2.0**-126
"""Least normal number of float32: what is below it may be lost."""
CLIP_EPSILON = 1e-6
"""Number that is added to the norm of the gradient, which clips (torch.nn.utils.clip_grad_norm_)."""


class Held(Protocol):
    """Part of a parameter that an optimizer updates."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def model(self) -> torch.Tensor:
        """Parameter as passes use it."""

    @property
    def master(self) -> torch.Tensor:
        """Master that the optimizer moves; the parameter itself where it has no other."""

    @property
    def offset(self) -> int:
        """Index of the master's first element in the flattened parameter."""

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient of the whole parameter."""

    def moments(self) -> Mapping[str, torch.Tensor]:
        """Adam's state, empty before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Adam's settings in one step."""

    beta_1: float
    beta_2: float
    epsilon: float
    decoupled: bool = True
    """The decay is no part of the gradient."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some elements of a part."""

    of: Held
    begin: int
    size: int

    def _cut(self, flat: torch.Tensor, shift: int = 0) -> torch.Tensor:
        return flat.detach().reshape(-1)[shift + self.begin : shift + self.begin + self.size]

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
        """Gradient as it is now."""
        return self._cut(self.of.gradient, self.of.offset)


def chosen(owned: Sequence[Held], number: int) -> list[Slice]:
    """Elements of an update, from 1, others in each so that every tensor has its turn."""
    count, found = min(TENSORS, len(owned)), []
    for turn in range((number - 1) * count, number * count):
        item, round_ = owned[turn % len(owned)], turn // len(owned)
        num_slices = -(-item.master.numel() // ELEMENTS)
        begin = round_ % num_slices * ELEMENTS
        found.append(Slice(item, begin, min(ELEMENTS, item.master.numel() - begin)))
    return found


def states(slices: Sequence[Slice]) -> list[torch.Tensor]:
    """Masters, both moments, and weights of all slices, copied one after another."""
    return [torch.cat(parts) for parts in zip(*(item.state() for item in slices), strict=True)]


def moved(slices: Sequence[Slice], before: Sequence[torch.Tensor]) -> list[str]:
    """Names of what has other masters, moments or weights than before."""
    now = states(slices) if slices else []
    if all(map(torch.equal, now, before)):
        return []
    sizes = [item.size for item in slices]
    parts = zip(*(each.split(sizes) for each in now), *(each.split(sizes) for each in before), strict=True)
    return [
        item.of.name
        for item, (*ours, a, b, c, d) in zip(slices, parts, strict=True)
        if not all(map(torch.equal, ours, (a, b, c, d)))
    ]


def clip_factor(clip: float, norm: float) -> float:
    """Factor of gradients that are clipped to a greatest norm; 0 does not clip."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0


def audited(
    slices: Sequence[Slice],
    before: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    after: Sequence[torch.Tensor],
    rates: Sequence[tuple[float, float]],
    steps: Sequence[int],
    rule: Rule,
    left: Sequence[float | None],
) -> tuple[AuditedTensor, ...]:
    """Compare what an update left with the formula.

    Args:
        slices: elements of the update.
        before: their states before it, see `states`.
        gradient: of all elements, one after another, as it was clipped.
        after: their states after it.
        rates: learning rate and weight decay of each slice.
        steps: number of the step that each slice's bias is corrected by.
        rule: of Adam.
        left: see `AuditedTensor`.
    """
    sizes = torch.tensor([item.size for item in slices])
    cut = sizes.tolist()
    rate, decay = (torch.tensor(each).double().repeat_interleave(sizes) for each in zip(*rates, strict=True))
    step = torch.tensor(list(steps)).double().repeat_interleave(sizes)
    was = [each.cpu().double() for each in before]
    given = gradient.cpu().double()
    if not rule.decoupled:
        given, decay = given + decay * was[0], torch.zeros_like(decay)
    masters, *moments, weights = (each.cpu().double() for each in after)
    formula = [_moment(was[1], given, rule.beta_1), _moment(was[2], given.square(), rule.beta_2)]
    stepped = _stepped(was, formula, step, rate, decay, rule)
    rounding = ROUNDINGS * _half_step(torch.maximum(masters.abs(), stepped.abs()))
    excess = ((masters - stepped).abs() - rounding).clamp(min=0)
    gaps = torch.where(excess == 0, 0.0, excess / rate).split(cut)
    apart = [item.apart(actual) for item, actual in zip(formula, moments, strict=True)]
    far = torch.maximum(*apart).split(cut)
    kept = zip(masters.split(cut), weights.split(cut), strict=True)
    return tuple(
        AuditedTensor(
            name=item.of.name,
            begin=item.of.offset + item.begin,
            elements=item.size,
            gap=real(float(gap.max())),
            copied=torch.equal(master.to(item.of.model.dtype).double(), weight),
            left=None if there is None else real(there),
            moments=real(float(moment.max())),
        )
        for item, gap, moment, (master, weight), there in zip(slices, gaps, far, kept, left, strict=True)
    )


def greatest_moment(owned: Sequence[Held]) -> float:
    """Greatest element of either moment of any master, 0 where Adam has made none yet."""
    moments = [state.get(name) for state in (item.moments() for item in owned) for name in ("exp_avg", "exp_avg_sq")]
    found = [item.detach().abs().max().float() for item in moments if item is not None]
    return float(torch.stack([item.to(found[0].device) for item in found]).max()) if found else 0.0


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
    before: Sequence[torch.Tensor],
    moments: Sequence[_Moment],
    step: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Masters moved by Adam (Kingma and Ba 2015, algorithm 1), with decay (Loshchilov and Hutter 2019, algorithm 2)."""
    first, second = (item.value for item in moments)
    denominator = (second / (1 - rule.beta_2**step)).sqrt() + rule.epsilon
    return (1 - rate * decay) * before[0] - rate * (first / (1 - rule.beta_1**step)) / denominator


def _half_step(magnitude: torch.Tensor) -> torch.Tensor:
    """Half the distance between float32 neighbours at these magnitudes."""
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, torch.finfo(torch.float32).eps / 4), exponent)
