"""Records of the stage `plan`: order, names, dtypes, bytes of what will travel."""

from __future__ import annotations

from verifier.core.owed import Owed, every_engine, every_rank, once, per_sync
from verifier.core.record import Count, Digest, Record, Shape


class PlanDigest(Record, frozen=True, kw_only=True, tag="plan/plan"):
    """Digest of the chunk plan that one trainer or engine rank holds."""

    owed = (Owed(every_rank, once), Owed(every_engine, per_sync))

    digest: Digest
    num_tensors: Count | None = None
    num_chunks: Count | None = None
    """Known of trainer ranks, as is the number of tensors."""


class PlannedTensor(Record, frozen=True, kw_only=True, tag="plan/entry"):
    """One tensor of the chunk plan; it has no contents yet."""

    dtype: str
    shape: Shape
