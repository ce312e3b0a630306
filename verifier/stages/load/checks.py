"""Loaded weights, adapters as they begin, settings asked for and held, and a stack that failed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value, owner_of
from verifier.core.condition import NEEDS, condition, on, recorded, several
from verifier.core.manifest import Manifest
from verifier.stages.checks_conditions import ADAPTER, EXPORTS, FIRST, LAYOUT, LOADED, REPLICAS, UPDATED
from verifier.stages.checks_content import compare_ranks, describe
from verifier.stages.load.records import (
    AdapterShard,
    AdapterSpread,
    ExpectedShard,
    KnobsAsked,
    KnobsReached,
    LoadedShard,
    ShardRecord,
    StackFailure,
)
from verifier.stages.train.records import UpdatedShard

DEVIATIONS = 6
"""Standard errors by which a sample's spread may differ from that of its distribution: once in 5e8 matrices."""


@check(
    "WGT017", needs=(AdapterShard, AdapterSpread),
    applies=on(roundtrip=EXPORTS & ADAPTER & LAYOUT, step=UPDATED & ADAPTER & FIRST),
)  # fmt: skip
def adapter_begins_wrong(trace: Trace) -> Iterator[Comparison]:
    """An adapter begins with a random A of the right spread, no two shards of which are alike, and with B of zeros.

    What it checks: before any step, each rank's shards of A: copies of one shard are equal, and no other two are; the
    spread of each joined matrix: of A that of Glorot's distribution by the whole matrix, of B zero.
    Why it matters: an A that is equal on all tensor-parallel ranks has half the rank, or less; one whose spread is by
    the shard's width begins elsewhere on each mesh, and learns at another rate.
    Evidence: load/adapter-shard, load/adapter-spread.
    Tolerance and its source: shards bitwise; spread within 6 standard errors of that of as many normal numbers,
    1/sqrt(2 n) each; zeros exact.
    Where to look: the random state that initial values are drawn with on each rank, and the widths that the spread is
    derived from.
    What it does not catch: a spread that is wrong by less, such as that of an A whose rank is sharded; another
    distribution of the same spread.
    References: Megatron-Bridge#5840, Megatron-Bridge#5396, PaddleNLP#9427.
    """
    first: dict[str, AdapterShard] = {}
    holders: dict[str, AdapterShard] = {}
    for item in trace.of(AdapterShard):
        if not item.name.endswith(".linear_in.weight"):
            continue
        peer = first.setdefault(item.replica, item)
        other = holders.setdefault(item.digest, item)
        alone = other.replica == item.replica
        wrong = "differs from its copy" if item.digest != peer.digest else "" if alone else "equals another shard"
        who = other if not alone else peer
        sentence = f"`{item.name}` of trainer rank {item.rank} {wrong}, `{who.name}` of trainer rank {who.rank}"
        sides = wrong, "equal copies of a shard, and no other shard like it"
        at = At(Stage.LOAD, owner=owner_of(item))
        yield compare_value(at, item.name, *sides, same=not wrong, sentence=sentence)
    for spread in trace.of(AdapterSpread):
        rank, width = spread.shape
        inward = spread.name.endswith(".lora_A.weight")
        right = math.sqrt(2 / (rank + width)) if inward else 0.0
        allowed = DEVIATIONS * right / math.sqrt(2 * rank * width)
        found = float(spread.deviation)
        at, subject = At(Stage.LOAD), f"the spread that `{spread.name}` begins with"
        says = "root mean square of the joined matrix", f"Glorot's, of a whole {rank} by {width}" if inward else ""
        words = f"{allowed:.3g} ({DEVIATIONS} standard errors of {rank * width:,} normal numbers)"
        yield compare_value(at, spread.name, found, right, subject=subject, says=says, allowed=words, bound=allowed)


@check("CFG001", needs=(KnobsAsked, KnobsReached), applies=on(step=UPDATED, loop=NEEDS))
def knob_not_applied(trace: Trace) -> Iterator[Comparison]:
    """Every knob of the config holds the value that was asked for in the live objects of every rank.

    What it checks: per rank and knob, the value that the config asks of a field of TransformerConfig, of the data
    parallel config, of OptimizerConfig, of Adam's groups of parameters or of the scheduler, against the value that
    these objects hold after the step: those of every layer and every group. Of a recorded loop what it asks of its
    optimizer, against each group of it.
    Why it matters: a knob that is read and never applied trains another run than its config says. A balancing loss that
    is on by default changes the gradient's norm threefold.
    Evidence: load/asked, load/reached.
    Tolerance and its source: bitwise; settings are copied.
    Where to look: where the knob is handed on, and what sets the field after it.
    What it does not catch: a field that holds the right value and that no code reads (the gradients' checks do).
    References: NeMo-RL#3523, Megatron-LM#5694, SkyRL#1335.
    """
    for asked in trace.of(KnobsAsked):
        for reached in trace.of(KnobsReached, version=asked.version):
            for knob, expected in asked.values.items():
                actual = reached.values.get(knob, "absent")
                says, subject = ("the rank's live objects", "the config"), f"{knob} in the run"
                yield compare_value(
                    reached, f"{knob} on rank {reached.rank}", actual, expected, subject=subject, says=says
                )


_CUTS = ("tp", "pp", "ep", "etp", "cp", "vpp")
"""Sizes of a mesh that cut the model or its input."""


STACK_FAILED = condition("", lambda run: run.facts.stack_failed)


