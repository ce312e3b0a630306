"""Elements of an optimizer around a step by Adam; torch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from verifier.core.record import real
from verifier.stages.train.records import AdamSample, ParameterGroup, SampledMaster

TENSORS = 16
"""Tensors of an update's sample, at most."""
ELEMENTS = 64
"""Elements of each, at most: with 16 tensors 32 KiB of arrays in a trace."""


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

    @property
    def group(self) -> Mapping[str, Any]:
        """Its group of the optimizer's parameters, with their learning rate and weight decay."""

    def moments(self) -> Mapping[str, torch.Tensor]:
        """Adam's state, empty before the first step."""


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


@dataclass(slots=True)
class UpdateSample:
    """Elements of one update: what it begins with, its gradient, and what it leaves."""

    slices: list[Slice]
    gradient: torch.Tensor = field(init=False)
    """Gradient of all slices one after another, when it was last taken."""
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    """Learning rate and weight decay of each slice."""
    left: list[float] = field(default_factory=list)
    """Greatest magnitude of each slice's gradient before the first pass; empty where nobody looked."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the record that are known before the update."""

    def take_gradient(self) -> None:
        """Keep the gradient as it is now."""
        self.gradient = torch.cat([item.gradient() for item in self.slices])

    def look_back(self, last: UpdateSample | None) -> None:
        """Look at what the update before left."""
        if last is not None:
            self.facts |= {"remembered": len(last.slices), "moved": tuple(last.moved())}

    def moved(self) -> list[str]:
        """Names of tensors with other masters, moments or weights than the update left."""
        sizes, sides = [item.size for item in self.slices], zip(self._states(), self.after, strict=True)
        others = {
            item.of.name
            for now, then in sides
            if not torch.equal(now, then)
            for item, *own in zip(self.slices, now.split(sizes), then.split(sizes), strict=True)
            if not torch.equal(*own)
        }
        return [item.of.name for item in self.slices if item.of.name in others]

    def _states(self) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in zip(*(item.state() for item in self.slices), strict=True)]

    def begin(self) -> None:
        """Keep what the update begins with."""
        self.before = self._states()
        self.rates = [(float(item.of.group["lr"]), float(item.of.group["weight_decay"])) for item in self.slices]

    def end(self) -> None:
        """Keep what the update leaves."""
        self.after = self._states()

    def record(self, steps: Sequence[int], **fields: Any) -> tuple[AdamSample, dict[str, torch.Tensor]]:
        """Record of the update, and its arrays.

        Args:
            steps: number of the step that each slice's bias is corrected by.
            fields: of the record, but for those of the sample itself.
        """
        tensors = tuple(
            SampledMaster(
                name=item.of.name,
                begin=item.of.offset + item.begin,
                elements=item.size,
                dtype="bfloat16" if item.of.model.dtype == torch.bfloat16 else "float32",
                learning_rate=real(rate),
                weight_decay=real(decay),
                step=step,
                left=real(self.left[at]) if self.left else None,
            )
            for at, (item, (rate, decay), step) in enumerate(zip(self.slices, self.rates, steps, strict=True))
        )
        was = dict(zip(("master_before", "exp_avg_before", "exp_avg_sq_before"), self.before, strict=False))
        now = dict(zip(("master", "exp_avg", "exp_avg_sq", "weight"), self.after, strict=True))
        return AdamSample(tensors=tensors, **self.facts, **fields), {**was, "gradient": self.gradient, **now}


def greatest_moment(owned: Sequence[Held]) -> float:
    """Greatest element of either moment of any master, 0 where Adam has made none yet."""
    moments = [state.get(name) for state in (item.moments() for item in owned) for name in ("exp_avg", "exp_avg_sq")]
    found = [item.detach().abs().max().float() for item in moments if item is not None]
    return float(torch.stack([item.to(found[0].device) for item in found]).max()) if found else 0.0


def group_of(group: Mapping[str, Any], dims: Sequence[int]) -> ParameterGroup:
    """A group of an optimizer's parameters, of which these dimensions are known, with its rates as they are."""
    rate, decay = (real(float(group.get(key, 0.0))) for key in ("lr", "weight_decay"))
    vectors = sum(each == 1 for each in dims)
    return ParameterGroup(learning_rate=rate, weight_decay=decay, vectors=vectors, others=len(dims) - vectors)
