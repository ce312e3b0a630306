"""Entropies that a training step's loss and its metrics read, on steps that transformers computes too."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.stages.advantage.records import LossColumns
from verifier.stages.checks_conditions import ENTROPIES, SAMPLED
from verifier.stages.logprob.checks_logprobs import (  # fmt: skip
    FEW_TOKENS,
    FP32,
    GREATEST_NOISES,
    NOISES,
    at_temperature,
    most_beyond,
    rounding,
    wider,
)
from verifier.stages.logprob.records import OracleEntropy, TrainerLogprobs
from verifier.stages.loss.checks_loss_rows import worst_rows
from verifier.stages.loss.records import LossRows
from verifier.stages.pack.checks_packing import UpdateRows, updates_of


@check(
    "LGP012",
    needs=(LossRows, LossColumns, OracleEntropy),
    applies=on(step=SAMPLED, loop=recorded(LossRows, LossColumns) & ENTROPIES),
)
def entropy_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The entropy at each token in the loss is that of the distribution that the run samples from and trains.

    What it checks: on sampled steps of a training run (`verify.every`), per rollout of each update, or some of them
    (`verify.rollouts`), the entropy that the loss was given at each of its tokens, against transformers in fp32 with
    the weights before the update, at the run's temperature, over the whole vocabulary.
    Why it matters: an entropy of logits before the temperature, or of one rank's slice of the vocabulary, is shown as
    the policy's, and no gradient betrays it while the weight of the entropy is 0.
    Evidence: loss/rows, logprob/entropy, advantage/columns (arrays).
    Tolerance and its source: fp32 12 times what logits that differ as transformers' in fp32 do from its own in float64
    can change the entropy at a token of the rollout by at most; at least 1e-5 nats, divided by a temperature below 1.
    bf16 three times what transformers in bf16 differs by at most from fp32 on all tokens of the step's updates, those
    of prompts too, or twice what logits that differ as those do can change the entropy at a token of the rollout by, if
    that is more, for all but 29 tokens: chance puts more beyond it with 1e-9, whatever the distribution. Of an update
    with fewer than 100 tokens in the loss any finite one.
    What it does not catch: steps between the sampled ones; a weight of the entropy that is wrong (LSS004); in bf16 few
    tokens.
    References: OpenRLHF#1319.
    """
    for update in updates_of(trace):
        yield from compare_entropies(trace, update)


def compare_entropies(trace: Trace, update: UpdateRows) -> Iterator[Comparison]:
    """Compare the entropies of an update with the oracle's; none if transformers did not compute the step."""
    name, version = update.columns.name, update.columns.version
    # Without scores by the weights before it, as in fine-tuning, nothing else tells a wrong forward pass from the loss.
    at = At(Stage.LOGPROB, version if trace.has(TrainerLogprobs) else version - 1)
    noise = max((float(oracle.noise) for oracle in trace.of(OracleEntropy, version=version)), default=0.0)
    for oracle in trace.of(OracleEntropy, version=version, name=name):
        scale, exact = trace.arrays(oracle).get("scale"), trace.manifest.dtype == "float32"
        told = update if oracle.rollouts is None else update.of(oracle.rollouts)
        yield from _compare(at, told, oracle, trace.array(oracle), noise, scale, exact)


def _compare(
    where: At, update: UpdateRows, oracle: OracleEntropy, entropy: np.ndarray, noise: float,
    scale: np.ndarray | None, exact: bool,
) -> Iterator[Comparison]:  # fmt: skip
    columns, num = update.columns, int(update.in_loss.sum())
    if len(entropy) != num:
        raise LookupError(f"the oracle gave {len(entropy):,} entropies for the {num:,} tokens of {columns.name}")
    order = np.cumsum(update.in_loss)[update.place] - 1
    expected, actual = entropy[order], update.rows["entropy"].astype(np.float64)
    gaps = np.nan_to_num(np.abs(actual - expected), nan=np.inf, posinf=np.inf)
    of_all = _bound(GREATEST_NOISES * noise, oracle.temperature, len(entropy), exact)
    own = np.zeros(len(columns.ids))  # the greatest of each rollout, as one place's own may be near zero by chance
    if scale is not None:
        np.maximum.at(own, update.rollout, scale[order])
    bounds = [wider(of_all, _by_logits(float(x), exact)) for x in own]
    if not exact and len(gaps):
        yield _beyond(where, update, gaps, np.array([bound.absolute for bound in bounds]))
    for at in worst_rows(update.rollout, gaps) if exact else ():
        name, bound, gap = columns.ids[update.rollout[at]], bounds[update.rollout[at]], float(gaps[at])
        what = f"{name} in {columns.name}"
        subject = f"in {columns.name} the entropy, nats, at a token of `{name}`"
        says = "the trainer", f"transformers in fp32, at a temperature of {oracle.temperature:g}"
        hint = "look at the temperature, and at what is summed over the ranks of a vocabulary"
        left, right = float(actual[at]), float(expected[at])
        yield compare_value(where, what, left, right, subject=subject, says=says, allowed=bound, gap=gap, hint=hint)


def _beyond(at: At, update: UpdateRows, gaps: np.ndarray, bounds: np.ndarray) -> Comparison:
    """Number of tokens off by more than their rollout's bound in bfloat16: noise of single ones has long tails."""
    columns, beyond = update.columns, int((gaps > bounds[update.rollout]).sum())
    most = most_beyond(len(gaps), len(gaps))
    worst = columns.ids[update.rollout[int(np.argmax(gaps))]]
    return compare_value(
        at, f"entropies of {columns.name}", beyond if np.isfinite(gaps).all() else math.inf, None,
        subject=f"the number of tokens in {columns.name} whose entropy is off by more than noise explains",
        allowed=Tolerance(absolute=most, unit="tokens", source="as many exceed the noise of as many others by chance"),
        hint=f"look at `{worst}`, the temperature, and what is summed over the ranks of a vocabulary",
    )  # fmt: skip


def _by_logits(scale: float, exact: bool) -> Tolerance:
    """Bound by what logits can change an entropy of a rollout by, nats."""
    if exact:
        return rounding(scale)
    source = f"bf16: {NOISES} times what its differences of logits can change an entropy of the rollout by"
    return Tolerance(absolute=NOISES * scale, unit="nats", source=source)


def _bound(noise: float, temperature: float, num_tokens: int, exact: bool) -> Tolerance:
    """Bound on every token of a step; in fp32 the least that is allowed."""
    if exact:
        return at_temperature(FP32, temperature)
    tokens = f"on the tokens of the step's updates, times {GREATEST_NOISES}"
    if num_tokens < FEW_TOKENS:
        return Tolerance(absolute=math.inf, unit="nats", source=f"{num_tokens} tokens are no floor, so any finite one")
    source = f"this run's noise: its dtype against fp32 {tokens}"
    return Tolerance(absolute=noise, unit="nats", source=source)
