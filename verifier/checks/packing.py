"""The token path from rollouts to each rank's micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.stage import Stage
from verifier.core.trace import Trace

if TYPE_CHECKING:
    import torch


@check("PCK001", needs=((Stage.PACK, "ledger"),), scope="tokens")
def token_misplaced(trace: Trace) -> Iterator[Comparison]:
    """Every token of every rollout is predicted by one row, once, over all ranks, and carries its own fields there.

    What it checks: the ledger: sentinels that travelled with each token through packing and sharding, against what the
    run says of it, which is stated apart from the code that makes rollouts: input, position, role, label, mask,
    sampled, engine log-probability, version, and the id, group, reward and prompt length of the rollout that the row
    belongs to; padding is out of the loss. Every pass that scores all sequences or trains has its ledger.
    Why it matters: an off-by-one, a wrong roll, a mask on the wrong side or a dropped sequence keeps every shape.
    Evidence: pack/ledger (the audit of all ranks' rows by rank 0).
    Tolerance and its source: exact; packing moves tokens, it computes nothing.
    What it does not catch: rows that are right but lie on the wrong context-parallel rank (PCK002).
    References: verl#4250, verl#3287, ms-swift#8427, SkyRL#1367, Automodel#2314, prime-rl#1525, AReaL#1569.
    """
    for item in trace.at(Stage.PACK, "ledger"):
        count, tokens = int(item.facts["misplaced"]), int(item.facts["tokens"])
        shown = item.facts["shown"]
        text = "; ".join(f"token {p} has {field} {got}, not {want}" for p, field, want, got in shown[:3])
        yield Comparison(
            what=item.name, same=count == 0, stage=Stage.PACK, version=item.version,
            badness=count / max(tokens, 1),
            sentence="" if not count else (
                f"in `{item.name}` {text}" + (f"; {count:,} fields are misplaced" if count > 1 else "")
            ),
            expected="each token once, with its own fields", actual=text,
            mismatched=f"fields: {count:,}, in {tokens:,} tokens", allowed="exact (packing moves, it computes nothing)",
            hint="compare position and field with the shift by one, the padding side and the shard order",
        )  # fmt: skip
    yield from _not_followed(trace)


def _not_followed(trace: Trace) -> Iterator[Comparison]:
    """One mismatch per pass over tokens that left a result and no ledger."""
    passes = {("scored", item.version) for item in trace.at(Stage.LOGPROB, "trainer", name="scored")}
    passes |= {("trained", item.version) for item in trace.at(Stage.TRAIN, "step")}
    followed = {(item.name.split(" ")[0], item.version) for item in trace.at(Stage.PACK, "ledger")}
    for name, version in sorted(passes - followed):
        yield Comparison(
            what=f"{name} tokens", same=False, stage=Stage.PACK, version=version, badness=1.0, absent=True,
            sentence=f"no ledger followed the tokens that were {name} at version {version}",
            expected="a ledger of every pass", actual="none", allowed="exact",
            hint="look at what hands a pass its micro-batches",
        )  # fmt: skip


def _zigzag(padded: list[int], cp: int, cp_rank: int) -> torch.Tensor:
    """Rows of a pack that a context-parallel rank holds; [rows] int64.

    Source:
        megatron-core, `get_batch_on_this_cp_rank`: 2 * cp chunks a sequence, rank r takes chunks r and 2 * cp - 1 - r.
    """
    import torch

    if cp == 1:
        return torch.arange(padded[0], padded[-1])
    rows: list[torch.Tensor] = []
    for begin, end in itertools.pairwise(padded):
        size = (end - begin) // (2 * cp)
        for chunk in (cp_rank, 2 * cp - 1 - cp_rank):
            rows.append(torch.arange(begin + chunk * size, begin + (chunk + 1) * size))
    return torch.cat(rows)


@check("PCK002", needs=((Stage.PACK, "layout"),), scope="tokens")
def pack_layout_wrong(trace: Trace) -> Iterator[Comparison]:
    """Each micro-batch is cut as Megatron's attention expects: lengths, alignment, zigzag rows.

    What it checks: cumulative lengths against the rollouts' own; padded lengths: no shorter, multiples of tp (sequence
    parallelism) times 2 * cp (context parallelism), and less than one multiple longer but for the last; the greatest of
    them, which kernels are told; the rows of each context-parallel rank against the two zigzag chunks per sequence.
    Why it matters: attention and rope trust these numbers; wrong ones leak state between packed neighbours, or attend
    to padding, without an error.
    Evidence: pack/layout of every (dp, cp) rank.
    Tolerance and its source: exact; SkyRL, verl and Megatron-Core agree on the multiple.
    What it does not catch: what the rows hold (PCK001).
    References: ms-swift#10071, Megatron-LM#4495, Megatron-LM#5541, prime-rl#2392, SkyRL packing_utils.
    """
    mesh = trace.manifest["mesh"]
    tp, cp = int(mesh["tp"]), int(mesh["cp"])
    multiple = tp * 2 * cp if cp > 1 else tp
    for item in trace.at(Stage.PACK, "layout"):
        facts = item.facts
        real, padded = list(facts["cu_seqlens"]), list(facts["cu_seqlens_padded"])
        lengths = [b - a for a, b in itertools.pairwise(real)]
        room = [b - a for a, b in itertools.pairwise(padded)]
        rows = trace.array(item).long()
        wrong = ""
        if not facts["filler"] and lengths != list(facts["lengths"]):
            wrong = f"lengths {lengths}, the rollouts have {list(facts['lengths'])}"
        elif any(size % multiple or size < length for size, length in zip(room, lengths, strict=True)):
            wrong = f"padded lengths {room} for {lengths}, multiples of {multiple} are needed"
        elif any(size - length >= multiple for size, length in zip(room[:-1], lengths[:-1], strict=True)):
            wrong = f"padded lengths {room} for {lengths}: more than a multiple of {multiple} is wasted"
        elif facts["max_seqlen"] != max(room):
            wrong = f"a longest sequence of {facts['max_seqlen']}, padded lengths are {room}"
        elif not rows.equal(_zigzag(padded, cp, int(facts["cp_rank"]))):
            wrong = f"rows {rows[:6].tolist()}... on context-parallel rank {facts['cp_rank']}"
        yield Comparison(
            what=item.name, same=not wrong, stage=Stage.PACK, version=item.version, badness=float(bool(wrong)),
            sentence="" if not wrong else f"{item.name} of trainer rank {item.rank} has {wrong}",
            owner=f"trainer rank {item.rank}", expected=f"multiples of {multiple}, zigzag chunks of cp {cp}",
            actual=wrong, allowed="exact", hint="look at the alignment rule and the order of context-parallel chunks",
        )  # fmt: skip


@check("PCK003", needs=((Stage.PACK, "batch"),), scope="tokens")
def ranks_see_different_batch(trace: Trace) -> Iterator[Comparison]:
    """Ranks that differ only in tensor or pipeline coordinate work on the same micro-batches.

    What it checks: the digest of every field of a rank's micro-batches against the first rank with the same data and
    context coordinate: tokens and lengths, and what only the last stage reads, such as rewards and log-probabilities.
    Why it matters: a batch, or one field of it, that is broadcast over one group too few gives ranks of one model
    different data.
    Evidence: pack/batch of all ranks.
    Tolerance and its source: exact digests.
    What it does not catch: the same wrong batch on all of them (PCK001).
    References: siiRL#69, RL#4079.
    """
    first: dict[tuple[int, str], str | None] = {}
    count: dict[tuple[int, str], int] = {}
    ranks: dict[tuple[int, str], set[int]] = {}
    for item in trace.at(Stage.PACK, "batch"):
        whole = (item.version, item.name.split(" ")[0])
        ranks.setdefault(whole, set()).add(item.rank)
        key = (item.version, item.name)
        expected = first.setdefault(key, item.digest)
        micro_batches = count.setdefault(whole, int(item.facts["micro_batches"]))
        same = item.digest == expected and int(item.facts["micro_batches"]) == micro_batches
        yield Comparison(
            what=f"{item.name} on rank {item.rank}", same=same, stage=Stage.PACK, version=item.version,
            badness=float(not same), owner=f"trainer rank {item.rank} ({item.facts['at']})",
            sentence="" if same else f"trainer rank {item.rank} works on another batch than its {item.name} peers",
            expected=str(expected), actual=str(item.digest), allowed="exact",
            hint="look at which groups the batch is handed to, and at what splits it",
        )  # fmt: skip
    for (version, name), seen in ranks.items():
        for rank in sorted(set(range(int(trace.manifest["world_size"]))) - seen):
            yield Comparison(
                what=f"{name} on rank {rank}", same=False, stage=Stage.PACK, version=version, badness=1.0, absent=True,
                sentence=f"trainer rank {rank} works on no batch that is {name} at version {version}",
                owner=f"trainer rank {rank}", expected="a batch on every rank", actual="none", allowed="exact",
                hint="look at which ranks take part in the pass",
            )  # fmt: skip
