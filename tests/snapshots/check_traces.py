"""A small run as the checks see it, all right; and for each check the smallest thing that goes wrong.

Two trainer ranks, one engine rank, the initial weights and one update; tensors `a` and `b`, replicated on both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.snapshots import measured_traces, training_traces
from tests.snapshots.config_records import FILES, configs
from tests.snapshots.tensors import PLAN, SHAPES, digest, tensor
from tests.snapshots.token_arrays import DRAWN, LEDGER, SCORES, TOKENS
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.record import ArrayRecord, Measurement, Record, TensorRecord
from verifier.core.trace import Trace
from verifier.stages.engine.records import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    EngineRestart,
    EngineServed,
    ExpectedView,
    KeptKeys,
    LoadedNames,
    Poison,
    SyncedSettings,
    SyncedTensor,
)
from verifier.stages.export.records import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    ExportedConfig,
    ExportedShard,
    ExportedTensor,
    ExportStream,
    MergedMatrix,
    Reread,
    SavedCheckpoint,
    SavedFiles,
    SavedTensor,
    ShardAfterExport,
    WrittenShard,
)
from verifier.stages.load.records import (
    AdapterShard,
    AdapterSpread,
    ExpectedShard,
    LoadedShard,
    SourceTensor,
    StackFailure,
)
from verifier.stages.logprob.records import (
    GivenArguments,
    OracleLogprobs,
    OracleOfNext,
    OracleOfPlaces,
    OracleOfSampled,
    ProviderFields,
    ReturnedLogprobs,
    TrainerLogprobs,
)
from verifier.stages.loss.records import GradientRecord
from verifier.stages.pack.records import PackedBatchDigest, PackLayout, Rollouts, TokenLedger
from verifier.stages.plan.records import PlanDigest, PlannedTensor
from verifier.stages.replay.records import (
    ForcedRouteLogprobs,
    GivenRoutes,
    NaturalRouteLogprobs,
    OracleOfForced,
    ReplayedRouteLogprobs,
    UsedRoutes,
)
from verifier.stages.rollout.records import DrawnTokens, EngineLogprobs, SampledTokens
from verifier.stages.train.records import (
    FrozenShard,
    JoinedTensor,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    ShardAfterIdleStep,
    ShardAfterScoring,
    StepReport,
    Update,
    UpdatedShard,
)
from verifier.stages.transport.records import Handover, ReceivedTensor

MANIFEST = Manifest(
    command="roundtrip", complete=True, dtype="float32", world_size=2, mesh=MeshSizes(tp=2), engine_ranks=1,
    synced_versions=(1,),
    config={
        "steps": 1, "evaluation": {"stop_above": 2.0, "every": 1, "num_problems": 1}, "data": {},
        "aggregation": "token_mean", "checkpoint": {"every": 1, "keep": 2}, **measured_traces.CONFIG,
    },
)  # fmt: skip
ONE_RANK = replace(MANIFEST, world_size=1, mesh=MeshSizes(), synced_versions=())
"""Of a run of one trainer rank."""
LENGTHS = (3, 2)
AT = tuple(f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0" for rank in range(2))
ARRAYS: dict[str, dict[str, np.ndarray]] = {
    **SCORES,
    "rows": {"array": np.arange(6)},
    "routes": {"array": np.array([[0, 0, 1, 3, 2], [0, 1, 1, 0, 1]], np.int32)},
    "other routes": {"array": np.array([[0, 0, 1, 3, 2], [0, 1, 1, 0, 2]], np.int32)},
    "tokens": TOKENS,
    "ledger": LEDGER,
    "shifted ledger": {**LEDGER, "label": np.array([2, 8, -100, -100, 5, -100])},
    **training_traces.ARRAYS,
}


def clean() -> list[Record]:
    """Everything that a run without a fault records."""
    return [
        *weights(),
        *configs(),
        *adapters(),
        *engine(),
        *steps(),
        *tokens(),
        *routes(),
        *logprobs(),
        *training_traces.training(),
    ]


def weights() -> list[Record]:
    """Load, update, export, saved files and plan."""
    seen: list[Record] = []
    for name in SHAPES:
        seen.append(tensor(SourceTensor, name, role="source"))
        seen.append(PlannedTensor(name=name, dtype="float32", shape=SHAPES[name]))
        for rank in range(2):
            at: Any = {"coordinate": f"tp={rank}"}
            shard: Any = {**at, "replica": name}
            seen.append(tensor(ExpectedShard, name, 0, rank, **at))
            seen.append(tensor(LoadedShard, name, 0, rank, **shard))
            seen.append(tensor(UpdatedShard, name, 1, rank, **shard))
            seen.append(tensor(ExportedShard, name, 1, rank, **at))
            seen.append(tensor(ShardAfterIdleStep, name, 0, rank, **shard))
            seen += [tensor(ShardAfterScoring, name, version, rank, **shard) for version in (0, 1)]
            seen += [tensor(ExportedTensor, name, version, rank) for version in (0, 1)]
            seen += [tensor(ShardAfterExport, name, version, rank, **shard) for version in (0, 1)]
            seen.append(tensor(WrittenShard, name, 1, rank, **at))
            seen.append(replace(tensor(FrozenShard, name, 1, rank, **shard), digest=digest(name, 0)))
        seen += [tensor(SavedTensor, name, 1), tensor(JoinedTensor, name, 1)]
    for role, rank, version in (("trainer", 0, 0), ("trainer", 1, 0), ("engine", 0, 1)):
        plan: Any = {"role": role, "rank": rank, "version": version}
        seen.append(PlanDigest(name="plan", digest=PLAN, num_tensors=2, num_chunks=1, **plan))
    seen.append(Update(name="version 1", version=1, how="step"))
    seen += [ExportStream(name="the export", version=1, rank=rank, num_tensors=2) for rank in range(2)]
    return [*seen, SavedCheckpoint(name="shards", version=1)]


def adapters() -> list[Record]:
    """An adapter's matrices in the live model and in its file."""
    matrices, scalings = (LiveAdapterMatrix, ExportedAdapterMatrix), (LiveAdapterScaling, ExportedAdapterScaling)
    seen: list[Record] = [tensor(kind, name, 1) for name in SHAPES for kind in matrices]
    for rank, sign in enumerate("xy"):
        drawn: Any = {"digest": "vd1:" + "a" * 31 + str(rank), "dtype": "float32", "shape": (4, 2)}
        who: Any = {"name": "q.adapter.linear_in.weight", "rank": rank, "coordinate": AT[rank], "replica": sign}
        seen.append(AdapterShard(**who, **drawn))
    seen.append(AdapterSpread(name="q.lora_A.weight", shape=(8, 92), deviation=0.14))
    seen.append(MergedMatrix(name="b", dtype="bfloat16", rank_of_adapter=8, gap=0.75, where=5))
    return seen + [kind(name="alpha / rank", version=1, scaling=2.0) for kind in scalings]


