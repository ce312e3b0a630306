"""Every step of a policy-gradient run: rewards, advantages, importance factors, staleness, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from verifier.checks.answers import gold_stated, stated_value
from verifier.checks.conditions import EXAMINED, GRPO, REWARDED, UPDATED
from verifier.checks.engine_mismatch import MEASURED, bound_in_fp32, greatest_nats
from verifier.checks.logprob_bounds import GREATEST_NOISES
from verifier.checks.loss_rows import updates_of
from verifier.core import ragged
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.condition import condition, knob, on, recorded, told
from verifier.core.records_policy import Advantages, Drops, GivenRewards, LossTerms, PolicyColumns, UpdateRatios
from verifier.core.records_tokens import SampledNoise

FACTOR = Tolerance(
    absolute=1e-10, unit="of the greatest input", source="float64: exp of a sum of differences, in another order"
)
LIMIT = 20.0
"""Log-ratios are clamped to it before they are exponentiated, nats."""
CLAMPED_RATIO = 0.999999
"""Least distance from 1 of a ratio that is clamped: exp(-20) is 2e-9."""
CLAMPED_KL = LIMIT - 1
"""Least KL estimate of a token whose distance from the reference is clamped, nats: exp(-d) - 1 + d at d = 20."""
FLOOR = -1e4
"""Least log-probability that counts, nats."""


SECOND_READER = condition(
    "the reward has no second reader",
    lambda run: knob(run, "grpo.reward") == "answer" or knob(run, "data.rollouts") is not None,
)  # fmt: skip


@check(
    "RWD001", needs=(GivenRewards,),
    applies=on(
        step=GRPO & REWARDED & SECOND_READER,
        export=EXAMINED & SECOND_READER,
        loop=recorded(GivenRewards) & told("gold answers", "no gold answer is known"),
    ),
)  # fmt: skip
def reward_differs_from_second_reader(trace: Trace) -> Iterator[Comparison]:
    """Every reward of a right number is what a second reader of the answer gives, which shares no code with the first.

    What it checks: per rollout whose text and gold answer are known, the reward against a reader that goes through the
    text character by character: of the reward `answer`; and of recorded rollouts whose reward has no name, if all of
    their batch are 0 or 1, where the gold answer is a number and the text has no backslash, as LaTeX has.
    Why it matters: a window that cuts a long answer, a gold answer that cannot be read and counts as right, a number
    with a comma: the policy learns what the reward says.
    Evidence: reward/rewards.
    Tolerance and its source: exact; values are compared as fractions.
    Where to look: how the reward reads the answer and the gold answer.
    What it does not catch: rewards of other functions, such as -1 and 1, or `math_verify` of LaTeX; of recorded
    rollouts without `rewarded_by` a gold answer that is no number; a rule that both readers have wrong.
    References: verl#7274, cookbook#335, SkyRL#1816.
    """
    for item in trace.of(GivenRewards):
        named = item.reward == "answer"
        if not named and (item.reward or not set(item.rewards) <= {0.0, 1.0}):
            continue
        for name, text, answer, reward in zip(item.ids, item.texts, item.answers, item.rewards, strict=True):
            if text is None or answer is None:
                continue
            gold = gold_stated(answer)
            if not named and (gold is None or "\\" in text):
                continue
            expected = float(gold is not None and stated_value(text) == gold)
            says = f"the reward, for `{text[-40:]}`", f"the second reader; the gold answer is `{answer}`"
            yield compare_value(item, name, reward, expected, subject=f"the reward of `{name}`", says=says)


@check(
    "ADV003", needs=(PolicyColumns, Advantages),
    applies=on(step=GRPO, loop=recorded(PolicyColumns, Advantages, Drops)),
)  # fmt: skip
def policy_input_differs(trace: Trace) -> Iterator[Comparison]:
    """Every token's inputs of the policy loss are those that the config names: divisor, advantage, importance factor.

    What it checks: per rollout, over its tokens in the loss: the log-probability that the ratio divides by is `old` or
    `engine`, as the config says; the advantage is the rollout's, times the truncated importance weight and the mask
    that the textbook makes of `old` and `engine`. And no token in the loss was sampled by weights older than the bound,
    or newer than those that are trained.
    Why it matters: a ratio against the wrong policy ignores staleness, or is always 1; a cap on the wrong level lets
    one sequence rule the step.
    Evidence: advantage/policy, advantage/advantages.
    Tolerance and its source: bitwise; log-probabilities and versions are copied. 1e-10 for factors, float64.
    What it does not catch: a log-probability that is wrong itself (LGP001, LGP003).
    References: SkyRL#1315, miles#1829, verl rollout_corr.
    """
    for item in trace.of(PolicyColumns):
        arrays = trace.arrays(item)
        advantage = {
            name: float(value)
            for found in trace.of(Advantages, version=item.version)
            for name, value in zip(found.ids, found.advantages, strict=True)
        }
        parts = {name: ragged.split(array, item.lengths) for name, array in arrays.items()}
        for place, name in enumerate(item.ids):
            rows = {key: values[place] for key, values in parts.items()}
            yield from _policy_inputs(item, name, rows, advantage.get(name, math.nan))


def _policy_inputs(
    item: PolicyColumns, name: str, rows: Mapping[str, np.ndarray], advantage: float
) -> Iterator[Comparison]:
    mask, over = rows["mask"].astype(bool), item.ratio_over
    divisor, wanted = rows["divisor"][mask], rows[over][mask]
    same = bool((divisor == wanted).all())
    sentence = f"the ratio of `{name}` divides by other log-probabilities than `{over}`"
    found, hint = "" if same else _which(rows, mask, divisor), "look at which policy the ratio is taken against"
    yield compare_value(item, f"{name} (divisor)", found, f"`{over}`", same=same, sentence=sentence, hint=hint)
    expected = advantage * _factors(item, rows["old"][mask], rows.get("engine", rows["old"])[mask])
    gap = float(np.abs(rows["advantage"][mask] - expected).max(initial=0.0))
    bound = FACTOR.absolute * max(1.0, float(np.abs(expected).max(initial=0.0)))
    what = f"{name} (advantage)"
    subject = f"the gap of a token's advantage in `{name}` to {advantage:.6g} times its factor"
    hint = "look at the level, the cap and the mask of importance weights"
    yield compare_value(item, what, gap, None, subject=subject, allowed=FACTOR, bound=bound, hint=hint)
    versions = rows["version"][mask]
    behind = item.trained_version - versions
    late = bool(((behind > item.max_staleness) | (behind < 0)).any())
    worst = int(versions[np.argmax(np.abs(behind))]) if late else 0
    sentence = f"a token of `{name}` was sampled by version {worst}, and trains version {item.trained_version}"
    found, right = f"version {worst}", f"{item.trained_version - item.max_staleness} to {item.trained_version}"
    hint, at = "look at when rollouts are dropped for their age, and at a token's version", At(Stage.DATA, item.version)
    yield compare_value(at, f"{name} (version)", found, right, same=not late, sentence=sentence, hint=hint)


def _which(rows: Mapping[str, np.ndarray], mask: np.ndarray, divisor: np.ndarray) -> str:
    equal = [name for name in ("old", "engine", "reference") if name in rows and (divisor == rows[name][mask]).all()]
    return f"equals `{equal[0]}`" if equal else "equals none of the log-probabilities"


def _factors(item: PolicyColumns, old: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """Importance factor of each token in the loss of one rollout."""
    difference = [
        max(float(a), FLOOR) - max(float(b), FLOOR) for a, b in zip(old.tolist(), engine.tolist(), strict=True)
    ]
    weight = [1.0] * len(difference)
    if item.weight_level:
        weight = [min(ratio, item.weight_cap) for ratio in _ratios(difference, item.weight_level)]
    if item.mask_level:
        kept = [item.mask_low <= ratio <= item.mask_high for ratio in _ratios(difference, item.mask_level)]
        weight = [value if stays else 0.0 for value, stays in zip(weight, kept, strict=True)]
    return np.array(weight)


def _ratios(difference: Sequence[float], level: str) -> list[float]:
    total = math.fsum(difference)
    share = total if level == "sequence" else total / max(len(difference), 1)
    return [math.exp(min(max(value if level == "token" else share, -LIMIT), LIMIT)) for value in difference]


def _loops_bound(trace: Trace, version: int) -> float:
    """Most nats that two passes of a recorded loop over the same weights may be apart; 0 of runs of this trainer."""
    if trace.manifest.command != LOOP:
        return 0.0
    if trace.manifest.dtype in ("", "float32"):
        temperature = next((terms.temperature for terms in trace.of(LossTerms, version=version)), 1.0)
        return bound_in_fp32(trace, version, temperature).absolute
    noise = next(trace.of(SampledNoise, version=version))
    return GREATEST_NOISES * float(greatest_nats(noise, np.array([-math.inf]))[0])


def _current_is_old(trace: Trace) -> Iterator[Comparison]:
    """Log-probabilities of the first update of a batch against `old`, where the ratio divides by the engine's."""
    firsts = {(item.version, item.name) for item in trace.of(UpdateRatios) if item.first and item.ratio_over != "old"}
    for update in updates_of(trace) if firsts else ():
        columns = update.columns
        if (columns.version, columns.name) not in firsts:
            continue
        for policy in trace.of(PolicyColumns, version=columns.version):
            rows = dict(zip(policy.ids, ragged.split(trace.array(policy, "old"), policy.lengths), strict=True))
            old = np.concatenate([rows[name] for name in columns.ids])[update.place]
            gaps = np.abs(update.rows["current"].astype(np.float64) - old)
            gaps = np.where(gaps <= _loops_bound(trace, columns.version), 0.0, gaps)
            yield _scored_alike(gaps, f"log-probabilities of {columns.name}", columns.version, "the loss")


