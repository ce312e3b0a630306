"""A step of the GRPO family as a textbook has it: whole sequences, loops, float64, and torch's gradient through them.

It shares no code with `verifier.algorithms`; made-up batches and recipes to compare on come with it.
"""

import math
import statistics
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from verifier.algorithms.aggregation import AGGREGATIONS
from verifier.algorithms.kl import KL_KINDS
from verifier.algorithms.off_policy import LEVELS, CorrectionOptions
from verifier.algorithms.registry import BUILT_IN, LossOptions

LOSSES, ESTIMATORS = sorted(BUILT_IN["loss"]), sorted(BUILT_IN["advantage"])


@dataclass(frozen=True)
class Sequence:
    group: str
    reward: float
    mask: list
    current: list
    old: list
    engine: list
    reference: list
    entropy: list


@dataclass(frozen=True)
class Recipe:
    loss: str = "clipped"
    estimator: str = "grpo"
    how: str = "token_mean"
    options: LossOptions = field(default_factory=LossOptions)
    off_policy: CorrectionOptions = field(default_factory=CorrectionOptions)

    @property
    def constant(self):
        return 5.0 if self.how == "constant" else None


@st.composite
def batches(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.05, 0.6]))
    sequences = []
    for group in range(draw(st.integers(1, 3))):
        rewards = draw(st.sampled_from([[0.0, 1.0], [1.0], [0.1, 0.7, -2.0]]))
        for _ in range(draw(st.integers(2, 4))):
            size = draw(st.integers(0, 6))
            old = random.normal(-2.0, 1.0, size)
            sequences.append(Sequence(
                f"prompt-{group}", float(random.choice(rewards)), (random.random(size) < 0.7).tolist(),
                *((old + random.normal(0, width, size)).tolist() for width in (spread, 0.0, spread, spread)),
                random.exponential(1.0, size).tolist(),
            ))  # fmt: skip
    assume(any(any(sequence.mask) for sequence in sequences))
    return sequences


@st.composite
def recipes(draw):
    loss = draw(st.sampled_from(LOSSES))
    levels = [None, *LEVELS] if loss != "gspo" else [None, "sequence", "geometric"]
    return Recipe(
        loss, draw(st.sampled_from(ESTIMATORS)), draw(st.sampled_from(AGGREGATIONS)),
        LossOptions(
            clip_low=draw(st.sampled_from([0.0003, 0.2, 1.5])), clip_high=draw(st.sampled_from([0.0004, 0.28])),
            dual_clip=draw(st.sampled_from([None, 1.3])) if loss == "clipped" else None,
            kl_weight=draw(st.sampled_from([0.0, 0.3])), kl_kind=draw(st.sampled_from(KL_KINDS)),
            entropy_weight=draw(st.sampled_from([0.0, 0.1])),
        ),
        CorrectionOptions(
            weight=draw(st.sampled_from(levels)), cap=draw(st.sampled_from([None, 1.1, 2.0])),
            mask=draw(st.sampled_from(levels)), mask_low=0.7, mask_high=1.4,
        ),
    )  # fmt: skip


def textbook_advantages(rewards, groups, estimator, counts):
    own = {name: [r for r, g in zip(rewards, groups, strict=True) if g == name] for name in groups}
    mean = {name: statistics.fmean(values) for name, values in own.items()}
    if estimator == "grpo":
        return [0.0 if len(set(own[g])) == 1 else (r - mean[g]) / (statistics.stdev(own[g]) + 1e-6)
                for r, g in zip(rewards, groups, strict=True)]  # fmt: skip
    if estimator == "dr_grpo":
        return [r - mean[g] for r, g in zip(rewards, groups, strict=True)]
    if estimator == "rloo":
        return [r - (sum(own[g]) - r) / (len(own[g]) - 1) for r, g in zip(rewards, groups, strict=True)]
    if estimator == "reinforce++_baseline":
        rewards = [0.0 if len(set(own[g])) == 1 else r - mean[g] for r, g in zip(rewards, groups, strict=True)]
    tokens = [r for r, count in zip(rewards, counts, strict=True) for _ in range(count)]
    deviation = math.sqrt(max(statistics.pvariance(tokens), 1e-8))
    return [0.0 if len(set(rewards)) == 1 else (r - statistics.fmean(tokens)) / deviation for r in rewards]


