"""Records of weights on their way from a checkpoint to an engine: load, train, export, plan, transport, engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from verifier.core.owed import (
    Owed,
    anyone,
    at_load,
    every_engine,
    every_rank,
    if_adapted,
    if_asked,
    if_cut,
    if_stepped,
    once,
    per_export,
    per_gradient,
    per_held,
    per_later_export,
    per_live,
    per_sent,
    per_step,
    per_sync,
    per_version,
)
from verifier.core.record import ArrayRecord, Count, Digest, Dtype, Real, Record, Shape, TensorRecord


class SourceTensor(TensorRecord, frozen=True, kw_only=True, tag="load/source"):
    """One tensor of the source checkpoint, or of a manifest that `golden --record` wrote."""

    copy_of: str = ""
    """Tensor that it repeats under a second name, as a layer that predicts further tokens does; empty for others."""


class ExpectedShard(TensorRecord, frozen=True, kw_only=True, tag="load/expected"):
    """Tensor that a rank must hold by the independent layout, cut from the source checkpoint."""

    owed = (Owed(every_rank, at_load),)

    coordinate: str
    """Mesh coordinate of the rank, such as "tp=0 pp=1 ep=0 etp=0 cp=0 dp=0"."""
    sources: tuple[str, ...]
    """Checkpoint tensors that it is cut from."""


class ShardRecord(TensorRecord, frozen=True, kw_only=True):
    """One live parameter, or one buffer that checkpoints hold, of one trainer rank."""

    coordinate: str
    """Mesh coordinate of the rank."""
    replica: str
    """Key that all copies of one shard share."""


class LoadedShard(ShardRecord, frozen=True, kw_only=True, tag="load/shard"):
    """A live shard right after the load."""

    owed = (Owed(every_rank, at_load),)


class AdapterShard(ShardRecord, frozen=True, kw_only=True, tag="load/adapter-shard"):
    """A live shard of an adapter before any step."""

    owed = (Owed(every_rank, once),)


class AdapterSpread(Record, frozen=True, kw_only=True, tag="load/adapter-spread"):
    """Size of the initial values of an adapter's matrix, joined from all ranks."""

    shape: tuple[Count, Count]
    deviation: Real
    """Root of the mean square."""


class UpdatedShard(ShardRecord, frozen=True, kw_only=True, tag="train/shard"):
    """A live shard after the update that made its version."""

    owed = (Owed(every_rank, per_step),)


class FrozenShard(ShardRecord, frozen=True, kw_only=True, tag="train/frozen"):
    """A live shard of the base of an adapter, after a step of the adapter."""

    owed = (Owed(every_rank, per_step),)


class ShardAfterIdleStep(ShardRecord, frozen=True, kw_only=True, tag="train/idle"):
    """A live shard after an optimizer step of learning rate 0."""

    owed = (Owed(every_rank, once),)


class ShardAfterScoring(ShardRecord, frozen=True, kw_only=True, tag="train/scored"):
    """A live shard after a pass that scores tokens."""

    owed = (Owed(every_rank, per_version),)


class ShardAfterExport(ShardRecord, frozen=True, kw_only=True, tag="export/exported"):
    """A live shard after an export."""

    owed = (Owed(every_rank, per_later_export),)


class Update(Record, frozen=True, kw_only=True, tag="train/update"):
    """Change from the weights of the version before to those of a version."""

    owed = (Owed(anyone, per_step),)

    how: Literal["step", "noise", "adapter step"]
    """"noise" moves every tensor of floats; a step of an adapter moves nothing else."""


class JoinedTensor(TensorRecord, frozen=True, kw_only=True, tag="train/live"):
    """A checkpoint tensor joined from the live shards of all ranks by the independent layout."""

    owed = (Owed(anyone, per_live),)


class LiveAdapterMatrix(TensorRecord, frozen=True, kw_only=True, tag="train/adapter"):
    """A matrix of an adapter, joined from the live shards of all ranks by the independent layout."""

    owed = (Owed(anyone, if_stepped),)


class ScalingRecord(Record, frozen=True, kw_only=True):
    """The factor of an adapter's product."""

    scaling: Real
    """Alpha over rank."""


class LiveAdapterScaling(ScalingRecord, frozen=True, kw_only=True, tag="train/adapter-scaling"):
    """The factor of an adapter's product in the live model."""

    owed = (Owed(anyone, if_stepped),)


