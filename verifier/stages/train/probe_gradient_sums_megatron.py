"""Gradients of each update on one rank: what its backward passes gave, what its optimizer was given, their squares.

A few elements of some tensors are added up beside the gradient buffer, as each micro-batch's backward pass gives them,
and the weights that the passes used are kept there. Which elements, all ranks that hold the same tensor choose alike.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from verifier.core.record import real
from verifier.core.store import Recorder
from verifier.export.sharding import ParamPlacement
from verifier.megatron.optimizer_megatron import in_norm, owned_parts
from verifier.megatron.written_megatron import Stepped
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.train.probe_gradient_elements import ELEMENTS, TENSORS, WHOLE, Part, cut, sums_record
from verifier.stages.train.probe_gradient_products_megatron import READS_STREAM, Damped, Products, compares_products
from verifier.stages.train.records import GradientProducts

Places = Mapping[tuple[int, str], ParamPlacement]
"""(model chunk, local name of a parameter) -> what is there."""
SHARDED = frozenset({"cp", "dp", "edp"})
"""Mesh axes over which a distributed optimizer shards gradients."""


class Sums:
    """Audits of the gradients that one rank adds up.

    Args:
        trainer: of the rank.
        places: of what it trains; what has no place is not audited.
        rank: of the trainer.
    """

    def __init__(self, trainer: TrainerModel, places: Places, rank: int) -> None:
        self.trainer, self.at = trainer, trainer.mesh.coordinate(rank)
        trained = [
            (parameter, places.get((at, name.replace("module.", ""))))
            for at, chunk in enumerate(trainer.chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        ]
        self.places = {parameter: place for parameter, place in trained if place is not None}
        """Trained parameter -> what is there."""
        self.knows_all = len(self.places) == len(trained)
        """Every trained parameter has a place, so that the norm of all gradients is known."""

    def of(self, number: int) -> UpdateSums:
        """Audit of an update, by its number from 1."""

        def turn(item: tuple[Any, ParamPlacement]) -> tuple[bool, int]:
            # A tied embedding on two stages comes first on both, which have no other tensor in common.
            return not self._is_tied(item[0]), zlib.crc32(f"{number} {item[1].global_name}".encode())

        return UpdateSums(self, number, sorted(self.places.items(), key=turn)[:TENSORS])

    def _is_tied(self, parameter: Any) -> bool:
        return self.trainer.mesh.pp > 1 and getattr(parameter, "shared_embedding", False)

    def copies_of(self, parameter: Any) -> int:
        """Number of ranks that hold the same bits."""
        mesh = self.trainer.mesh
        sizes = {**{axis: getattr(mesh, axis) for axis in ("tp", "cp", "dp", "etp")}, "edp": mesh.expert_dp}
        copies = 2 if self._is_tied(parameter) else 1
        return copies * math.prod(sizes[axis] for axis in self.places[parameter].replicated_over)

    def _gathers_late(self) -> bool:
        options = self.trainer.data_parallel
        overlapped = options is not None and options.fsdp is None and options.overlap_param_gather
        return overlapped and self.trainer.mesh.has_copies

    @torch.no_grad()
    def own_weights(self, number: int) -> Iterator[Stepped]:
        """Weights among an update's elements that this rank has stepped and its passes gather; none if none do."""
        parts = {item: self.part_of(number, item, place) for item, place in self.of(number).chosen}
        for at, chunk in enumerate(self.trainer.chunks if self._gathers_late() else ()):
            names = {parameter: name.replace("module.", "") for name, parameter in chunk.named_parameters()}
            for parameter, offset, own in owned_parts(chunk, sharded=_is_sharded(self.trainer)):
                part = parts.get(parameter)
                begin, end = (0, 0) if part is None else (part.begin, part.begin + part.size)
                begin, end = max(begin, offset), min(end, offset + len(own))
                if begin < end:
                    values = cut(parameter.detach(), begin, end - begin).clone()
                    yield Stepped(chunk=at, local=names[parameter], begin=begin, states=(values,))

    @contextlib.contextmanager
    @torch.no_grad()
    def left_ungathered(self, number: int) -> Iterator[None]:
        """Leave the weights of an update's elements as they are, for its passes to gather, whatever the body gathers.

        A look at all weights gathers those that other ranks have stepped. Passes that do not would go unseen then.
        """
        if not self._gathers_late():
            yield
            return
        parts = [(chosen[0], self.part_of(number, *chosen)) for chosen in self.of(number).chosen]
        kept = [cut(parameter, part.begin, part.size).clone() for parameter, part in parts]
        yield
        for (parameter, part), values in zip(parts, kept, strict=True):
            parameter.view(-1)[part.begin : part.begin + part.size].copy_(values)
        for chunk in self.trainer.chunks:
            chunk.reset_param_sync_dispatch_state()

    def part_of(self, number: int, parameter: Any, place: ParamPlacement) -> Part:
        """Elements of a parameter that an update adds up."""
        turns, key = -(-parameter.numel() // ELEMENTS), zlib.crc32(place.group.encode())
        begin = (number + key) % turns * ELEMENTS
        size = min(ELEMENTS, parameter.numel() - begin)
        # What it costs a step on a GPU has not been measured.
        is_summed = parameter.numel() <= WHOLE and self.trainer.tier == "cpu"
        return Part(
            name=place.global_name, group=place.group, copies=self.copies_of(parameter), numel=parameter.numel(),
            begin=begin, size=size,
            added=torch.zeros(size, dtype=parameter.main_grad.dtype, device=parameter.device),
            whole=torch.zeros(3, dtype=torch.float64, device=parameter.device) if is_summed else None,
        )  # fmt: skip

    def stands_for(self, parameter: Any) -> bool:
        """Tell whether this rank, among those with the same part of a gradient, is the one that counts its squares."""
        sharded = SHARDED if _is_sharded(self.trainer) else frozenset[str]()
        axes = set(self.places[parameter].replicated_over) - sharded
        return not getattr(parameter, "shared", False) and all(getattr(self.at, axis) == 0 for axis in axes)

    @cached_property
    def miscounted(self) -> tuple[str, ...]:
        """Tensors that the norm's marks count on other tensor-parallel ranks than one of each part of them."""
        found = []
        for parameter, place in self.places.items() if self.knows_all else ():
            axes = {"tp", "etp"} & set(place.replicated_over)
            first = not getattr(parameter, "shared", False) and all(getattr(self.at, axis) == 0 for axis in axes)
            found += [place.global_name] if in_norm(parameter) != first else []
        return tuple(found)


@dataclass(slots=True)
class UpdateSums:
    """Audit of one update: `begin` before its passes, `end` between them and the step, `record` after it."""

    sums: Sums
    number: int
    chosen: list[tuple[Any, ParamPlacement]]
    _parts: dict[Any, Part] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _norms: list[torch.Tensor] = field(default_factory=list)
    _products: Products | None = None
    _damped: Damped | None = None

    def begin(self) -> None:
        """Watch the chosen parameters."""
        for parameter, place in self.chosen:
            self._parts[parameter] = part = self.sums.part_of(self.number, parameter, place)
            self._hooks.append(parameter.register_hook(partial(self._given, parameter, part)))
        if self.sums.trainer.tier == "cpu":  # Transformer Engine's fused norms show no output to a hook
            from verifier.platform.cpu_modules import WATCHERS

            places = self.sums.places.items()
            self._damped = Damped([item for item, place in places if READS_STREAM.search(place.global_name)])
            WATCHERS[:] = [self._damped.watch]

    def _given(self, parameter: Any, part: Part, gradient: torch.Tensor) -> None:
        if getattr(parameter, "grad_added_to_main_grad", False):  # a fused kernel has added it, and gives a blank
            self._parts.pop(parameter, None)
        else:
            part.add(gradient)

    @torch.no_grad()
    def end(self) -> None:
        """Keep what the optimizer is given, and the weights that the passes used."""
        for hook in self._hooks:
            hook.remove()
        for item, part in self._parts.items():
            part.used = cut(item.detach(), part.begin, part.size).clone()
        counted = []
        if self._damped is not None:
            from verifier.platform.cpu_modules import WATCHERS

            WATCHERS.clear()
        if compares_products(self.sums.trainer):
            self._products = Products(self.sums.trainer.provider)
        for chunk in self.sums.trainer.chunks:
            for parameter, offset, own in owned_parts(chunk, sharded=_is_sharded(self.sums.trainer)):
                if found := self._parts.get(parameter):
                    found.own(own, offset)
                if self.sums.knows_all and self.sums.stands_for(parameter):
                    counted.append(own)
                    if self._products is not None:
                        self._products.take(self.sums.places[parameter].global_name, parameter, offset, own)
        self._norms = list(torch._foreach_norm(counted, 2, dtype=torch.float64)) if counted else []

    def record(self, probe: Recorder, name: str, version: int, coordinate: str) -> None:
        """Record what was kept."""
        squares = float(torch.stack(self._norms).square().sum()) if self._norms else 0.0
        record, arrays = sums_record(
            list(self._parts.values()), name=name, version=version, coordinate=coordinate,
            squares=real(squares) if self.sums.knows_all else None, miscounted=self.sums.miscounted,
        )  # fmt: skip
        probe.emit(record, arrays)
        if self.sums.knows_all and self._products is not None:
            own, damped = self._products, self._damped
            probe.emit(
                GradientProducts(
                    name=name, version=version, coordinate=coordinate, products=own.found(), bent=own.bent,
                    damped=None if damped is None else real(float(damped.total)), silent=own.silent,
                )
            )  # fmt: skip


def _is_sharded(trainer: TrainerModel) -> bool:
    return trainer.data_parallel is not None and trainer.data_parallel.distributed_optimizer