def textbook_factors(sequence, options):
    """Importance factor of each token in the mask."""
    rows = [t for t, inside in enumerate(sequence.mask) if inside]
    ratio = {t: math.exp(sequence.old[t] - sequence.engine[t]) for t in rows}
    product = math.prod(ratio.values())
    levels = {
        "token": ratio,
        "sequence": dict.fromkeys(rows, product),
        "geometric": dict.fromkeys(rows, product ** (1 / max(1, len(rows)))),
    }
    result = {}
    for t in rows:
        weight = 1.0
        if options.weight:
            weight = levels[options.weight][t]
            weight = weight if options.cap is None else min(options.cap, weight)
        inside = options.mask is None or options.mask_low <= levels[options.mask][t] <= options.mask_high
        result[t] = weight if inside else 0.0
    return result


def textbook_policy_terms(current, sequence, advantage, recipe, factor):
    """Policy loss of each token in the mask; for GSPO that of the whole sequence, spread evenly over them."""
    low, high, rows = 1 - recipe.options.clip_low, 1 + recipe.options.clip_high, list(factor)
    one = torch.tensor(1.0, dtype=torch.float64)
    if recipe.loss == "cross_entropy":
        return {t: -current[t] for t in rows}
    if recipe.loss == "gspo":
        s = torch.exp(sum(current[t] - sequence.old[t] for t in rows) / len(rows))
        surrogate = min(s * advantage, torch.clamp(s, low, high) * advantage, key=lambda value: value.item())
        return {t: -surrogate * factor[t] for t in rows}
    result = {}
    for t in rows:
        r = torch.exp(current[t] - sequence.old[t])
        if recipe.loss == "importance":
            result[t] = -r * advantage * factor[t]
        elif recipe.loss == "cispo":
            result[t] = -min(max(r.item(), low, 0.0), high) * advantage * current[t] * factor[t]
        else:
            surrogate = min(r * advantage, torch.clamp(r, low, high) * advantage, key=lambda value: value.item())
            if recipe.options.dual_clip is not None and advantage < 0:
                surrogate = max(surrogate, recipe.options.dual_clip * advantage * one, key=lambda value: value.item())
            result[t] = -surrogate * factor[t]
    return result


def textbook_kl(current, reference, kind):
    r = torch.exp(reference - current)  # Schulman's r = p / q, with samples of q
    return {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": r - 1 - torch.log(r)}[kind]


def textbook(batch, recipe):
    """Loss of a step, and its gradient by each token's log-probability and entropy, per sequence."""
    leaves = [(torch.tensor(s.current, dtype=torch.float64, requires_grad=True),
               torch.tensor(s.entropy, dtype=torch.float64, requires_grad=True)) for s in batch]  # fmt: skip
    counts = [sum(sequence.mask) for sequence in batch]
    values = textbook_advantages([s.reward for s in batch], [s.group for s in batch], recipe.estimator, counts)
    per_sequence = []
    for (current, entropy), sequence, advantage in zip(leaves, batch, values, strict=True):
        factor = textbook_factors(sequence, recipe.off_policy)
        terms = textbook_policy_terms(current, sequence, advantage, recipe, factor) if factor else {}
        for t in terms:
            kl = textbook_kl(current[t], sequence.reference[t], recipe.options.kl_kind)
            terms[t] = terms[t] + recipe.options.kl_weight * kl - recipe.options.entropy_weight * entropy[t]
        per_sequence.append(list(terms.values()))
    if recipe.how == "token_mean":
        tokens = [term for terms in per_sequence for term in terms]
        loss = sum(tokens) / len(tokens)
    elif recipe.how == "sequence_mean":
        means = [sum(terms) / len(terms) for terms in per_sequence if terms]
        loss = sum(means) / len(means)
    elif recipe.how == "prompt_mean":
        prompts = {}
        for sequence, terms in zip(batch, per_sequence, strict=True):
            prompts.setdefault(sequence.group, []).extend(terms)
        means = [sum(terms) / len(terms) for terms in prompts.values() if terms]
        loss = sum(means) / len(means)
    else:
        loss = sum(sum(terms) for terms in per_sequence) / (len(batch) * recipe.constant)
    loss.backward()
    return loss.item(), [[zero_if_none(leaf) for leaf in pair] for pair in leaves]


def zero_if_none(leaf):
    return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).numpy()