def _reference_is_old(trace: Trace) -> Iterator[Comparison]:
    """The reference's log-probabilities of all mini-batches against `old`, before the first update of the run."""
    for version in sorted({item.version for item in trace.of(UpdateRatios) if item.at_reference}):
        for policy in trace.of(PolicyColumns, version=version):
            arrays = trace.arrays(policy)
            own = arrays.get("own", arrays["mask"]).astype(bool)  # traces of older runs have the second alone
            for name, reader in (("penalty_reference", "the penalty"), ("reference", "the loss")):
                if name in arrays:
                    gaps = np.abs(arrays[name].astype(np.float64) - arrays["old"])[own]
                    yield _scored_alike(gaps, "log-probabilities of the reference", version, reader)


def _scored_alike(gaps: np.ndarray, what: str, version: int, read_by: str) -> Comparison:
    worst = float(np.max(gaps, initial=0.0))  # NaN stays
    subject = f"the {what} that {read_by} reads, in nats from `old` by the same weights,"
    at, what, part = At(Stage.LOGPROB, version), f"{what} that {read_by} reads", f"tokens: {np.count_nonzero(gaps):,}"
    badness = worst if math.isfinite(worst) else math.inf
    return compare_value(at, what, worst, 0.0, subject=subject, badness=badness, mismatched=part)