def engine() -> list[Record]:
    """What one engine rank received, holds and computes with."""
    seen: list[Record] = []
    for name, shape in SHAPES.items():
        seen.append(tensor(ReceivedTensor, name, 1, role="engine", chunk=0))
        box = tuple((0, size) for size in shape)
        seen.append(tensor(CheckpointView, name, 1, role="engine", tensor=name, holder=name, box=box))
        seen.append(tensor(ExpectedView, name, 1, role="engine", whole=shape))
        seen.append(tensor(SyncedTensor, name, 1, role="engine", sort="parameter"))
        seen.append(tensor(ColdTensor, name, 1, role="cold", sort="parameter"))
    settings = {"variance_epsilon": "1e-06", "impl.scale": "0.5"}
    seen.append(SyncedSettings(name="layers.0", version=1, role="engine", values=settings))
    seen.append(ColdSettings(name="layers.0", role="cold", values=settings))
    seen.append(LoadedNames(name="loaded", version=1, role="engine", names=("a", "b"), refused=""))
    seen.append(Poison(name="poison", version=1, role="engine", outcomes={"a": "nan", "b": "nan"}))
    seen.append(Handover(name="transfer", version=1, refused=""))
    seen.append(EngineRestart(name="the engines", version=1, role="controller", restarts=1))
    seen.append(EngineServed(name="the engine between two syncs", role="engine", num_tensors=2))
    seen.append(KeptKeys(name="keys after a sync", role="engine", version=1, blocks=(0, 0), tokens=(0, 0)))
    return [*seen, StackFailure(name="trainer rank 1", role="controller", package="vllm", at="engine", line=7)]


def measured(value: float, *index: int) -> Measurement:
    """A gap that the oracle's process measured."""
    how = "|the trainer's - transformers'|, in float64"
    return Measurement(value=value, scale=0.25, index=index, rank=1, coordinate=AT[1], how=how)


def steps() -> list[Record]:
    """One training step, and what the oracle measured of it."""
    seen: list[Record] = [
        GradientRecord(
            name=name, version=1, role="oracle", gradient=measured(1e-9), gradient_scale=0.25, gradient_norm=2.0,
            step=measured(1e-4), loss=7.000001, loss_scale=7.5, num_tokens=5,
        )
        for name in SHAPES
    ]  # fmt: skip
    return seen + [
        StepReport(name="step", version=1, rank=rank, loss=7.0, grad_norm=2.000001, num_tokens=5) for rank in range(2)
    ]


