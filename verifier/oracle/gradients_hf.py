"""Gradients by transformers beside a trainer's, tensor by tensor: no model's gradients are whole in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verifier.core.outputs import full_disk_refused
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import copies_of
from verifier.oracle.oracle import DRAWS
from verifier.oracle.streaming_hf import Take
from verifier.plan.digest import dtype_name
from verifier.stages.logprob.records import ROUNDINGS as FLOAT32_ROUNDINGS
from verifier.stages.loss.records import in_all_layers

ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Device -> elements of a tensor that are computed with at once: 2 MiB in float64, as a core's cache holds, or 128."""
NEAR = 1e-5
"""Share of a tensor's greatest gradient within which the trainer's lies far inside of what LSS001 allows, 3e-5."""
NEAR_ROUNDED = 2
"""Noises of all passes in less than float32 within which a gradient, or the length of one, lies far inside of what
LSS001 allows, 5 and 6."""
FAR = 10
"""Times as far as `NEAR` passes, beyond which no pass after `DRAWS` is made: LSS001 ends a run at once."""
PASSES = 24
"""Most passes that a noise is the greatest of. Where one direction dominates, a right gradient is then beyond half of
what LSS001 allows in float32 with a chance of 2.6e-11, in less with 3.4e-5 (ADR 0109)."""
Greatest = tuple[float, list[int]]
"""A value and the index of its element."""
Distances = dict[str, tuple[float, float]]
"""Checkpoint name -> greatest distance of a gradient's elements from the exact one's, and the sum of their squares."""


def spooled(folder: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Copy of a tensor in a file of a folder, mapped; the file is gone with it.

    Raises:
        UsageError: the disk is full.
    """
    file = folder / "spooled"
    with full_disk_refused(file):
        file.write_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    mapped = torch.from_file(str(file), shared=False, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    file.unlink()
    return mapped


@dataclass(frozen=True, slots=True)
class Beside:
    """The exact gradient of a tensor, and the trainer's beside it, in float64."""

    scale: float
    """Greatest magnitude of an element of the exact one."""
    square: float
    """Sum of the squares of its elements."""
    along: float
    """Sum of the products with the trainer's; 0 where it has none."""
    gap: Greatest | None
    """Greatest distance of the trainer's; None where it has none."""


def beside(
    exact: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], device: str = "cpu"
) -> dict[str, Beside]:
    """Put the trainer's gradients, `actual`, beside exact ones, by checkpoint name; computed on a device."""
    found = {}
    for name, right in exact.items():
        scale = float(torch.stack([part.abs().max() for (part,) in parts_of(right, device=device)]).max())
        along, gap = 0.0, None
        if (own := actual.get(name)) is not None:
            along = sum(
                float((one.double() * other.double()).sum()) for one, other in parts_of(own, right, device=device)
            )
            gap = apart(own, right, device)[0]
        found[name] = Beside(scale, _square(right, device), along, gap)
    return found


def _square(tensor: torch.Tensor, device: str) -> float:
    return sum(float(part.double().square().sum()) for (part,) in parts_of(tensor, device=device))


def parts_of(*tensors: torch.Tensor, device: str = "cpu") -> Iterator[tuple[torch.Tensor, ...]]:
    """The same `ELEMENTS` of tensors of one shape, flat, on a device, one slice after the other."""
    for parts in zip(*(tensor.flatten().split(ELEMENTS[device]) for tensor in tensors), strict=True):
        yield tuple(part.to(device) for part in parts)


def apart(one: torch.Tensor, other: torch.Tensor, device: str = "cpu") -> tuple[Greatest, float]:
    """Greatest distance of two tensors' elements, with its index, and the sum of the squares of all, in float64."""
    found, square = [], 0.0
    for mine, right in parts_of(one, other, device=device):
        gap = mine.double() - right.double()
        found.append(greatest(gap.abs()))
        square += float(gap.square().sum())
    return greatest_of(found, one.shape, device), square


def greatest(gaps: torch.Tensor) -> Greatest:
    """The greatest element, and its index; NaN is greater than any number."""
    at = int(gaps.argmax())
    return float(gaps.flatten()[at]), [int(place) for place in torch.unravel_index(torch.tensor(at), gaps.shape)]


def greatest_of(parts: Sequence[Greatest], shape: torch.Size, device: str = "cpu") -> Greatest:
    """The greatest of the slices of a tensor of a shape that were on a device, see `parts_of`."""
    part = int(torch.tensor([value for value, _ in parts], dtype=torch.float64).argmax())
    at = torch.tensor(part * ELEMENTS[device] + parts[part][1][0])
    return parts[part][0], [int(place) for place in torch.unravel_index(at, shape)]


def distances(
    exact: Mapping[str, torch.Tensor], run: Callable[[Take], Any], device: str = "cpu"
) -> tuple[Distances, Any]:
    """Measure how far a pass's gradients are from the exact ones, each when it comes; and what the pass gives."""
    found = Distances()

    def take(name: str, parts: Sequence[torch.Tensor]) -> None:
        (gap, _), square = apart(parts[0], exact[name], device)
        found[name] = gap, square

    given = run(take)
    return found, given


def clip_of(actual: Mapping[str, torch.Tensor], clip_grad: float, device: str = "cpu") -> tuple[float, float]:
    """Norm of all gradients, and the factor by which they are clipped; a `clip_grad` of 0 clips none."""
    norm = math.sqrt(sum(_square(each, device) for each in actual.values()))
    return norm, min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


