"""Fields of every recorded fact: recorder, weight version, name. The kinds stand in `records_*.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from verifier.core.owed import Owed
from verifier.core.stage import Stage

if TYPE_CHECKING:
    import numpy as np

Count = Annotated[int, Meta(ge=0)]
"""Count, or position, from 0 on."""
Digest = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9]*:[0-9a-f]{32,128}$")]
"""``algorithm:hex`` over raw bytes; equal contents have equal digests."""
Dtype = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*$")]
"""Name of a dtype as torch spells it, such as "bfloat16"."""
Shape = tuple[Count, ...]
Lengths = tuple[Count, ...]
"""Tokens of each sequence, in the order in which an array holds them one after another."""
Role = Literal["trainer", "engine", "cold", "oracle", "source", "controller"]
"""Process that recorded; "cold" is an engine that loaded the weights at its start."""
Real = float | Literal["nan", "inf", "-inf"]
"""A float of which JSON may have no number; `float` takes both forms."""
ArrayKey = Annotated[str, Meta(pattern=r"^(|[a-z]+-\d{4,8}-\d{6,10})$")]
"""Name of a file of arrays within the trace; empty until a recorder has written it."""

ONLY = "array"
"""Key of an array that is its record's only one."""


class _StageOf:
    """The stage that the tag of a class of records begins with."""

    def __get__(self, record: Record | None, kind: type[Record]) -> Stage:
        return Stage[kind_of(kind).partition("/")[0].upper()]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """One immutable fact. Never an opinion: only checks compare."""

    stage: ClassVar[_StageOf] = _StageOf()
    owed: ClassVar[tuple[Owed, ...]] = (Owed(),)
    """Processes that owe records of this class, and when."""
    is_side: ClassVar[bool] = True
    """Nothing can be compared without them; others bound or place what is compared, and their lack alone is told."""
    name: str
    """Checkpoint spelling of a tensor, Megatron's of a shard, or the name of a sequence, of a pass or of a party."""
    version: Count = 0
    """Weight version that the fact belongs to; 0 is the initial checkpoint."""
    rank: Count = 0
    """Rank within the role that recorded it."""
    role: Role = "trainer"

    @property
    def party(self) -> tuple[str, int]:
        """Role and rank of the process that the fact is of."""
        return self.role, self.rank

    @property
    def update_number(self) -> int | None:
        """Number of the optimizer step that the fact belongs to; None of others."""
        if number := getattr(self, "update", 0):
            return int(number)
        word, _, rest = self.name.partition(" ")
        number = rest.partition(" ")[0]
        return int(number) if word == "update" and number.isdigit() else None


class TensorRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor as somebody held it. Digest, dtype and shape are never absent, so absence cannot compare as equal."""

    digest: Digest
    dtype: Dtype
    shape: Shape


class ArrayRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A fact with one or several arrays beside it."""

    array: ArrayKey = ""


class RankRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A fact of one trainer rank."""

    coordinate: str
    """Mesh coordinate of the rank, such as "tp=0 pp=1 ep=0 etp=0 cp=0 dp=0"."""


class RankArrays(ArrayRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A fact of one trainer rank, with arrays beside it."""

    coordinate: str
    """Mesh coordinate of the rank."""


class UnknownRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fact of a kind that nothing here declares: of a plugin that is not installed, or of a later version.

    No check reads it. It is counted, and named with the verdict.
    """

    kind: str
    """``stage/kind`` as it was recorded."""
    name: str
    version: Count = 0
    rank: Count = 0
    role: str = "trainer"
    fields: dict[str, Any] = {}
    """The whole line."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The greatest gap between two tensors that are too large to keep, measured where both were at hand."""

    value: Real
    """The gap, in units that `how` names."""
    scale: Real
    """Greatest magnitude of the tensor that it was measured against."""
    index: tuple[Count, ...] = ()
    """Element with the greatest gap; empty for a single number."""
    rank: Count | None = None
    """Trainer rank that holds this element by the layout; of several copies the lowest."""
    coordinate: str = ""
    """Mesh coordinate of that rank."""
    how: str
    """The computation, its inputs and its arithmetic."""


Array = Any
"""A numpy array, or a torch tensor, which is brought to the host."""


class Probe(Protocol):
    """Interface by which a room reports. A probe only looks: it never changes or delays what passes."""

    def emit(self, record: Record, array: Array | Mapping[str, Array] | None = None) -> None:
        """Record one fact, with its array, or with several by name."""


def kind_of(kind: type[Record]) -> str:
    """``stage/kind`` of a class of records, as traces and reports spell it."""
    return str(kind.__struct_config__.tag)


def real(value: float) -> Real:
    """A float as a record holds it."""
    if math.isfinite(value):
        return float(value)
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def as_numpy(array: Array) -> np.ndarray:
    """An array on the host, as a trace keeps it; every value is the same.

    numpy has no bfloat16: it becomes float32. Whole numbers that fit in 32 bits take 32: fewer bytes to read.
    """
    import numpy as np

    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
        array = array.numpy()
    if array.dtype == np.int64 and array.size and array.min() >= -(2**31) and array.max() < 2**31:
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)
