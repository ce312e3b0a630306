"""Axis sizes, the bijection of ranks and coordinates, and the layers of each pipeline chunk. Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from verifier.errors import UsageError
from verifier.knob import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Coordinates of one rank on the dense axes (tp, cp, dp, pp) and on the expert axes (etp, ep, edp)."""

    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    dp: int
    edp: int

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} ep={self.ep} etp={self.etp} cp={self.cp} dp={self.dp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Parallel sizes of a trainer.

    Ranks are laid out as Megatron's default order does: for dense layers tp is fastest, then cp, dp, pp; for expert
    layers etp is fastest, then ep, edp, pp, over the same ranks.

    Raises:
        UsageError: a size below 1, expert axes that do not divide tp * cp * dp, vpp without pp, or a stage size
            without pp.

    Source:
        megatron-core 0.19.2, megatron/core/parallel_state.py, `RankGenerator` with order "tp-cp-ep-dp-pp".
    """

    tp: int = knob("Tensor parallel size; sequence parallel is on above 1.", 1, flag="--tp", least=1)
    pp: int = knob("Pipeline parallel size.", 1, flag="--pp", least=1)
    vpp: int = knob("Virtual stages per pipeline stage.", 1, flag="--vpp", least=1)
    ep: int = knob("Expert parallel size.", 1, flag="--ep", least=1)
    etp: int = knob("Expert tensor parallel size.", 1, flag="--etp", least=1)
    cp: int = knob("Context parallel size.", 1, flag="--cp", least=1)
    dp: int = knob(
        "Data parallel size; by default the smallest for which ep*etp divides tp*cp*dp.",
        1, flag="--dp", least=1, derived=True,
    )  # fmt: skip
    first_stage_layers: int | None = knob(
        "Layers on the first pipeline stage, where uneven.", None, flag="--first-stage-layers"
    )
    last_stage_layers: int | None = knob(
        "Layers on the last pipeline stage, where uneven.", None, flag="--last-stage-layers"
    )

    def __post_init__(self) -> None:
        check(self)
        uneven = self.first_stage_layers is not None or self.last_stage_layers is not None
        if self.dense_size % self.expert_size:
            raise UsageError(
                f"ep * etp = {self.ep} * {self.etp} = {self.expert_size} does not divide tp * cp * dp = "
                f"{self.tp} * {self.cp} * {self.dp} = {self.dense_size}: "
                f"the least --dp that does is {self.smallest_dp(self.tp, self.cp, self.ep, self.etp)}"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp = {self.vpp} needs pp > 1: virtual stages interleave pipeline stages")
        if uneven and self.pp == 1:
            raise UsageError("uneven stages need pp > 1: there is only one pipeline stage")

    @classmethod
    def fitting(cls, *, dp: int | None = None, **sizes: Any) -> Mesh:
        """Make a mesh of the given sizes; without `dp`, of the smallest for which ep * etp divides tp * cp * dp.

        Raises:
            UsageError: a size below 1, or sizes that do not fit together.
        """
        if dp is None:
            least = {axis: max(1, sizes.get(axis, 1)) for axis in ("tp", "cp", "ep", "etp")}
            dp = cls.smallest_dp(**least)
        return cls(dp=dp, **sizes)

    @staticmethod
    def smallest_dp(tp: int, cp: int, ep: int, etp: int) -> int:
        """Return the least dp for which ep * etp divides tp * cp * dp."""
        return ep * etp // math.gcd(ep * etp, tp * cp)

    @property
    def dense_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_size(self) -> int:
        """Number of ranks that together hold every expert of one stage once."""
        return self.ep * self.etp

    @property
    def expert_dp(self) -> int:
        """Number of copies of each expert shard within a stage."""
        return self.dense_size // self.expert_size

    @property
    def has_copies(self) -> bool:
        """True if several ranks hold the same weights for data or context parallelism and share their update."""
        return max(self.dp * self.cp, self.expert_dp) > 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dense_size * self.pp

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of the mesh's {self.world_size} ranks")
        pp, within = divmod(rank, self.dense_size)
        return Coordinate(
            tp=within % self.tp,
            cp=within // self.tp % self.cp,
            dp=within // (self.tp * self.cp),
            pp=pp,
            etp=within % self.etp,
            ep=within // self.etp % self.ep,
            edp=within // self.expert_size,
        )

    @property
    def shorter_ends(self) -> tuple[bool, bool]:
        """True for the first and the last stage if vpp does not divide it: embedding or head stand for a layer."""
        first, last = self.first_stage_layers, self.last_stage_layers
        return first is not None and first % self.vpp > 0, last is not None and last % self.vpp > 0

    def _with_ends(self, sizes: list[int]) -> list[int]:
        """Return sizes of stages, of which embedding and head count as a layer where they stand for one."""
        first, last = self.shorter_ends
        return [sizes[0] + first, *sizes[1:-1], sizes[-1] + last] if self.pp > 1 else sizes

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage, in stage order.

        Raises:
            UsageError: the layers cannot be divided as asked.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        ends = [size for size in (first, last) if size is not None]
        if not ends:
            if num_layers % (self.pp * self.vpp):
                raise UsageError(
                    f"{num_layers} layers do not divide over pp * vpp = {self.pp} * {self.vpp} chunks: "
                    "give --first-stage-layers or --last-stage-layers, or other sizes"
                )
            return [num_layers // self.pp] * self.pp
        middle_stages, middle = self.pp - len(ends), num_layers - sum(ends)
        if middle < 0 or min(ends) < 1:
            raise UsageError(f"first stage {first} and last stage {last} layers do not fit into {num_layers} layers")
        if middle_stages == 0 < middle or (middle_stages and (middle % middle_stages or not middle)):
            raise UsageError(
                f"{middle} layers are left for {middle_stages} pipeline stages after first {first} and last {last} "
                f"of {num_layers}: they must divide evenly"
            )
        sizes = [middle // max(middle_stages, 1)] * self.pp
        sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
        full = self._with_ends(sizes)
        if any(size % self.vpp for size in full) or (any(self.shorter_ends) and len(set(full)) > 1):
            raise UsageError(
                f"stages of {sizes[0]}, {sizes[1]} and {sizes[-1]} layers do not divide into vpp = {self.vpp} chunks "
                "each: vpp must divide each stage, or an end must have one layer less than a stage that it divides"
            )
        return sizes

    def layers_of(self, pp: int, chunk: int, num_layers: int) -> range:
        """Return the global indices of the layers of chunk `chunk` (0 <= chunk < vpp) of stage `pp`."""
        sizes, (first, last) = self._with_ends(self.stage_sizes(num_layers)), self.shorter_ends
        is_first, is_last = pp == chunk == 0, (pp, chunk) == (self.pp - 1, self.vpp - 1)
        begin = (chunk * sum(sizes) + sum(sizes[:pp])) // self.vpp - (first and not is_first)
        return range(begin, begin + sizes[pp] // self.vpp - (first and is_first) - (last and is_last))

    def label(self) -> str:
        """Return the sizes above one in canonical order, such as "tp2 ep2"; "1 rank" if there are none."""
        sizes = [(axis, getattr(self, axis)) for axis in AXES if getattr(self, axis) > 1]
        sizes += [("first", self.first_stage_layers), ("last", self.last_stage_layers)]
        parts = [f"{name}{size}" for name, size in sizes if size is not None]
        return " ".join(parts) or "1 rank"

    def to_dict(self) -> dict[str, int | None]:
        """Return the field values, JSON-able; `Mesh(**mesh.to_dict())` is the same mesh."""
        return asdict(self)


AXES: Sequence[str] = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
"""Order of the sizes in every message."""


def axes_of(text: str) -> dict[str, int]:
    """Sizes in a text such as "tp=2,dp=2", by axis.

    Raises:
        UsageError: it has something else, or an axis twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in axes or not size.isdigit():
            raise UsageError(f"--mesh is `{text}`, it must be sizes of {', '.join(AXES)}, such as tp=2,dp=2")
        axes[axis] = int(size)
    return axes


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """Ranks in words: sorted numbers as ranges, such as "0-3, 8"; at most so many of them."""
    runs = [[value for _, value in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    said = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(said[:most]) + (", ..." if most is not None and len(said) > most else "")