@check("LSS003", needs=(UpdateRatios,), applies=on(step=GRPO & UPDATED, loop=recorded(UpdateRatios) & MEASURED))
def first_ratio_is_not_one(trace: Trace) -> Iterator[Comparison]:
    """Before the weights have moved the ratio to `old` is exactly 1, and at the reference the KL is exactly 0.

    What it checks: per rank, the first update of each batch whose ratio divides by `old`: the greatest distance of a
    ratio from 1; and the first update of the run: the greatest KL estimate. In every update: no token is clamped where
    all ratios and KL estimates are those of log-ratios within 20 nats. Of the first update of each batch whose ratio
    divides by `engine`: the log-probability of each token in the loss against `old`. And before the first update of the
    run: the reference's log-probability of each answer's token against `old`, in all mini-batches, wherever the KL is.
    Why it matters: log-probabilities of another temperature, of a dropout that is on, of other weights or of shifted
    tokens all show here, at no cost, in every step.
    Evidence: loss/ratios, and beside them loss/rows, advantage/columns and advantage/policy.
    Tolerance and its source: exact; the same weights score the same micro-batches by the same kernels. A recorded loop
    may score batches of other shapes: as LGP009, for one token.
    Where to look: temperature, dropout, weights and alignment of both passes.
    What it does not catch: later updates of a batch, whose ratio is not 1, and KL estimates of weights far from the
    reference: these may be clamped; a reference that is scored wrongly from a later step on (LGP001, LGP013); an `old`
    and a `current` that are wrong alike (LGP001).
    References: trl#4159, OpenRLHF#853, SkyRL#1353, prime-rl#2601, marin#1741.
    """
    yield from _current_is_old(trace)
    yield from _reference_is_old(trace)
    for item in trace.of(UpdateRatios):
        facts, nats = [], _loops_bound(trace, item.version)
        if item.first and item.ratio_over == "old":
            facts.append(("ratio", "greatest distance of a ratio from 1", float(item.ratio_gap)))
        if item.at_reference:
            facts.append(("KL", "greatest KL estimate", float(item.kl_gap)))
        far = float(item.ratio_gap) >= CLAMPED_RATIO or float(item.kl_gap) >= CLAMPED_KL
        facts.append(("clamps", "number of clamped tokens", 0.0 if far else float(item.clamped)))
        at = At(Stage.LOGPROB, item.version, owner_of(item))
        for what, words, actual in facts:
            badness, place = actual if math.isfinite(actual) else math.inf, f"of {item.name} on rank {item.rank}"
            why = f"no log-ratio is beyond {LIMIT:g} nats" if what == "clamps" else "the weights have not moved"
            subject, says = f"the {words} {place}", ("", why)
            texts = Given(subject=subject, says=says, badness=badness)
            same = actual <= (math.expm1(nats) if what == "ratio" else 0.0)
            yield compare_value(at, f"{what} {place}", actual, 0.0, same=same, **texts)