class StepReport(Record, frozen=True, kw_only=True, tag="train/step"):
    """Report of one rank's training step."""

    owed = (Owed(every_rank, per_gradient),)

    loss: Real
    """Mean over the tokens in the loss, nats."""
    num_tokens: Count
    """Tokens in the loss, over all ranks."""
    grad_norm: Real
    """L2 norm that the optimizer clipped by."""
    update: Count = 0
    """Number of the optimizer step in a training run, from 1; 0 where each version has one."""


class OptimizerRule(Record, frozen=True, kw_only=True, tag="train/rule"):
    """Rule of each step: Adam, with rates by the number of rollouts that earlier steps have trained on."""

    owed = (Owed(anyone, if_asked),)
    is_side = False

    first_learning_rate: float
    """Learning rate at none."""
    learning_rate: float
    """Learning rate at `warm_up` rollouts: a straight line leads there."""
    least_learning_rate: float
    """Learning rate from `num_rollouts` on: half a cosine leads there."""
    embedding_learning_rate: float
    """The embedding's and the output's at `warm_up` rollouts; they begin as all others do."""
    least_embedding_learning_rate: float
    warm_up: Count
    num_rollouts: Count
    weight_decay: float
    """Weight decay of matrices at no rollouts; vectors do not decay."""
    greatest_weight_decay: float
    """Weight decay of matrices from `num_rollouts` on: a straight line leads there, from the first rollout."""
    clip_grad: float
    """Greatest L2 norm of a step's gradient; 0 does not clip."""
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8


class KeptTensors(ArrayRecord, frozen=True, kw_only=True):
    """Copies of tensors for the oracle; arrays by checkpoint name, bfloat16 as float32."""

    dtypes: dict[str, Dtype]
    """Dtype that each tensor had."""


class KeptWeights(KeptTensors, frozen=True, kw_only=True, tag="train/kept"):
    """Weights of a version, whole."""


class KeptGradients(KeptTensors, frozen=True, kw_only=True, tag="loss/kept"):
    """Gradients of the step that leads to a version, summed over micro-batches and ranks, before any clip."""


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

    shard: str
    """File that holds it."""


class SavedCheckpoint(Record, frozen=True, kw_only=True, tag="export/saved-files"):
    """The files of a saved checkpoint."""

    shards: Count
    """Number of files."""
    missing: tuple[str, ...] = ()
    """Tensors that the index places in a file that does not hold them."""


class WrittenShard(TensorRecord, frozen=True, kw_only=True, tag="export/written"):
    """Part of a saved checkpoint that a rank's shard is by the independent layout, cut from the files."""

    owed = (Owed(every_rank, if_cut),)

    coordinate: str
    """Mesh coordinate of the rank."""
    sources: tuple[str, ...]
    """Checkpoint tensors that it is cut from."""


class ExportedShard(TensorRecord, frozen=True, kw_only=True, tag="export/shard"):
    """Part of an export that a rank's shard is by the independent layout, cut from its stream."""

    owed = (Owed(every_rank, per_step),)

    coordinate: str
    """Mesh coordinate of the rank."""
    sources: tuple[str, ...]
    """Checkpoint tensors that it is cut from."""


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


class ReceivedTensor(TensorRecord, frozen=True, kw_only=True, tag="transport/receipt"):
    """One tensor as an engine rank received it, before its loader saw it."""

    owed = (Owed(every_engine, per_sync),)

    chunk: Count
    """Index of the chunk that brought it."""


class Handover(Record, frozen=True, kw_only=True, tag="transport/handover"):
    """End of the transfer of one version."""

    owed = (Owed(anyone, per_sync),)

    refused: str
    """Why it was refused; empty if it was not."""


class LoadedNames(Record, frozen=True, kw_only=True, tag="engine/loaded"):
    """Report of the engine's own loader on one chunk."""

    owed = (Owed(every_engine, per_sync),)

    names: tuple[str, ...]
    """Parameters, in the engine's spelling."""
    refused: str
    """Why the chunk was refused; empty if it was not."""


class HeldTensorRecord(TensorRecord, frozen=True, kw_only=True):
    """One thing that an engine rank computes with, under the engine's own name."""

    sort: Literal["parameter", "buffer", "view", "derived"]
    """"view" is a buffer in a parameter's memory, "derived" a packed copy or an attribute."""


