"""One rollout of each training step, which the trainer scored by itself, against what it got among all others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from verifier.core.check import LOOP, At, Comparison, Stage, Tolerance, Trace, check, compare_set, compare_value
from verifier.core.condition import NEEDS, condition, on
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import GRPO, ON_A_HOST, UPDATED
from verifier.stages.logprob.checks_logprobs import at_temperature
from verifier.stages.logprob.records import SampledNoise, ScoredRows, SpotScore
from verifier.stages.loss.records import LossRows
from verifier.stages.pack.checks_packing import POSITION_BITS
from verifier.stages.rollout.checks_engine_mismatch import MEASURED, bound_in_fp32, compare_beyond

MEAN = Tolerance(
    absolute=0.05, unit="nats",
    source="bf16 on CPU without a measured noise: 0 over clean runs of tiny models, and a leak is 0.6 nats and more",
)  # fmt: skip
EVERY = 8
"""Steps between two with such a rollout."""
REFERENCES = ("reference", "penalty_reference")
"""Columns of a batch with log-probabilities of the reference: with the KL in the loss, and in the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Log-probabilities of the rollout as a batch's passes gave them."""

    says: str
    alone: str
    """Array of the rollout by itself that they are compared with."""
    at: np.ndarray
    """[K] positions of the tokens."""
    nats: np.ndarray
    """[K] float64."""


SPOT = condition(
    lambda run: run.facts.why_no_spot, lambda run: not run.facts.why_no_spot, gap=True
) & condition("no rollout of this step is scored by itself", lambda run: run.facts.spot)  # fmt: skip


@check("LGP013", needs=(SpotScore,), applies=on(step=SPOT, loop=NEEDS & MEASURED & ON_A_HOST))
def logprob_differs_alone(trace: Trace) -> Iterator[Comparison]:
    """A rollout has the same log-probabilities alone in its pack as among all others of its step, and without its end.

    What it checks: one rollout of the first and every eighth judged step of training, another in each, is scored once
    more by itself with the weights before the step's first update; `old` and `reference` of the batch, and what the
    loss of the first update read, against that, token by token. So is its beginning by itself, of which no token may
    depend on those that come later. A rule of seed and step chooses the rollout, of the mini-batches in turn, the last
    one first.
    Why it matters: attention that reaches other samples of a pack or later tokens, values that come back in another
    order than their samples went, and log-probabilities of another mini-batch keep every shape, and the loss falls all
    the same.
    Evidence: logprob/spot, advantage/policy ("old", "reference"), loss/rows ("current"), advantage/columns.
    Tolerance and its source: fp32 as LGP009, for one token. In bf16 of answers that an engine samples, `old` of tokens
    in the loss, the number of those beyond three times the greatest noise, as LGP009. In bf16 where no noise is
    measured, the mean over all tokens: 0.05 nats, divided alike.
    Where to look: what attention reaches: boundaries of a pack, later tokens; and whose values come back to whom.
    What it does not catch: a pass that is wrong alone too (LGP001 on sampled steps); other rollouts of the step than
    the one; mixtures without replayed routes, whose routers may choose otherwise where two experts are nearly as good;
    in bf16 without a measured noise a few tokens, and anything on a GPU. The report names these. In bf16 with one,
    answers of four tokens or fewer, all of which chance may put beyond a floor of 640.
    References: AReaL#1442, verl#2185, transformers#46634, axolotl#1375, entrenar#310.
    """
    for spot in trace.of(SpotScore):
        arrays = trace.arrays(spot)
        if spot.mini_batches:
            yield _chosen(trace, spot)
        fp32 = trace.manifest.dtype == "float32"
        noise = None if fp32 else next(trace.of(SampledNoise, version=spot.version), None)
        for side in (*_sides(trace, spot, exact=noise is None), *_beginning(arrays)):
            alone = arrays[side.alone].astype(np.float64)[side.at - 1]
            if fp32 or noise is not None:
                yield _compare(spot, side, alone, noise, bound_in_fp32(trace, spot.version, spot.temperature))
            else:
                yield _compare_mean(spot, side, alone)