def tokens() -> list[Record]:
    """One packed micro-batch of two rollouts, of 3 and 2 tokens, on both ranks of a tensor-parallel group."""
    return [
        *(
            PackedBatchDigest(
                name="trained dp=0 cp=0", version=1, rank=rank, digest="vd1:" + "b" * 32, coordinate=AT[rank],
                micro_batches=1,
            )
            for rank in range(2)
        ),
        PackLayout(
            name="trained micro-batch 0", version=1, cu_seqlens=(0, 3, 5), cu_seqlens_padded=(0, 4, 6), max_seqlen=4,
            lengths=LENGTHS, cp_rank=0, filler=False, array="rows",
        ),
        Rollouts(
            name="trained", version=1, ids=("sequence-0", "sequence-1"), groups=("x", "y"), lengths=LENGTHS,
            prompt_lengths=(1, 1), rewards=(0.5, -1.0), array="tokens",
        ),
        TokenLedger(name="trained", version=1, coordinate=AT[0], array="ledger"),
    ]  # fmt: skip


def routes() -> list[Record]:
    """Routes of two tokens of one rollout (rollout, position, layer, two experts), as given and as used."""
    who: Any = {"rollouts": ("sequence-0", "sequence-1"), "lengths": LENGTHS}
    return [
        GivenRoutes(name="made-up routes", rollouts=("sequence-0",), array="routes"),
        UsedRoutes(name="made-up routes", coordinate="tp=0", array="routes"),
        ForcedRouteLogprobs(name="made-up routes", **who, array="close"),
        OracleOfForced(name="made-up routes", lengths=LENGTHS, array="right"),
        NaturalRouteLogprobs(name="natural routes", **who, array="right"),
        ReplayedRouteLogprobs(name="natural routes replayed", **who, array="right"),
    ]


def logprobs() -> list[Record]:
    """What trainer, engine and oracle score, and what the engine samples."""
    seen: list[Record] = [
        DrawnTokens(name="drawn", version=1, role="engine", prompt=(1,), tokens=DRAWN, temperature=1.0, array="drawn"),
        OracleOfNext(name="drawn", version=1, role="oracle", array="shares"),
    ]
    for version in (0, 1):
        whose: Any = {"name": "batch", "version": version, "lengths": LENGTHS}
        seen += [
            ReturnedLogprobs(name="batch", version=version, rank=rank, digest="vd1:" + "5" * 32) for rank in range(2)
        ]
        seen += [
            TrainerLogprobs(**whose, array="close"),
            OracleLogprobs(**whose, role="oracle", array="right"),
            EngineLogprobs(**whose, role="engine", array="close"),
        ]
        for name in ("batch", "batch again"):
            seen += [
                SampledTokens(
                    **whose | {"name": name}, role="engine", array="close", prompts=((4,), (4,)),
                    tokens=((1, 2, 3), (7, 5)), stops=((5, 9), (5, 9)), limits=(3, 3), ended=("length", "stop"),
                    temperatures=(1.0, 1.0), seeds=(8, 9),
                ),
                OracleOfSampled(**whose | {"name": name}, role="oracle", array="right"),
                OracleOfPlaces(name=name, version=version, role="oracle", array="places", vocabulary=16),
            ]  # fmt: skip
    return seen


def make_trace(records: list[Record], manifest: Manifest = MANIFEST) -> Trace:
    """A trace of these facts, with the arrays in memory."""
    return Trace(manifest, records, ARRAYS.__getitem__)


Change = Callable[[Any], Record | None]


def change(kind: type[Record], how: Change, **equal: object) -> list[Record]:
    """The clean run with the first fact that matches changed, or taken away where `how` gives None."""
    seen, done = [], False
    for item in clean():
        if type(item) is kind and not done and all(getattr(item, k) == v for k, v in equal.items()):
            done = True
            changed = how(item)
            seen += [] if changed is None else [changed]
        else:
            seen.append(item)
    assert done, f"the clean run has no {kind.__name__} with {equal}"
    return seen


def other_bits(item: TensorRecord) -> TensorRecord:
    """Some other content."""
    return replace(item, digest="vd1:" + "f" * 32)


def bits_of_b(item: TensorRecord) -> TensorRecord:
    """The content that `b` should hold."""
    return replace(item, digest=digest("b", item.version))


def rounded(item: TensorRecord) -> TensorRecord:
    """Another dtype on the way."""
    return replace(item, dtype="bfloat16", digest="vd1:" + "e" * 32)


def gone(item: Record) -> None:
    """Not recorded at all."""


def with_array(name: str) -> Change:
    """The same fact with another payload."""
    return lambda item: replace(item, array=name)


def having(**values: object) -> Change:
    """The same fact with other details."""
    return lambda item: replace(item, **values)


def unmoved() -> list[Record]:
    """A step after which every tensor has the source's bits."""
    return [replace(item, digest=digest(item.name, 0)) if type(item) is JoinedTensor else item for item in clean()]


