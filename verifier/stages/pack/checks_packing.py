"""The token path from rollouts to each rank's micro-batches, and what the loss consumed of every token."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from verifier.core import ragged
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.condition import ALWAYS, NEEDS, on, several, told
from verifier.core.manifest import MeshSizes
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import UPDATED
from verifier.stages.logprob.records import TrainerLogprobs
from verifier.stages.loss.records import LogitSpreads, LossRows
from verifier.stages.pack.records import PackedBatchDigest, PackLayout, Rollouts, TokenLedger
from verifier.stages.rollout.records import SampledTokens
from verifier.stages.train.records import StepReport

POSITION_BITS = 32
"""Low bits of a sentinel, which hold the position; those above hold the rollout's index plus one."""
NO_LABEL = -100
"""Label of a row that predicts nothing."""
NO_VERSION = -1
"""Weight version of a token that no weights sampled."""
_BLOCK = 8192
"""Rows that are audited at a time: what is computed on the way stays in the processor's cache."""
Rows = Mapping[str, np.ndarray]
"""Arrays of `TokenLedger`, and ``rank`` [T] int64, the trainer rank that had the row."""
SHOWN = 3
"""Misplaced fields of one rollout that a finding lists; the count is of all."""


class Misplacement(NamedTuple):
    """One token that did not arrive at the loss as the run has it."""

    rollout: str
    """Id; empty for a row that predicts no token of any rollout."""
    position: int
    """Position of the predicted token in its rollout; -1 for a row that predicts none."""
    field: str
    """Field that differs; "row" when the token did not arrive exactly once."""
    expected: float
    actual: float
    rank: int | None = None
    """Trainer rank that had the row; None where none had."""


