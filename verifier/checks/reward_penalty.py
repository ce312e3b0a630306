"""KL penalty in the reward of each rollout of a policy-gradient run, by the textbook."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from verifier.checks.conditions import GRPO, REFERENCE
from verifier.checks.estimators import ROUNDOFFS
from verifier.checks.policy_step import FLOOR, LIMIT
from verifier.core import ragged
from verifier.core.check import Comparison, Tolerance, Trace, check, compare_value
from verifier.core.condition import condition, knob, on, recorded, told
from verifier.core.records_policy import Advantages, PolicyColumns

PENALTY = Tolerance(
    absolute=1e-10, unit="of the weighted sum of magnitudes", source="float64: a sum over tokens, in another order"
)


TERMS = 8
"""Roundings of an estimate, and of the weight that its sum is multiplied by, in a recorded loop's own dtype."""
IN_REWARD = condition("no KL penalty in the reward", lambda run: knob(run, "grpo.kl_in") == "reward")


@check(
    "ADV004",
    needs=(Advantages, PolicyColumns),
    applies=on(
        step=GRPO & REFERENCE & IN_REWARD,
        loop=recorded(Advantages, PolicyColumns) & told("penalties", "no KL penalty in the reward"),
    ),
)
def penalty_differs_from_divergence(trace: Trace) -> Iterator[Comparison]:
    """Every reward is lowered by the weighted KL estimate, summed over the rollout's own tokens in the loss.

    What it checks: per rollout, dropped ones included, the penalty against weight times the sum of k1, k2 or k3 in
    float64, from the recorded log-probabilities `old` and of the reference, and the mask before any filter.
    Why it matters: a penalty of the wrong sign rewards distance from the reference; a mean over tokens, or a sum over
    the prompt too, weighs rollouts by their lengths. Advantages are right for these rewards all the same.
    Evidence: advantage/advantages, advantage/policy ("old", "penalty_reference", "own").
    Tolerance and its source: 1e-10 of the weighted sum of magnitudes; float64. Of a recorded loop in less, as many
    roundings of its dtype as tokens, and 8.
    Where to look: the sign, the weight, the estimate and the mask of the KL in the reward.
    What it does not catch: log-probabilities that are wrong themselves (LGP001); a reference that moved (LGP010).
    References: verl#179, trlx#441, slime#1247, slime#1372.
    """
    for policy in trace.of(PolicyColumns):
        arrays = trace.arrays(policy)
        if not {"old", "penalty_reference", "own"} <= arrays.keys():
            continue
        columns = [ragged.split(arrays[name], policy.lengths) for name in ("old", "penalty_reference", "own")]
        parts = zip(policy.ids, *columns, strict=True)
        rows = {name: (old[own.astype(bool)], reference[own.astype(bool)]) for name, old, reference, own in parts}
        for item in trace.of(Advantages, version=policy.version):
            for name, actual in zip(item.ids, item.penalties, strict=True):
                old, reference = (side.tolist() for side in rows[name])
                estimates, size = _estimates(old, reference, item.kl_kind)
                right = item.kl_weight * math.fsum(estimates)
                rounding = 0.0 if item.dtype == "float64" else (len(old) + TERMS) * ROUNDOFFS[item.dtype]
                most = max(PENALTY.absolute, rounding) * item.kl_weight * size + 1e-300
                says = "", f"{item.kl_weight:g} times the sum of {item.kl_kind} over {len(old)} tokens"
                subject = f"the KL penalty in the reward of `{name}`"
                yield compare_value(item, name, actual, right, subject=subject, says=says, allowed=PENALTY, bound=most)


def _estimates(old: Sequence[float], reference: Sequence[float], kind: str) -> tuple[list[float], float]:
    """Estimate of KL(old || reference) at each token, nats, and the sum of the magnitudes that rounding is of."""
    found, size = [], 0.0
    for own, other in zip(old, reference, strict=True):
        distance = max(own, FLOOR) - max(other, FLOOR)
        if kind == "k1":
            value = distance
        elif kind == "k2":
            value = 0.5 * distance**2
        else:
            bounded = min(max(distance, -LIMIT), LIMIT)
            value = math.expm1(-bounded) + bounded
        found.append(value)
        size += abs(distance) + abs(value)
    return found, size