class SyncedTensor(HeldTensorRecord, frozen=True, kw_only=True, tag="engine/state"):
    """Held by an engine that was synced."""

    owed = (Owed(every_engine, per_held),)


class ColdTensor(HeldTensorRecord, frozen=True, kw_only=True, tag="engine/cold"):
    """Held by an engine that loaded the weights at its start."""

    owed = (Owed(anyone, per_sent),)


class SettingsRecord(Record, frozen=True, kw_only=True):
    """Plain attributes that one module of an engine computes with."""

    values: dict[str, str]
    """Number, flag or name, by attribute."""


class SyncedSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/settings"):
    """Plain attributes that one module of a synced engine computes with."""

    owed = (Owed(every_engine, per_held),)


class ColdSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/cold-settings"):
    """Plain attributes that one module computes with in an engine that loaded the weights at its start."""

    owed = (Owed(anyone, per_sent),)


class CheckpointView(TensorRecord, frozen=True, kw_only=True, tag="engine/view"):
    """The part of one checkpoint tensor that an engine rank holds, read back from what it computes with."""

    owed = (Owed(every_engine, per_held),)

    tensor: str
    """Checkpoint spelling. The record's name adds the holder where several hold the same."""
    holder: str
    """The engine's own name of what it was read from."""
    box: tuple[tuple[Count, Count], ...]
    """Begin and end of the part, per dim of the checkpoint tensor."""


class ExpectedView(TensorRecord, frozen=True, kw_only=True, tag="engine/view-expected"):
    """Tensor that was drawn for a sync, cut to the part that an engine rank holds; all of it where it holds none."""

    owed = (Owed(every_engine, per_held),)

    whole: Shape
    """Shape of the checkpoint tensor."""
    wider_dtype: str = ""
    """Dtype in which the engine rank holds it, if that has every value of its own; empty where they are the same."""
    wider_digest: Annotated[str, Meta(pattern=r"^(|[a-z][a-z0-9]*:[0-9a-f]{32,128})$")] = ""
    """Digest of its values in that dtype."""


class QuantizedNames(Record, frozen=True, kw_only=True, tag="engine/view-quantized"):
    """Checkpoint tensors that an engine rank quantized, so that their bits cannot be what was sent."""

    names: tuple[str, ...]


class EngineRestart(Record, frozen=True, kw_only=True, tag="engine/restart"):
    """Engines died and were started again, before or while they sampled by the weights of this version."""

    restarts: Count
    """Times since the last evidence of what they hold."""


class HeldTwice(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of an engine that is another than it was; empty digests of one that was not there."""

    name: str
    synced: Annotated[str, Meta(pattern=r"^(|[a-z][a-z0-9]*:[0-9a-f]{32,128})$")]
    """Digest right after the sync, or at the start of an engine that was sent nothing yet."""
    served: Annotated[str, Meta(pattern=r"^(|[a-z][a-z0-9]*:[0-9a-f]{32,128})$")]
    """Digest as the next sync begins."""


class EngineServed(Record, frozen=True, kw_only=True, tag="engine/served"):
    """Contents of one engine rank after it answered by a version, beside those before."""

    owed = (Owed(every_engine, once),)

    num_tensors: Count
    """Parameters, buffers and derived tensors that were looked at."""
    changed: tuple[HeldTwice, ...] = ()


class KeptKeys(Record, frozen=True, kw_only=True, tag="engine/kept-keys"):
    """Keys and values that each engine has right after a sync, by engine."""

    owed = (Owed(anyone, per_sync),)

    blocks: tuple[Count, ...]
    """Blocks that it would give to new prompts."""
    tokens: tuple[Count, ...]
    """Tokens of the requests that run, whose keys it goes on from."""
    kept: bool = False
    """Requests ran during the sync and were to keep theirs."""


class Poison(Record, frozen=True, kw_only=True, tag="engine/poison"):
    """Effect of the poison before an update on each tensor of one engine rank."""

    owed = (Owed(every_engine, per_sync),)

    outcomes: dict[str, str]
    """State per tensor: "nan"; "nan, restored before the update", where no checkpoint carries it; "left", still finite;
    "left: " and a reason, which the engine declares."""