@check("STK001", needs=(StackFailure,), applies=STACK_FAILED)
def stack_failed(trace: Trace) -> Iterator[Comparison]:
    """No process of the run died inside the stack under test.

    What it checks: exceptions whose innermost frame, torch and the standard library apart, lies in Megatron,
    megatron-bridge, Transformer Engine, vLLM or transformers, in the stage that was under way. Only a run that ended
    by one has a subject for this check. Frames of the CPU tier's stand-ins count as their caller's where torch refused
    what they were given; the finding says so.
    Why it matters: a model that the stack refuses on a mesh is what a gate is asked about, and no error of the gate.
    Evidence: load/stack-failure of the controller.
    Tolerance and its source: exact.
    What it does not catch: signals, deadlines, memory that runs out, and errors of this package, which end a command
    with exit code 3; a process that dies without an exception.
    References: Megatron-Bridge OLMoE, whose norm of queries is not divided over tensor-parallel ranks.
    """
    for item in trace.of(StackFailure):
        stage, hint = Stage[item.at.upper()] if item.at else Stage.LOAD, "; ".join(_hints(item, trace.manifest))
        at, sentence, same = At(stage, item.during, item.owner), item.sentence, not item.message
        yield compare_value(at, item.where, item.message, "no failure", same=same, sentence=sentence, hint=hint)


def _hints(item: StackFailure, run: Manifest) -> Iterator[str]:
    if item.missing:
        yield f"no mesh changes it: install what provides `{item.missing}`"
        return
    if item.message.startswith("ImportError"):
        yield "no mesh changes it: install the package that it names"
        return
    if item.stand_in:
        yield f"it came out of a stand-in of the CPU tier ({item.stand_in}), so a GPU tells whether it needs one"
    if item.name.startswith("trainer rank"):
        sizes = {} if run.mesh is None else msgspec.structs.asdict(run.mesh)
        cut = [f"--{name} 1" for name in _CUTS if (sizes.get(name) or 1) > 1]
        if cut:
            yield f"try {', '.join(cut)}{' each' if len(cut) > 1 else ''}: that tells whether it belongs to the mesh"
        elif run.world_size == 1:
            yield "the trainer had one rank, so no cut of the model brought it about"
    elif "engine" in item.name and run.engine_ranks > 1:
        yield "try --engine-tp 1 and --engine-pp 1: that tells whether it belongs to the engine's parallelism"
    elif "engine" in item.name and run.engine == "vllm":
        yield "no mesh of the trainer changes it; try --engine hf to have the rest judged"


@check(
    "WGT001", needs=(ExpectedShard, LoadedShard),
    applies=on(golden=LAYOUT, roundtrip=LAYOUT, step=LOADED & LAYOUT, loop=NEEDS),
)  # fmt: skip
def loaded_shard_differs(trace: Trace) -> Iterator[Comparison]:
    """Every live parameter and buffer of every trainer rank holds the checkpoint's bits after load.

    What it checks: on each rank, names of live parameters and persistent buffers against the independent layout
    (`verifier/export/names.py`), both ways; dtype, shape and bits of each against the slice that this layout cuts from
    the checkpoint, in training from the folder that the config names, if any.
    Why it matters: a mapping that is wrong in the same way on import and export round-trips to identity.
    Evidence: load/expected, load/shard, per rank.
    Tolerance and its source: bitwise; loading copies.
    Where to look: the import mapping of this parameter, and what ran after the load.
    What it does not catch: a wrong forward on right weights (LGP001); for a model whose layout was derived from a
    numbered checkpoint, as the report's header says then, a load that errs alike on all ranks.
    References: Megatron-Bridge#3743, prime-rl#1145, prime-rl#3333, verl#2029.
    """
    says = "the live model", "the checkpoint, cut by layout"
    ranks = sorted({item.rank for item in trace.of(ExpectedShard, version=0)})
    yield from compare_ranks(trace, (LoadedShard, 0), (ExpectedShard, 0), says, ranks)


@check(
    "WGT002", needs=(LoadedShard, UpdatedShard),
    applies=on(
        golden=REPLICAS,
        roundtrip=REPLICAS,
        step=UPDATED & REPLICAS,
        loop=recorded(LoadedShard) & several(UpdatedShard),
    ),
)  # fmt: skip
def replica_differs(trace: Trace) -> Iterator[Comparison]:
    """Copies of one shard hold the same bits on every rank that has one, tied embeddings included.

    What it checks: parameters that the mesh replicates (norms and routers over tp, everything over dp and cp, experts
    over expert dp) and the two copies of a tied embedding, after load and after every step.
    Why it matters: an export reads the first owner of each tensor, so drift between copies never shows in it.
    Evidence: load/shard and train/shard with the replica key that the layout gives.
    Tolerance and its source: bitwise; replicas receive the same reduced gradient and do the same arithmetic.
    Where to look: the gradient reduction of this parameter over the axes that replicate it.
    What it does not catch: copies that are all wrong alike (WGT001, LSS001).
    References: verl#5702, RL#3716, RL#666, Megatron-Bridge `broadcast_from_pp_rank`.
    """
    groups: dict[tuple[Stage, int, str], list[ShardRecord]] = defaultdict(list)
    for kind in (LoadedShard, UpdatedShard):
        for item in trace.of(kind):
            groups[item.stage, item.version, item.replica].append(item)
    for first, *others in groups.values():
        for item in others:
            same = item.digest == first.digest
            sentence = f"two copies of `{item.name}` differ: {owner_of(item)} and {owner_of(first)}"
            says = "", f"{owner_of(first)} holds the other copy as `{first.name}`"
            yield compare_value(
                item, item.name, describe(item), describe(first), same=same, sentence=sentence, says=says
            )
