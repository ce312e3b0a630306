"""Adapters as they begin: random A of which no two shards are alike, B of zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verifier.checks.conditions import ADAPTER, EXPORTS, FIRST, LAYOUT, UPDATED
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value, owner_of
from verifier.core.condition import on
from verifier.core.records_weights import AdapterShard, AdapterSpread

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
