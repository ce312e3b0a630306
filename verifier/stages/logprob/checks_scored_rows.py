"""Log-probabilities of a scoring pass as ranks made them, row by row, against those that the policy loss reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from verifier.core.check import LOOP, At, Comparison, Stage, Trace, check, compare_set, compare_value
from verifier.core.condition import on, recorded
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.checks_conditions import GRPO, UPDATED
from verifier.stages.logprob.records import ScoredRows
from verifier.stages.pack.checks_packing import POSITION_BITS

COLUMNS = {"old": "current", "reference": "reference", "penalty_reference": "reference"}
"""Column of a batch -> weights of the pass that made it."""


@check(
    "LGP017",
    needs=(PolicyColumns, ScoredRows),
    applies=on(step=GRPO & UPDATED, loop=recorded(PolicyColumns, ScoredRows)),
)
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
                yield from _compare(policy, column, read, scored)


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


def _compare(policy: PolicyColumns, column: str, read: np.ndarray, made: np.ndarray | None) -> Iterator[Comparison]:
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