def _chosen(trace: Trace, spot: SpotScore) -> Comparison:
    batches = [item.ids for item in trace.of(PolicyColumns, version=spot.version)]
    ids = next(iter(batches or (item.ids for item in trace.of(LossColumns, version=spot.version))), ())
    least, more = divmod(len(ids), spot.mini_batches)
    sizes = [least + (at < more) for at in range(spot.mini_batches)]
    number = -(spot.step // EVERY + 1) % spot.mini_batches
    drawn = int(hashlib.blake2b(f"{spot.seed}/{spot.step}".encode(), digest_size=8).hexdigest(), 16)
    place = sum(sizes[:number]) + drawn % max(sizes[number], 1)
    expected = ids[place] if place < len(ids) else ""
    same = expected == spot.id and spot.step == spot.version
    says, what = ("", f"the rule of seed {spot.seed} and step {spot.version}"), "rollout of the step"
    left, right = f"`{spot.id}`", f"`{expected}`"
    subject = "the rollout that was scored by itself"
    return compare_value(spot, what, left, right, same=same, subject=subject, says=says, owner="")


def _sides(trace: Trace, spot: SpotScore, *, exact: bool) -> Iterator[_Side]:
    """Values that the batch's passes gave for the rollout; in less than float32 `old` alone, of tokens in the loss."""
    for policy in trace.of(PolicyColumns, version=spot.version):
        if spot.id not in policy.ids:
            continue
        place, arrays = policy.ids.index(spot.id), trace.arrays(policy)
        begin = sum(policy.lengths[:place])
        own = slice(begin, begin + policy.lengths[place])
        at = np.arange(1, policy.lengths[place])
        if not exact or not spot.mini_batches:  # a recorded loop has values of its answers alone
            at = np.flatnonzero(arrays["own"][own])
        if not len(at):
            continue
        pairs = [("old", "current")] + [(name, "reference") for name in REFERENCES if exact]
        for name, alone in pairs:
            if name in arrays and alone in trace.arrays(spot):
                says = "reference" if alone == "reference" else name
                yield _Side(says=f"`{says}`", alone=alone, at=at, nats=arrays[name][own].astype(np.float64)[at])
    first = next(trace.of(LossColumns, version=spot.version), None)
    if first is None or spot.id not in first.ids or not exact:
        return
    number = first.ids.index(spot.id)
    for item in trace.of(LossRows, version=spot.version, name=first.name):
        rows = trace.arrays(item)
        sentinel = rows["sentinel"].astype(np.int64)
        mine = (sentinel >> POSITION_BITS) - 1 == number
        if mine.any():
            at = sentinel[mine] & ((1 << POSITION_BITS) - 1)
            nats = rows["current"][mine].astype(np.float64)
            yield _Side(says=f"the loss of {first.name} on rank {item.rank}", alone="current", at=at, nats=nats)


def _beginning(arrays: Mapping[str, np.ndarray]) -> Iterator[_Side]:
    """The beginning of the rollout by itself; none in older traces."""
    if (nats := arrays.get("beginning")) is not None and len(nats):
        says, at = "its beginning by itself", np.arange(1, len(nats) + 1)
        yield _Side(says=says, alone="current", at=at, nats=nats.astype(np.float64))


def _compare_mean(spot: SpotScore, side: _Side, alone: np.ndarray) -> Comparison:
    """Mean of one side's differences, where nobody knows how far a single token may be off."""
    gap, bound = float(np.abs(side.nats - alone).mean()), at_temperature(MEAN, spot.temperature)
    subject = f"the mean gap, nats, of log-probabilities of `{spot.id}` in {side.says} to those by itself"
    what = f"{spot.id} ({side.says})"
    return compare_value(spot, what, gap, None, subject=subject, allowed=bound, owner="")


def _compare(
    spot: SpotScore, side: _Side, alone: np.ndarray, noise: SampledNoise | None, bound: Tolerance
) -> Comparison:
    """Worst token of one side, beside its bound."""
    gaps = np.abs(side.nats - alone)
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    if noise is not None:
        return replace(compare_beyond(spot, gaps, alone, noise, f"`{spot.id}` in {side.says}"), owner="")
    worst = int(np.argmax(gaps))
    subject = f"the log-probability of token {int(side.at[worst])} of `{spot.id}` in {side.says}"
    says, gap = (side.says, "alone in its pack, by the same weights"), float(gaps[worst])
    left, right = float(side.nats[worst]), float(alone[worst])
    return compare_value(
        spot, f"{spot.id} ({side.says})", left, right, subject=subject, says=says, allowed=bound, gap=gap, owner=""
    )


COLUMNS = {"old": "current", "reference": "reference", "penalty_reference": "reference"}
"""Column of a batch -> weights of the pass that made it."""


@check("LGP017", needs=(PolicyColumns, ScoredRows), applies=on(step=GRPO & UPDATED, loop=NEEDS))
def score_of_another_row(trace: Trace) -> Iterator[Comparison]:
    """Every log-probability that the policy loss reads is the one that a scoring pass of this step made for its token.

    What it checks: per rollout, `old`, and `reference` of the KL in the loss or in the reward, of each token but the
    first, against the rows of the step's scoring passes, which ranks keep as they make them. The sentinel of a row,
    which it got when it was packed, names its rollout and its token.
    Why it matters: micro-batches by tokens score samples in another order than they came, and what goes back has to be
    in the first one. Values of a neighbour, of a step before, of a cache or of the engine have the right shape, ratios
    stay near 1, and the KL is a plausible number.
    Evidence: logprob/rows, advantage/policy.
    Tolerance and its source: bitwise; values are copied.
    Where to look: which rollouts are scored, what puts scores back into the order of the samples, and what else may
    fill them in.
    What it does not catch: a pass that is wrong itself (LGP001 and LGP013); the columns behind this point (PCK004).
    References: verl#2185, PipelineRL#131, slime#914.
    """
    for policy in trace.of(PolicyColumns):
        arrays, known = trace.arrays(policy), {*policy.ids}
        for item in trace.of(ScoredRows, version=policy.version):
            strays = [name for name in item.ids if name not in known]
            subject = f"rollouts that the step has not, in the pass {item.name}"
            yield compare_set(item, f"{item.name} on {item.coordinate}", strays, subject=subject, owner="")
        made = _made(trace, policy)
        for column, which in COLUMNS.items():
            if column in arrays:
                read, scored = arrays[column].astype(np.float32), made.get(which)
                if trace.manifest.command == LOOP and scored is not None:  # which may score its answers alone
                    read, scored = (np.where(np.isnan(read) & np.isnan(scored), 0, side) for side in (read, scored))
                yield from _compare_column(policy, column, read, scored)


def _made(trace: Trace, policy: PolicyColumns) -> Mapping[str, np.ndarray]:
    """Weights of a pass -> [N] float32 over all tokens of a step, nats, NaN where not exactly one rank scored one."""
    starts, size = dict(zip(policy.ids, np.cumsum([0, *policy.lengths]).tolist(), strict=False)), sum(policy.lengths)
    found: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for item in trace.of(ScoredRows, version=policy.version):
        whole = found.setdefault(item.which, np.full(size, np.nan, np.float32))
        arrays = trace.arrays(item)
        sentinel = arrays["sentinel"].astype(np.int64)
        number, position = (sentinel >> POSITION_BITS) - 1, sentinel & ((1 << POSITION_BITS) - 1)
        begins = np.array([starts.get(name, size) for name in item.ids], np.int64)[number]
        place = begins + position
        whole[place[place < size]] = arrays["logprob"][place < size]
        times[item.which] = times.get(item.which, 0) + np.bincount(place[place < size], minlength=size)
    return {which: np.where(times[which] == 1, whole, np.nan).astype(np.float32) for which, whole in found.items()}


def _compare_column(
    policy: PolicyColumns, column: str, read: np.ndarray, made: np.ndarray | None
) -> Iterator[Comparison]:
    nats = np.full(len(read), np.nan, np.float32) if made is None else made
    other = np.cumsum(np.append(0, read != nats))
    begin = 0
    for name, length in zip(policy.ids, policy.lengths, strict=True):
        first, begin = begin + 1, begin + length
        same = other[begin] == other[first]
        worst = first if same else _worst(read, nats, first, begin)
        at = At(Stage.LOGPROB, policy.version)
        what = f"{column} of {name}"
        subject = f"`{column}` of token {worst - first + 1} of `{name}`"
        left, right = f"{read[worst]:.9g} nats in the loss" if len(read) > worst else "", _said(nats, worst)
        sentence = f"{subject} is {left}, and {right}"
        yield compare_value(at, what, left, right, same=bool(same), sentence=sentence)


def _worst(read: np.ndarray, nats: np.ndarray, begin: int, end: int) -> int:
    """Place of the greatest difference from begin to end, the first one that no rank scored before all others."""
    gaps = np.abs(read[begin:end].astype(np.float64) - nats[begin:end])
    return begin + int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps)))


def _said(nats: np.ndarray, at: int) -> str:
    if at >= len(nats):
        return ""
    return "not one rank scored it" if np.isnan(nats[at]) else f"a rank scored it as {nats[at]:.9g}"