def altered(item: Any, **values: str) -> Record:
    """A configuration or a module's settings with other values."""
    return replace(item, values={**item.values, **values})


WRITTEN_OVER = (Reread(name="a", handed_over="vd1:" + "0" * 32, still_held="vd1:" + "1" * 32),)
BROKEN: dict[str, list[Record]] = {
    "LSS001": change(GradientRecord, having(gradient=measured(0.125, 2)), name="b"),
    "LSS002": change(StepReport, having(loss=14.0)),
    "LGP004": change(DrawnTokens, having(tokens=(0,) * 60)),
    "LGP006": change(SampledTokens, having(tokens=((1, 9, 3), (7, 5))), version=1),
    "RPL001": change(UsedRoutes, with_array("other routes")),
    "RPL002": change(ReplayedRouteLogprobs, with_array("close")),
    "RPL003": change(ForcedRouteLogprobs, with_array("wrong")),
    "TRN001": change(GradientRecord, having(step=measured(0.5, 3, 1)), name="a"),
    "WGT001": change(LoadedShard, other_bits, name="a", rank=1),
    "WGT002": change(UpdatedShard, other_bits, name="b", rank=1),
    "WGT004": change(ExportedTensor, bits_of_b, name="a", rank=0, version=0),
    "WGT005": change(ExportedTensor, other_bits, name="a", rank=0, version=1),
    "WGT006": change(ExportedTensor, gone, name="a", rank=1, version=1),
    "WGT008": unmoved(),
    "WGT010": change(ShardAfterExport, other_bits, name="a", rank=1, version=1),
    "WGT011": change(ExportedConfig, lambda item: altered(item, num_experts_per_tok="2")),
    "WGT013": change(ExportedAdapterMatrix, bits_of_b, name="a"),
    "WGT014": change(SavedTensor, gone, name="b"),
    "WGT017": change(AdapterSpread, having(deviation=0.19)),
    "WGT016": change(ExportStream, having(reread=WRITTEN_OVER)),
    "WGT020": change(ExportedShard, other_bits, name="b", rank=1),
    "WGT019": change(WrittenShard, other_bits, name="a", rank=1),
    "WGT021": change(SavedFiles, having(digests={**FILES, "generation_config.json": f"xxh3:{3 << 100:032x}"})),
    "WGT018": change(MergedMatrix, having(gap=64.0)),
    "PCK001": change(TokenLedger, with_array("shifted ledger")),
    "PCK002": change(PackLayout, having(cu_seqlens_padded=(0, 3, 5))),
    "PCK003": change(PackedBatchDigest, other_bits, rank=1),
    "PLN001": change(PlanDigest, having(digest="blake2:" + "02" * 16), role="trainer", rank=1),
    "PLN002": change(PlannedTensor, having(dtype="bfloat16"), name="b"),
    "TPT001": change(ReceivedTensor, rounded, name="b"),
    "TPT002": change(ReceivedTensor, gone, name="b"),
    "STK001": change(StackFailure, having(message="ValueError: no such expert", file="vllm/a.py", function="load")),
    "ENG001": change(CheckpointView, bits_of_b, name="a"),
    "ENG002": change(SyncedTensor, other_bits, name="a"),
    "ENG003": change(Poison, having(outcomes={"a": "nan", "rotary.inv_freq": "left"})),
    "ENG004": change(LoadedNames, having(names=("b",), refused="AttributeError while loading: no attribute `a`")),
    "ENG005": change(SyncedSettings, lambda item: altered(item, variance_epsilon="1e-05")),
    "ENG007": change(SyncedSettings, lambda item: altered(item, **{"impl.scale": "0.25"})),
    "ENG009": change(EngineServed, having(changed=("a",))),
    "ENG010": change(KeptKeys, having(blocks=(0, 3))),
    "LGP001": change(TrainerLogprobs, with_array("wrong"), version=1),
    "LGP002": change(EngineLogprobs, with_array("not finite"), version=1),
    "LGP008": change(GivenArguments, having(max_seqlen_kv=3), rank=1),
    "LGP007": change(ProviderFields, lambda item: altered(item, window_size="[2048, 0]"), rank=1),
    "LGP014": training_traces.many_ends(clean()),
    "LGP003": change(SampledTokens, having(lengths=(4, 1)), version=0),
    "LGP018": change(SampledTokens, having(tokens=((2, 2, 3), (9, 5))), name="batch again", version=1),
    **{code: change(kind, how) for code, (kind, how) in training_traces.CHANGES.items()},
}
"""Check -> the clean run with the smallest thing wrong that it has to see."""


def arrays_of(record: Record) -> dict[str, np.ndarray] | None:
    """What a recorder is handed with a record."""
    return ARRAYS[record.array] if isinstance(record, ArrayRecord) else None
