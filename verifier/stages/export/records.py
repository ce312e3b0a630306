"""Records of the stage `export`: live parameters to checkpoint tensors."""

from __future__ import annotations

import msgspec

from verifier.core.owed import (
    Owed,
    anyone,
    every_rank,
    if_adapted,
    if_cut,
    if_export_moves,
    per_export,
    per_sent,
    per_step,
)
from verifier.core.record import Count, Digest, Real, Record, TensorRecord
from verifier.stages.load.records import ConfigRecord, FilesRecord, PlacedTensor, ShardRecord
from verifier.stages.train.records import ScalingRecord


class SavedFiles(FilesRecord, frozen=True, kw_only=True, tag="export/files"):
    """Files of a saved checkpoint."""


class ExportedConfig(ConfigRecord, frozen=True, kw_only=True, tag="export/config"):
    """The config.json that megatron-bridge wrote with an export, as transformers reads it."""

    owed = (Owed(anyone, per_export),)


class ShardAfterExport(ShardRecord, frozen=True, kw_only=True, tag="export/exported"):
    """A live shard after an export."""

    owed = (Owed(every_rank, if_export_moves),)


class ExportedTensor(TensorRecord, frozen=True, kw_only=True, tag="export/tensor"):
    """One tensor of a rank's export stream; the order of the records is the order of the stream."""

    owed = (Owed(every_rank, per_export),)


class Reread(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that its reader still held when a later one came in memory that both share."""

    name: str
    handed_over: Digest
    """Its digest when it was exported."""
    still_held: Digest


class ExportStream(Record, frozen=True, kw_only=True, tag="export/stream"):
    """One rank's export stream as a whole."""

    owed = (Owed(every_rank, per_export),)

    num_tensors: Count
    reread: tuple[Reread, ...] = ()


class ExportedAdapterMatrix(TensorRecord, frozen=True, kw_only=True, tag="export/adapter"):
    """A matrix in the file of an exported adapter."""

    owed = (Owed(anyone, if_adapted),)


class ExportedAdapterScaling(ScalingRecord, frozen=True, kw_only=True, tag="export/adapter-scaling"):
    """The factor of an adapter's product in its exported configuration."""

    owed = (Owed(anyone, if_adapted),)

    further: dict[str, str] = msgspec.field(default_factory=dict)
    """Further settings that the configuration asks a reader for, such as another alpha for some linears."""


class MergedMatrix(Record, frozen=True, kw_only=True, tag="export/merged"):
    """An exported matrix that has an adapter, against base + alpha / rank * B A in float64 of the live shards."""

    owed = (Owed(anyone, per_sent),)

    dtype: str
    rank_of_adapter: Count
    gap: Real
    """Greatest distance over all elements, in half steps of the dtype at |base| + alpha / rank * |B| |A|."""
    where: int
    """Index of that element in the flattened matrix."""


class SavedTensor(TensorRecord, frozen=True, kw_only=True, tag="export/saved"):
    """A tensor that a reader finds in a saved checkpoint: in the file where the index says that it is."""


class SavedCheckpoint(Record, frozen=True, kw_only=True, tag="export/saved-files"):
    """The files of a saved checkpoint."""

    missing: tuple[str, ...] = ()
    """Tensors that the index places in a file that does not hold them."""


class WrittenShard(PlacedTensor, frozen=True, kw_only=True, tag="export/written"):
    """Part of a saved checkpoint that a rank's shard is by the independent layout, cut from the files."""

    owed = (Owed(every_rank, if_cut),)


class ExportedShard(PlacedTensor, frozen=True, kw_only=True, tag="export/shard"):
    """Part of an export that a rank's shard is by the independent layout, cut from its stream."""

    owed = (Owed(every_rank, per_step),)
