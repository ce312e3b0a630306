"""Layouts derived from what a numbered checkpoint becomes on the ranks, for models that no row of `names` describes.

`held_by` reads, on a rank, which elements of the checkpoint its local tensors hold; `derive` puts the ranks together.
That the owners tile each checkpoint tensor, that copies lie along axes of the mesh, and that all ranks of a stage hold
parts of one parameter, is proven without Megatron-Bridge. That the right tensor is in the right parameter is not: an
import that errs alike on all ranks is this layout, and only a forward pass against another library shows it.

A box is a range of one checkpoint tensor along one dim, whole along the others (`verifier.export.sharding`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from verifier.errors import ContractError
from verifier.export.sharding import Box, ParamPlacement, tiling_errors
from verifier.mesh import Coordinate, Mesh
from verifier.model.numbered import Numbering, Numbers, Values

_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")
"""Number of the layer in a parameter's name."""
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
"""Number of the expert in a parameter's name."""
_SOURCE_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_SOURCE_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_DENSE, _SPARSE = ("tp", "cp", "dp"), ("etp", "ep", "edp")
"""Axes over which tensors are cut or copied, of all but routed experts, and of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A local tensor of one rank, and what it holds; JSON there and back by msgspec."""

    chunk: int
    name: str
    is_buffer: bool
    dim: int = 0
    transposed: bool = False
    boxes: tuple[Box, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    why_not: str = ""
    """Why it holds no part of the checkpoint as it is; empty where it does."""

    @property
    def content(self) -> tuple[Any, ...]:
        """Key that is equal for tensors that must hold the same bits."""
        return self.dim, self.transposed, self.boxes, self.scale, self.offset

    @property
    def is_expert(self) -> bool:
        """True for a tensor of a routed expert."""
        return _EXPERT.search(self.name) is not None


def held_by(tensors: Iterable[tuple[int, str, bool, Mapping[str, Values]]], numbering: Numbering) -> list[Held]:
    """Return what the local tensors of a rank hold.

    Args:
        tensors: (chunk, local name, is a buffer, pass -> contents after it).
        numbering: of the checkpoint whose passes were loaded.
    """
    rows = []
    for chunk, name, is_buffer, read in tensors:
        decoded = numbering.decode(read)
        found = None if isinstance(decoded, str) else boxes_of(decoded.numbers, numbering)
        if isinstance(decoded, str) or found is None:
            why = (
                decoded if isinstance(decoded, str) else "its elements are no whole rows or columns of the checkpoint's"
            )
            rows.append(Held(chunk=chunk, name=name, is_buffer=is_buffer, why_not=why))
        else:
            rows.append(
                Held(
                    chunk=chunk, name=name, is_buffer=is_buffer, dim=found.dim, transposed=found.transposed,
                    boxes=found.boxes, scale=decoded.scale, offset=decoded.offset,
                )
            )  # fmt: skip
    return rows


@dataclass(frozen=True, kw_only=True)
class DerivedLayout:
    """Layout of one model on one mesh; made by `derive`, with the interface of `ModelLayout`."""

    mesh: Mesh
    rows: Sequence[Sequence[Sequence[ParamPlacement]]] = field(repr=False)
    """[rank][chunk] placements, in the model's order."""
    tied: bool
    """Two parameters of this mesh hold the same elements, as an output layer and the embedding do."""
    gaps: tuple[str, ...]
    """Parameters, checkpoint tensors and proofs that are lacking, a clause each; empty for a layout that is proven."""

    def offsets(self) -> dict[str, float]:
        """Checkpoint tensor -> what the trainer's weights are its values and this; of those that are not 0."""
        places = (place for chunks in self.rows for chunk in chunks for place in chunk if place.offset)
        return {source: place.offset for place in places for source in place.sources}

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the parameters and checkpointed buffers of one model chunk of a rank, in the model's order.

        Raises:
            ContractError: the layout was derived on another mesh.
        """
        if mesh != self.mesh:
            raise ContractError(f"the layout was derived on {self.mesh.label()}, not on {mesh.label()}")
        return list(self.rows[rank][chunk])

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DerivedLayout:
        """Rebuild a layout that was sent as JSON."""
        return msgspec.convert(record, cls)


def derive(mesh: Mesh, ranks: Sequence[Sequence[Held]], numbering: Numbering) -> DerivedLayout:
    """Put together what all ranks hold, and prove what can be proven without Megatron-Bridge."""
    pieces = [_Piece.of(mesh, rank, held) for rank, rows in enumerate(ranks) for held in rows if not held.why_not]
    pieces = _second_copies_renamed(pieces)
    gaps = [f"`{held.name}` on rank {rank}: {held.why_not}"
            for rank, rows in enumerate(ranks) for held in rows if held.why_not]  # fmt: skip
    gaps += _unlike_stages(mesh, pieces)
    axes, odd = _axes(mesh, pieces)
    gaps += [*odd, *_partly_tied(pieces)]
    labels = _labels(pieces)
    rows: list[list[list[ParamPlacement]]] = [[[] for _ in range(mesh.vpp)] for _ in range(mesh.world_size)]
    owners: dict[str, ParamPlacement] = {}
    for piece in pieces:
        held = piece.held
        place = ParamPlacement(
            param_name=held.name, global_name=piece.name, is_buffer=held.is_buffer, dim=held.dim, boxes=held.boxes,
            source_shapes={box.source: numbering.shapes[box.source] for box in held.boxes},
            group=labels[held.content], replicated_over=axes[piece.name, held.content], transposed=held.transposed,
            scale=held.scale, offset=held.offset,
        )  # fmt: skip
        rows[piece.rank][held.chunk].append(place)
        owners.setdefault(place.group, place)
    gaps += tiling_errors(owners.values()).values()
    landed = {box.source for place in owners.values() for box in place.boxes}
    gaps += (f"`{name}` of the checkpoint is in no parameter" for name in numbering.names if name not in landed)
    names = defaultdict(set)
    for piece in pieces:
        names[piece.held.content].add(piece.name)
    tied = any(len(found) > 1 for found in names.values())
    return DerivedLayout(mesh=mesh, rows=rows, tied=tied, gaps=tuple(gaps))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a parameter that one rank holds, with the parameter's name in the whole model."""

    rank: int
    at: Coordinate
    held: Held
    name: str

    @classmethod
    def of(cls, mesh: Mesh, rank: int, held: Held) -> _Piece:
        at = mesh.coordinate(rank)
        return cls(rank, at, held, _global_name(held, f" (stage {at.pp}, chunk {held.chunk})"))

    @property
    def sources(self) -> list[str]:
        """Checkpoint tensors that it is made of; of an expert, an index is one too."""
        return sorted({box.source + ("" if box.index is None else f"[{box.index}]") for box in self.held.boxes})

    @property
    def place(self) -> tuple[int, int, str]:
        """Stage, chunk and local name; of an expert its place among the stage's experts too."""
        return self.at.pp, self.held.chunk, self.held.name + (f" ep={self.at.ep}" if self.held.is_expert else "")


def _global_name(held: Held, elsewhere: str) -> str:
    """Return a parameter's name with the layer and the expert that the names of its sources have.

    Where they have none, or several, the local name stays, and says where it is.
    """
    layers = {match[1] for box in held.boxes for match in [_SOURCE_LAYER.search(box.source)] if match}
    experts = {match[1] for box in held.boxes for match in [_SOURCE_EXPERT.search(box.source)] if match}
    experts |= {str(box.index) for box in held.boxes if box.index is not None}
    name = held.name
    for pattern, found in ((_EXPERT, experts), (_LAYER, layers)):
        if pattern.search(name) and len(found) != 1:
            return held.name + elsewhere
        name = pattern.sub(next(iter(found), ""), name, count=1)
    return name


def _second_copies_renamed(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Tell apart copies of one parameter outside of layers: the stage of an MTP layer has the embedding once more."""
    homes = {
        (piece.name, piece.held.content): piece.at.pp for piece in reversed(pieces) if not _LAYER.search(piece.name)
    }
    return [
        replace(piece, name=f"{piece.name} (stage {piece.at.pp})")
        if piece.at.pp > homes.get((piece.name, piece.held.content), piece.at.pp)
        else piece
        for piece in pieces
    ]


def _unlike_stages(mesh: Mesh, pieces: Sequence[_Piece]) -> list[str]:
    """Say which parameters are not, on all ranks of their stage, parts of one parameter of the whole model."""
    gaps, stages = [], defaultdict(list)
    for piece in pieces:
        stages[piece.place].append(piece)
    homes: dict[str, tuple[int, int, str]] = {}
    for place, members in stages.items():
        first, everybody = members[0], mesh.dense_size // (mesh.ep if members[0].held.is_expert else 1)
        others = [piece for piece in members if piece.name != first.name]
        if others:
            gaps.append(
                f"`{first.held.name}` holds {_said(first.sources)} on rank {first.rank} and "
                f"{_said(others[0].sources)} on rank {others[0].rank}"
            )
        elif len(members) != everybody:
            gaps.append(f"`{first.held.name}`: {len(members)} of the stage's {everybody} ranks have it ({place[2]})")
        if homes.setdefault(first.name, place) != place:
            gaps.append(f"`{first.name}` is on stage {homes[first.name][0]} and on stage {place[0]}, rank {first.rank}")
    return gaps


def _axes(mesh: Mesh, pieces: Sequence[_Piece]) -> tuple[dict[tuple[str, tuple[Any, ...]], tuple[str, ...]], list[str]]:
    """Return the axes along which copies of each part of each parameter lie, and what lies along none."""
    parts = defaultdict(list)
    for piece in pieces:
        parts[piece.name, piece.held.content].append(piece)
    found, gaps, of_name = {}, [], dict[str, tuple[str, ...]]()
    for (name, content), members in parts.items():
        basis = _SPARSE if members[0].held.is_expert else _DENSE
        along = tuple(axis for axis in basis if len({getattr(piece.at, axis) for piece in members}) > 1)
        fixed = {tuple(getattr(piece.at, axis) for axis in (*basis, "pp") if axis not in along) for piece in members}
        num_copies = 1
        for axis in along:
            num_copies *= mesh.expert_dp if axis == "edp" else getattr(mesh, axis)
        found[name, content] = along
        ranks = sorted(piece.rank for piece in members)
        if len(fixed) != 1 or num_copies != len(ranks):
            gaps.append(f"`{name}`: ranks {ranks} hold the same elements, which is along no axes of the mesh")
        elif of_name.setdefault(name, along) != along:
            gaps.append(f"`{name}`: its parts have copies along {of_name[name]}, that of ranks {ranks} along {along}")
    return found, gaps


def _partly_tied(pieces: Sequence[_Piece]) -> list[str]:
    """Say which parameters have some part in common and not all: an output layer has all of the embedding."""
    contents, names = defaultdict(set), defaultdict(set)
    for piece in pieces:
        contents[piece.name].add(piece.held.content)
        names[piece.held.content].add(piece.name)
    pairs = sorted({(one, other) for found in names.values() for one in found for other in found if one < other})
    return [f"`{one}` and `{other}` have some parts in common and not all"
            for one, other in pairs if contents[one] != contents[other]]  # fmt: skip


def _labels(pieces: Sequence[_Piece]) -> dict[tuple[Any, ...], str]:
    """Return a label for each content: the name of the first parameter that holds it, and which part of it it is."""
    first: dict[tuple[Any, ...], str] = {}
    for piece in pieces:
        first.setdefault(piece.held.content, piece.name)
    counts: dict[str, int] = defaultdict(int)
    labels = {}
    for content, name in first.items():
        labels[content] = f"{name} part {counts[name]}"
        counts[name] += 1
    return labels


def _said(sources: Sequence[str]) -> str:
    return " ".join(f"`{source}`" for source in sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Parts of the checkpoint that a local tensor is made of; the fields are those of `ParamPlacement`."""

    dim: int
    transposed: bool
    boxes: tuple[Box, ...]


def boxes_of(numbers: Numbers, numbering: Numbering) -> Boxes | None:
    """Return the boxes that, one after another along some dim, are these numbers; None where no list of boxes is.

    Of several ways the first: not transposed, and along the lowest dim.
    """
    for transposed in (False, True)[: 1 + (numbers.ndim > 1)]:
        for dim in range(numbers.ndim if numbers.size else 0):
            boxes = _along(dim, transposed, numbers, numbering)
            if boxes is not None:
                return Boxes(dim=dim, transposed=transposed, boxes=boxes)
    return None


def _along(dim: int, transposed: bool, numbers: Numbers, numbering: Numbering) -> tuple[Box, ...] | None:
    """Return the boxes along one dim of the local tensor, each index of which must be one index of one source."""
    firsts = np.moveaxis(numbers, dim, 0).reshape(numbers.shape[dim], -1)[:, 0]
    sources = np.searchsorted(numbering.starts, firsts, side="right") - 1
    at = np.zeros_like(firsts)
    leading = np.full_like(firsts, -1)
    steps = np.zeros((numbers.ndim, len(firsts)), np.int64)
    for source in np.unique(sources):
        whole = numbering.shapes[numbering.names[int(source)]]
        stacked = len(whole) - numbers.ndim
        if stacked not in (0, 1):
            return None
        shape, strides = _laid_out(whole[stacked:], transposed)
        if any(shape[other] != numbers.shape[other] for other in range(numbers.ndim) if other != dim):
            return None
        mine = sources == source
        within = firsts[mine] - numbering.starts[source]
        if stacked:
            leading[mine], within = np.divmod(within, math.prod(shape))
        at[mine], rest = np.divmod(within, strides[dim])
        if np.any(rest) or np.any(at[mine] >= shape[dim]):
            return None
        steps[:, mine] = np.array(strides)[:, None]
    expected = firsts.reshape([-1 if other == dim else 1 for other in range(numbers.ndim)])
    for other in range(numbers.ndim):
        if other != dim:
            ranges = np.arange(numbers.shape[other]).reshape([-1 if d == other else 1 for d in range(numbers.ndim)])
            step = steps[other].reshape([-1 if d == dim else 1 for d in range(numbers.ndim)])
            expected = expected + ranges * step
    if not np.array_equal(expected, numbers):
        return None
    breaks = np.flatnonzero((np.diff(sources) != 0) | (np.diff(leading) != 0) | (np.diff(at) != 1)) + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(firsts)]
    return tuple(
        Box(
            numbering.names[int(sources[begin])], int(at[begin]), int(at[end - 1]) + 1,
            None if leading[begin] < 0 else int(leading[begin]),
        )
        for begin, end in zip(begins, ends, strict=True)
    )  # fmt: skip


def _laid_out(shape: Sequence[int], transposed: bool) -> tuple[list[int], list[int]]:
    """Return shape and strides, in elements, of a contiguous tensor; transposed, of its view with swapped last dims."""
    sizes = list(shape)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if transposed:
        sizes[-2:], strides[-2:] = sizes[:-3:-1], strides[:-3:-1]
    return sizes, strides