def measured(
    old: Mapping[str, torch.Tensor], found: Mapping[str, Beside], groups: Mapping[str, Mapping[str, Any]],
    actual: Mapping[str, torch.Tensor],
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:  # fmt: skip
    """Per tensor the fields of `GradientRecord` that are its own, by `groups_of` too, and the trainer's gradient.

    The gradient is zero where neither side has one, and None where transformers has one and the trainer has not.
    """
    for name, weight in old.items():
        own, reduced = found.get(name), None
        row: dict[str, Any] = {"name": name, "gradient_scale": 0.0 if own is None else own.scale}
        row |= groups.get(group_of(name), {})
        if name in actual or own is None:
            reduced = actual[name] if name in actual else torch.zeros(weight.shape)
            row["gradient_dtype"] = dtype_name(reduced.dtype)
            row["gradient"] = apart(reduced, torch.zeros(()).expand(weight.shape))[0] if own is None else own.gap
        yield row, reduced


def all_near(
    found: Mapping[str, Beside], doubts: Mapping[str, float], roundings: Mapping[str, float] | None = None,
    times: float = 1.0,
) -> bool:  # fmt: skip
    """Say if all of the trainer's gradients lie far inside of what they may be off by, or within some `times` that."""
    for name, own in found.items():
        allowed = NEAR * own.scale + doubts.get(name, 0.0) / 3
        gap = 0.0 if own.gap is None else own.gap[0] / times
        if not gap <= max(allowed, FLOAT32_ROUNDINGS / 3 * (roundings or {}).get(name, 0.0)):  # not of NaN either
            return False
    return True


def rounded_anew(
    found: Mapping[str, Beside], doubts: Mapping[str, float], compute: Callable[[int], Distances]
) -> dict[str, float]:
    """Measure how far float32 rounds gradients, where the trainer's are not `NEAR` those in float64.

    `compute` makes a pass in float32, rounded anew by a draw from 1 on, see `step_hf.rounding_anew`.

    Returns:
        The greatest distance of each in up to `PASSES` passes from the exact one. A pass is made until each of the
        trainer's is near, or within a third of `FLOAT32_ROUNDINGS` times that distance.
    """
    roundings = dict[str, float]()
    for draw in range(1, PASSES + 1):
        near = partial(all_near, found, doubts, roundings)
        if near() or (draw > DRAWS and not near(FAR)):
            break
        for name, (gap, _) in compute(draw).items():
            roundings[name] = max(roundings.get(name, 0.0), gap)
    return roundings


def noise_of(passed: Distances, found: Mapping[str, Beside]) -> float:
    """Greatest distance of a gradient from the exact one, in units of its tensor's greatest element."""
    return max((passed[name][0] / own.scale for name, own in found.items() if own.scale and passed), default=0.0)


def group_of(name: str) -> str:
    """A tensor's own name, or one for all experts' tensors of its kind in its layer: one expert has few tokens."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def groups_of(found: Mapping[str, Beside], passed: Distances) -> dict[str, dict[str, Any]]:
    """Per group of tensors that has a gradient: its name, the length of the trainer's along it, and a pass's noise."""
    sums: dict[str, list[float]] = {}
    for name, own in found.items():
        group = sums.setdefault(group_of(name), [0.0, 0.0, 0.0])
        for at, value in enumerate((own.square, own.along, passed[name][1] if passed else 0.0)):
            group[at] += value
    return {
        group: {"group": group, "group_length": along / square, "group_noise": math.sqrt(off / square)}
        for group, (square, along, off) in sums.items()
        if square
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Noise of gradients in less than float32."""

    noise: float
    """Greatest of all passes, see `noise_of`."""
    groups: Mapping[str, Mapping[str, Any]]
    """See `groups_of`; the noise of each is the greatest of all passes."""
    passes: int = 1

    @classmethod
    def of(cls, found: Mapping[str, Beside], first: Distances, compute: Callable[[int], Distances]) -> Spread:
        """Measure it by one pass, and by up to `PASSES` where the trainer's gradients are not near the exact ones.

        `first` is of a pass in the run's dtype, and empty in float32; `compute` makes others, rounded anew by a draw.
        """
        spread = cls(noise_of(first, found), groups_of(found, first))
        if not first:
            return spread
        for draw in range(1, PASSES):
            if spread.is_near(found) or (draw >= DRAWS and not spread.is_near(found, FAR)):
                break
            again = compute(draw)
            groups = {
                name: max(spread.groups[name], group, key=lambda row: row["group_noise"])
                for name, group in groups_of(found, again).items()
            }
            spread = cls(max(spread.noise, noise_of(again, found)), groups, draw + 1)
        return spread

    def is_near(self, found: Mapping[str, Beside], times: float = 1.0) -> bool:
        """Say if passes show the trainer's gradients to be far inside of what they may be off by, or some `times`."""
        kinds: dict[str, float] = {}
        for name, row in self.groups.items():
            kinds[in_all_layers(name)] = max(kinds.get(in_all_layers(name), 0.0), row["group_noise"])
        own = FLOAT32_ROUNDINGS / 3 if self.passes > 1 else 0.0
        for name, row in self.groups.items():
            if not abs(row["group_length"] - 1) / times <= max(
                NEAR_ROUNDED * kinds[in_all_layers(name)], own * row["group_noise"]
            ):
                return False
        off = {name: (0.0 if each.gap is None else each.gap[0], 0.0) for name, each in found.items()}
        return noise_of(off, found) / times <= NEAR_ROUNDED * self.noise


def tensors_of(path: Path) -> Mapping[str, torch.Tensor]:
    """All tensors of a checkpoint directory, mapped, but for those that repeat others (`copies_of`)."""
    checkpoint = open_checkpoint(path)
    shared = copies_of(checkpoint.config)
    return {name: checkpoint.read(name) for name in checkpoint.names() if name not in shared}