def joined(parts: Sequence[Mapping[str, np.ndarray]], ranks: Sequence[int]) -> dict[str, np.ndarray]:
    """Rows of all ranks, with the rank of each."""
    one = len(parts) == 1
    rows = {name: parts[0][name] if one else np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts = [len(part["sentinel"]) for part in parts]
    return {**rows, "rank": np.repeat(np.array(ranks, np.int64), counts)}


def audit(rollouts: Rollouts, tokens: Mapping[str, np.ndarray], rows: Rows) -> list[Misplacement]:
    """Compare what the loss consumed with the rollouts: every token once, and every field its own.

    The first token of a rollout has no row that predicts it; all others must be there exactly once. A row that predicts
    nothing must be out of the loss: by its mask, or without masks by its label. One out of the loss may have no label.
    `rollouts` and their arrays stand in the order in which sentinels were given. Sorted by rollout and position.

    Raises:
        LookupError: columns of the ledger have different lengths.
    """
    if len({len(column) for column in rows.values()}) > 1:
        raise LookupError(f"rows of the ledger: {', '.join(f'{len(rows[name]):,} of {name}' for name in rows)}")
    lengths = np.array(rollouts.lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    by_rollout = {
        "reward": np.array(rollouts.rewards, np.float64),
        "group": _checksums(rollouts.groups),
        "id": _checksums(rollouts.ids),
        "prompt": np.array(rollouts.prompt_lengths, np.int64),
    }
    found: list[Misplacement] = []
    arrived = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for begin in range(0, len(rows["sentinel"]), _BLOCK):
        block = {name: column[begin : begin + _BLOCK] for name, column in rows.items()}
        known, which, position = _named(block["sentinel"], lengths)
        real = block["sentinel"] != 0
        found += _strays(block, real & ~known, "row", "sentinel", 0)
        for field, value in (("label", NO_LABEL), ("mask", False), ("sampled", False), ("version", NO_VERSION)):
            if field not in block or (field == "label" and "mask" in block):  # a loop has those that its batches have
                continue
            found += _strays(block, ~real & (block[field] != value), field, field, value)
        flat = starts[which] + position
        arrived.append((flat[known], block["rank"][known]))
        if not known.any():
            continue
        before, label = np.maximum(flat - 1, 0), block.get("label", tokens["tokens"][flat])
        expected = {
            "input": tokens["tokens"][before],
            "role": tokens["roles"][before],
            "label": np.where(tokens["mask"][flat] | (label != NO_LABEL), tokens["tokens"][flat], NO_LABEL),
            "mask": tokens["mask"][flat],
            "sampled": tokens["sampled"][flat],
            "engine_logprob": tokens["logprobs"][flat],
            "version": tokens["versions"][flat],
            "position": position - 1,
            **{name: values[which] for name, values in by_rollout.items()},
        }
        for field, want in expected.items():
            if (got := block.get(field)) is None:
                continue
            if np.array_equal(got, want):
                continue
            differs = np.flatnonzero((got != want) & known)
            for at in differs[~(np.isnan(got[differs]) & np.isnan(want[differs]))]:  # a NaN is right for a NaN
                name, rank = rollouts.ids[which[at]], int(block["rank"][at])
                found.append(Misplacement(name, int(position[at]), field, float(want[at]), float(got[at]), rank))
    found += _not_once(rollouts, starts, *(np.concatenate(parts) for parts in zip(*arrived, strict=True)))
    return sorted(found, key=lambda item: item[:3])


def _named(sentinel: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask of the rows whose sentinel names a token of a rollout; their rollout's number and position, elsewhere 0."""
    sentinel = sentinel.astype(np.int64, copy=False)  # without one real sentinel the trace keeps 32 bits
    which, position = (sentinel >> POSITION_BITS) - 1, sentinel & ((1 << POSITION_BITS) - 1)
    known = (which >= 0) & (which < len(lengths))
    if len(lengths):
        known &= position < lengths.take(which, mode="clip")
    return known, which * known, position * known


def _checksums(texts: Sequence[str]) -> np.ndarray:
    return np.array([zlib.crc32(text.encode()) for text in texts], np.uint32)


def _strays(rows: Rows, wrong: np.ndarray, field: str, column: str, expected: float) -> Iterator[Misplacement]:
    """Rows that predict no token of any rollout and yet take part, by the field that says so."""
    for at in np.flatnonzero(wrong):
        yield Misplacement("", -1, field, float(expected), float(rows[column][at]), int(rows["rank"][at]))


def _not_once(rollouts: Rollouts, starts: np.ndarray, flat: np.ndarray, ranks: np.ndarray) -> Iterator[Misplacement]:
    arrived = np.bincount(flat, minlength=int(starts[-1]))
    expected = np.ones(int(starts[-1]), np.int64)
    expected[starts[:-1]] = 0
    for at in np.flatnonzero(arrived != expected):
        owner = int(np.searchsorted(starts, at, side="right")) - 1
        holders = ranks[flat == at]
        rank = int(holders[-1]) if len(holders) else None
        position = int(at - starts[owner])
        yield Misplacement(rollouts.ids[owner], position, "row", float(expected[at]), float(arrived[at]), rank)


def _mesh_of(trace: Trace) -> MeshSizes:
    if trace.manifest.mesh is None and trace.manifest.command != LOOP:
        raise LookupError("the manifest has no mesh")
    return trace.manifest.mesh or MeshSizes(dp=max(trace.manifest.world_size, 1))


@check("PCK001", needs=(Rollouts, TokenLedger), applies=on(roundtrip=ALWAYS, step=UPDATED, loop=NEEDS))
def token_misplaced(trace: Trace) -> Iterator[Comparison]:
    """Every token of every rollout is predicted by one row, once, over all ranks, and carries its own fields there.

    What it checks: the ledger: sentinels that travelled with each token through packing and sharding, against what the
    run says of it, which is stated apart from the code that makes rollouts: input, position, role, label, mask,
    sampled, engine log-probability, version, and the id, group, reward and prompt length of the rollout that the row
    belongs to; padding is out of the loss. Every pass that scores all sequences or trains has its ledger. Rollouts that
    are named after a sample of the engine have its tokens and log-probabilities, and the version that sampled it.
    Why it matters: an off-by-one, a wrong roll, a mask on the wrong side or a dropped sequence keeps every shape.
    Evidence: pack/rollouts (what the run says of every token), pack/ledger (the rows of every rank), rollout/sampled.
    Tolerance and its source: exact; packing moves tokens, it computes nothing.
    Where to look: which ranks take part in the pass, the shift by one, the padding side and the shard order.
    What it does not catch: rows that are right but lie on the wrong context-parallel rank (PCK002).
    References: verl#4250, verl#3287, ms-swift#8427, SkyRL#1367, Automodel#2314, prime-rl#1525, AReaL#1569.
    """
    loop, several_batches = trace.manifest.command == LOOP, Counter(item.version for item in trace.of(Rollouts))
    for item in trace.of(Rollouts):
        ledgers = list(trace.of(TokenLedger, name=item.name, version=item.version))
        if loop and several_batches[item.version] > 1:
            ledgers = [ledger for ledger in ledgers if ledger.rank == item.rank]
        if ledgers:
            yield from _audited(trace, item, ledgers)
            yield from _sampled(trace, item)
    passes = {("scored", item.version) for item in trace.of(TrainerLogprobs, name="scored")}
    if loop:  # what it has recorded of each version is counted by the frame
        return
    passes |= {(item.name if item.update else "trained", item.version) for item in trace.of(StepReport)}
    followed = {(item.name, item.version) for item in trace.of(TokenLedger)}
    for name, version in sorted(passes - followed):
        sentence = f"no ledger followed the tokens that were {name} at version {version}"
        at, what = At(Stage.PACK, version), f"{name} tokens"
        yield compare_value(at, what, None, "a ledger of every pass", sentence=sentence, absent=True)


def _audited(trace: Trace, item: Rollouts, ledgers: list[TokenLedger]) -> Iterator[Comparison]:
    """One comparison per rollout of a pass, and one of its padding."""
    mesh = _mesh_of(trace)
    seen = {ledger.rank for ledger in ledgers}
    owners = len(seen) if trace.manifest.command == LOOP else mesh.dp * mesh.cp
    if len(seen) < owners:
        sentence = f"{len(seen)} of {owners} ranks have a ledger of the tokens {item.name} at version {item.version}"
        sides = f"ledgers of trainer ranks {sorted(seen)}", "a ledger of every data and context rank"
        yield compare_value(item, f"{item.name} tokens", *sides, sentence=sentence, absent=True)
        return
    rows = joined([trace.arrays(ledger) for ledger in ledgers], [ledger.rank for ledger in ledgers])
    found: dict[str, list[Misplacement]] = defaultdict(list)
    for wrong in audit(item, trace.arrays(item), rows):
        found[wrong.rollout].append(wrong)
    coordinates = {ledger.rank: ledger.coordinate for ledger in ledgers}
    sizes = {**dict(zip(item.ids, item.lengths, strict=True)), "": int((rows["sentinel"] == 0).sum())}
    for name, tokens in sizes.items():
        misplaced, what = found[name], f"{item.name} {name or 'padding'}"
        text = "; ".join(
            f"token {each.position} has {each.field} {each.actual:.9g}, not {each.expected:.9g}"
            for each in misplaced[:SHOWN]
        )
        rank, badness = misplaced[0].rank if misplaced else None, len(misplaced) / max(tokens, 1)
        at = At(item.stage, item.version, "" if rank is None else f"trainer rank {rank} ({coordinates[rank]})")
        many = f"fields: {len(misplaced):,}, in {tokens:,} tokens"
        sentence, right = f"in `{what}` {text}; {many}", "each token once, with its own fields"
        same = not misplaced
        yield compare_value(at, what, text, right, same=same, sentence=sentence, badness=badness, mismatched=many)


def _sampled(trace: Trace, item: Rollouts) -> Iterator[Comparison]:
    """One comparison per rollout that is a sample of the engine at the version before: what the run says of it."""
    answers = {
        f"{sampled.name} {index}": answer
        for sampled in trace.of(SampledTokens, version=item.version - 1)
        for index, answer in enumerate(
            zip(sampled.prompts, sampled.tokens, ragged.split(trace.array(sampled), sampled.lengths), strict=True)
        )
    }
    starts, columns = np.concatenate([[0], np.cumsum(item.lengths)]), trace.arrays(item)
    for place, name in enumerate(item.ids):
        if name not in answers:
            continue
        prompt, tokens, logprobs = answers[name]
        own = {field: values[starts[place] : starts[place + 1]] for field, values in columns.items()}
        answer, first = slice(len(prompt), None), item.prompt_lengths[place]
        wrong = {
            "tokens": own["tokens"].tolist() != [*prompt, *tokens] or first != len(prompt),
            "log-probabilities": not np.array_equal(own["logprobs"][answer], logprobs),
            "weight version": not np.all(own["versions"][answer] == item.version - 1),
            "mask": not (np.all(own["mask"][answer]) and np.all(own["sampled"][answer])),
        }
        odd = ", ".join(field for field, differs in wrong.items() if differs)
        sentence = f"rollout `{name}` is not what the engine sampled: {odd}"
        what, hint = f"{item.name} {name}", "look at what makes rollouts of the engine's answers"
        yield compare_value(item, what, odd, "", sentence=sentence, hint=hint, badness=0.9)


def _zigzag(padded: Sequence[int], cp: int, cp_rank: int) -> np.ndarray:
    """Rows of a pack that a context-parallel rank holds; [rows] int64.

    Source:
        megatron-core, `get_batch_on_this_cp_rank`: 2 * cp chunks a sequence, rank r takes chunks r and 2 * cp - 1 - r.
    """
    if cp == 1:
        return np.arange(padded[0], padded[-1])
    chunks = (np.arange(begin, end).reshape(2 * cp, (end - begin) // (2 * cp)) for begin, end in pairwise(padded))
    return np.concatenate([rows[[cp_rank, -1 - cp_rank]] for rows in chunks], axis=None)


@check("PCK002", needs=(PackLayout,), applies=on(roundtrip=ALWAYS, step=UPDATED, loop=NEEDS))
def pack_layout_wrong(trace: Trace) -> Iterator[Comparison]:
    """Each micro-batch is cut as Megatron's attention expects: lengths, alignment, zigzag rows.

    What it checks: cumulative lengths against the rollouts' own; padded lengths: no shorter, multiples of tp (sequence
    parallelism) times 2 * cp (context parallelism), and less than one multiple longer but for the last; a recorded loop
    may round up as it likes; the greatest of them, which kernels are told; the rows of each context-parallel rank
    against the two zigzag chunks per sequence.
    Why it matters: attention and rope trust these numbers; wrong ones leak state between packed neighbours, or attend
    to padding, without an error.
    Evidence: pack/layout of every (dp, cp) rank.
    Tolerance and its source: exact; SkyRL, verl and Megatron-Core agree on the multiple.
    Where to look: the alignment rule and the order of context-parallel chunks.
    What it does not catch: what the rows hold (PCK001).
    References: ms-swift#10071, Megatron-LM#4495, Megatron-LM#5541, prime-rl#2392, SkyRL packing_utils.
    """
    mesh = _mesh_of(trace)
    loop = trace.manifest.command == LOOP
    tp, cp = (1, 1) if loop else (mesh.tp, mesh.cp)
    multiple = tp * 2 * cp if cp > 1 else tp
    for item in trace.of(PackLayout):
        real, padded = item.cu_seqlens, item.cu_seqlens_padded
        lengths = [b - a for a, b in pairwise(real)]
        room = [b - a for a, b in pairwise(padded)]
        rows = trace.array(item)
        wrong = ""
        if not item.filler and lengths != list(item.lengths):
            wrong = f"lengths {lengths}, the rollouts have {list(item.lengths)}"
        elif any(size % multiple or size < length for size, length in zip(room, lengths, strict=True)):
            wrong = f"padded lengths {room} for {lengths}, multiples of {multiple} are needed"
        elif not loop and any(size - own >= multiple for size, own in zip(room[:-1], lengths[:-1], strict=True)):
            wrong = f"padded lengths {room} for {lengths}: more than a multiple of {multiple} is wasted"
        elif item.max_seqlen != max(room):
            wrong = f"a longest sequence of {item.max_seqlen}, padded lengths are {room}"
        elif not np.array_equal(rows, _zigzag(padded, cp, item.cp_rank)):
            wrong = f"rows {rows[:6].tolist()}... on context-parallel rank {item.cp_rank}"
        sentence = f"{item.name} of {owner_of(item)} has {wrong}"
        right = f"multiples of {multiple}, zigzag chunks of cp {cp}"
        yield compare_value(item, item.name, wrong, right, same=not wrong, sentence=sentence)


@check(
    "PCK003",
    needs=(PackedBatchDigest,),
    applies=on(
        roundtrip=ALWAYS,
        step=UPDATED,
        loop=several(PackedBatchDigest) & told("peers", "no two ranks work on one batch"),
    ),
)
def ranks_see_different_batch(trace: Trace) -> Iterator[Comparison]:
    """Ranks that differ only in tensor or pipeline coordinate work on the same micro-batches.

    What it checks: the digest of every field of a rank's micro-batches against the first rank with the same data and
    context coordinate: tokens and lengths, and what only the last stage reads, such as rewards and log-probabilities.
    Why it matters: a batch, or one field of it, that is broadcast over one group too few gives ranks of one model
    different data.
    Evidence: pack/batch of all ranks.
    Tolerance and its source: exact digests.
    Where to look: which ranks take part in the pass, which groups the batch is handed to, and what splits it.
    What it does not catch: the same wrong batch on all of them (PCK001).
    References: siiRL#69, RL#4079.
    """
    first: dict[tuple[int, str], PackedBatchDigest] = {}
    passes: dict[tuple[int, str], list[PackedBatchDigest]] = defaultdict(list)
    for item in trace.of(PackedBatchDigest):
        peer = first.setdefault((item.version, item.name), item)
        seen = passes[item.version, item.name.split(" ")[0]]
        seen.append(item)
        same = item.digest == peer.digest and item.micro_batches == seen[0].micro_batches
        what = f"{item.name} on rank {item.rank}"
        sentence = f"trainer rank {item.rank} works on another batch than its {item.name} peers"
        yield compare_value(item, what, item.digest, peer.digest, same=same, sentence=sentence)
    for (version, name), seen in passes.items():
        for rank in sorted(set(range(trace.manifest.world_size)) - {item.rank for item in seen}):
            at = At(Stage.PACK, version, f"trainer rank {rank}")
            sentence = f"trainer rank {rank} works on no batch that is {name} at version {version}"
            right = "a batch on every rank"
            yield compare_value(at, f"{name} on rank {rank}", None, right, sentence=sentence, absent=True)


INPUT = Tolerance(
    absolute=1e-6, unit="of the value", source="fp32: one rounding of a float64 is 6e-8, and a weight is multiplied"
)
READ = ("weight", "divisor", "advantage", "reference")
"""Columns of a token that a loss may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRows:
    """Rows in the loss of one update, of all ranks, and what they should have read."""

    columns: LossColumns
    place: np.ndarray
    """[T] token of the update that each row predicts."""
    rollout: np.ndarray
    """[T] rollout that it belongs to."""
    rows: Rows
    """Rows as the ranks recorded them."""
    given: Rows
    """[T] inputs as the controller recorded them, float64."""
    in_loss: np.ndarray
    """[N] tokens of the update in the loss."""

    def of(self, rollouts: Sequence[int]) -> UpdateRows:
        """Rows of some rollouts alone, by their places."""
        kept, owner = np.isin(self.rollout, rollouts), np.repeat(range(len(self.columns.ids)), self.columns.lengths)
        rows, given = ({name: values[kept] for name, values in each.items()} for each in (self.rows, self.given))
        return replace(
            self, place=self.place[kept], rollout=self.rollout[kept], rows=rows, given=given,
            in_loss=self.in_loss & np.isin(owner, rollouts),
        )  # fmt: skip

    def log_ratios(self, loss: str) -> np.ndarray:
        """[T] log-ratio of each row to its divisor, float64, nats; of its sequence the mean (GSPO) or the sum."""
        difference = self.rows["current"].astype(np.float64) - self.given["divisor"]
        return np.asarray(self.sizes(loss) * self.shared(difference, loss))

    def sizes(self, loss: str) -> np.ndarray:
        """[T] rows of each row's sequence, where a ratio is of their sum; else 1."""
        return np.asarray(np.bincount(self.rollout)[self.rollout] if loss == "sequence" else np.ones(len(self.rollout)))

    def shared(self, values: np.ndarray, loss: str) -> np.ndarray:
        """[T] mean over each row's sequence, where the ratio is the sequence's; else the values."""
        if loss not in ("gspo", "sequence"):
            return values
        sums = np.bincount(self.rollout, values) / np.maximum(np.bincount(self.rollout), 1)
        return np.asarray(sums[self.rollout])


def updates_of(trace: Trace) -> Iterator[UpdateRows]:
    """Updates of a step whose rows were recorded, in order."""
    for columns in trace.of(LossColumns):
        version, name = columns.version, columns.name
        spreads = {item.rank: trace.arrays(item) for item in trace.of(LogitSpreads, version=version, name=name)}
        found = [*trace.of(LossRows, version=version, name=name)]
        if trace.manifest.command == LOOP:  # each process has a batch of its own
            found = [item for item in found if item.rank == columns.rank]
        parts = [{**trace.arrays(item), **spreads.get(item.rank, {})} for item in found]
        if not parts:
            continue
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        kept = joined["mask"].astype(bool)
        rows = {name: values[kept] for name, values in joined.items()}
        sentinel = rows["sentinel"].astype(np.int64)
        rollout, position = (sentinel >> POSITION_BITS) - 1, sentinel & ((1 << POSITION_BITS) - 1)
        starts = np.concatenate([[0], np.cumsum(columns.lengths)])
        place = starts[rollout] + position
        mask = trace.array(columns, "mask").astype(bool)
        given = {"weight": trace.array(columns, "weight").astype(np.float64) * int(mask.sum())}
        for policy in trace.of(PolicyColumns, version=columns.version):
            if not {*columns.ids} <= {*policy.ids}:
                continue
            given |= _of_update(trace, policy, columns)
        given = {name: values[place] for name, values in given.items()}
        yield UpdateRows(columns=columns, place=place, rollout=rollout, rows=rows, given=given, in_loss=mask)


def _of_update(trace: Trace, policy: PolicyColumns, columns: LossColumns) -> dict[str, np.ndarray]:
    number = {name: place for place, name in enumerate(policy.ids)}
    found = {}
    for name in READ[1:]:
        if name in (arrays := trace.arrays(policy)):
            parts = ragged.split(arrays[name].astype(np.float64), policy.lengths)
            found[name] = np.concatenate([parts[number[own]] for own in columns.ids])
    return found


@check("PCK004", needs=(LossRows, LossColumns), applies=on(step=UPDATED, loop=NEEDS))
def loss_read_another_token(trace: Trace) -> Iterator[Comparison]:
    """Every token in the loss is read once, with the weight, divisor, advantage and reference that it was given.

    What it checks: per rollout of an update, over all ranks: the columns that the loss read at the row that predicts a
    token, against what the controller computed for that token by id; and that each token in the loss has one row.
    Why it matters: an advantage that is shifted by one, cut for another context-parallel rank or normalised once more
    on a data-parallel rank keeps every shape, and the loss looks as ever.
    Evidence: loss/rows, advantage/columns, advantage/policy.
    Tolerance and its source: 1e-6 of the value; a float64 is rounded to float32.
    Where to look: what packs, cuts and moves the columns of a batch.
    What it does not catch: columns that were computed wrongly (ADV001, ADV003).
    References: ms-swift#8427, prime-rl#583, SkyRL#1908, RL#2787.
    """
    for update in updates_of(trace):
        columns = update.columns
        times_read = np.bincount(update.place, minlength=len(update.in_loss))
        owners = np.repeat(np.arange(len(columns.ids)), columns.lengths)
        wrong = np.bincount(owners[times_read != update.in_loss], minlength=len(columns.ids))
        greatest = {name: _greatest_gaps(update, name) for name in update.given}
        for number, name in enumerate(columns.ids):
            rows = int(wrong[number])
            worst, which = float(rows), "rows" if rows else ""
            for column, gaps in greatest.items():
                if gaps[number] > max(worst, 1.0):
                    worst, which = float(gaps[number]), column
            share = None if rows else max((float(gaps[number]) for gaps in greatest.values()), default=0.0)
            found = f"{rows} tokens not once" if which == "rows" else f"another {which} than it was given"
            sentence = f"in {columns.name} the loss of `{name}` read {found}"
            at, sides = At(Stage.PACK, columns.version), (found, "each token once, with its own columns")
            texts: Given = {"badness": worst}
            what, same, words = f"{name} in {columns.name}", not which, str(INPUT)
            compared = compare_value(at, what, *sides, same=same, sentence=sentence, allowed=words, **texts)
            yield replace(compared, share=share)


def _greatest_gaps(update: UpdateRows, column: str) -> np.ndarray:
    """[R] greatest gap between what the loss read of a column and what it was given, of each rollout, in `INPUT`."""
    wanted = update.given[column]
    if column not in update.rows and np.isnan(wanted).all():  # a recorded loop has no reference
        return np.zeros(len(update.columns.ids))
    read = update.rows[column].astype(np.float64) if column in update.rows else np.zeros(len(wanted))
    gaps = np.abs(read - wanted) / (INPUT.absolute * np.maximum(np.abs(wanted), 1e-30))
    greatest = np.zeros(len(update.columns.ids))
    np.maximum.at(greatest, update.rollout, np.where(np.isnan(gaps), np.inf, gaps))
    return greatest
