"""Entropies that a training step's loss and its metrics read, on steps that transformers computes too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from verifier.checks.content import times
from verifier.checks.logprob_bounds import FEW_TOKENS, FP32, GREATEST_NOISES, at_temperature
from verifier.checks.loss_rows import UpdateRows, updates_of, worst_rows
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.records_policy import LossRows, OracleEntropy
from verifier.core.records_trainer import LossColumns
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("LGP012", needs=(LossRows, LossColumns, OracleEntropy), scope="entropy")
def entropy_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The entropy at each token in the loss is that of the distribution that the run samples from and trains.

    What it checks: on sampled steps of a training run (`verify.every`), per rollout of each update, the entropy that
    the loss was given at each of its tokens, against transformers in fp32 with the weights before the update, at the
    run's temperature, over the whole vocabulary.
    Why it matters: an entropy of logits before the temperature, or of one rank's slice of the vocabulary, is shown as
    the policy's, and no gradient betrays it while the weight of the entropy is 0.
    Evidence: loss/rows, logprob/entropy, advantage/columns (arrays).
    Tolerance and its source: fp32 1e-5 nats as LGP001, divided by a temperature below 1; or three times what
    transformers in fp32 differs by at most from itself in float64 on all tokens of the step's updates, those of prompts
    too, if that is more. bf16 three times what transformers in bf16 differs by at most from fp32 on them; of an update
    with fewer than 100 tokens in the loss any finite one.
    What it does not catch: steps between the sampled ones, but for what MET001 shows of their mean; a weight of the
    entropy that is wrong (LSS004).
    References: OpenRLHF#1319.
    """
    for update in updates_of(trace):
        yield from compare_entropies(trace, update)


def compare_entropies(trace: Trace, update: UpdateRows) -> Iterator[Comparison]:
    """Compare the entropies of an update with the oracle's; none if transformers did not compute the step."""
    name, version = update.columns.name, update.columns.version
    noise = max((float(oracle.noise) for oracle in trace.of(OracleEntropy, version=version)), default=0.0)
    for oracle in trace.of(OracleEntropy, version=version, name=name):
        yield from _compare(update, oracle, trace.array(oracle), noise, trace.manifest.dtype == "float32")


def _compare(
    update: UpdateRows, oracle: OracleEntropy, entropy: np.ndarray, noise: float, exact: bool
) -> Iterator[Comparison]:
    """Worst row of each rollout."""
    columns, num = update.columns, int(update.in_loss.sum())
    if len(entropy) != num:
        raise LookupError(f"the oracle gave {len(entropy):,} entropies for the {num:,} tokens of {columns.name}")
    expected = entropy[np.cumsum(update.in_loss)[update.place] - 1]
    actual = update.rows["entropy"].astype(np.float64)
    gaps = np.abs(actual - expected)
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    bound = _bound(GREATEST_NOISES * noise, oracle.temperature, len(entropy), exact)
    for at in worst_rows(update.rollout, gaps):
        name, gap = columns.ids[update.rollout[at]], float(gaps[at])
        yield Comparison(
            what=f"{name} in {columns.name}", same=math.isfinite(gap) and gap <= bound.absolute, stage=Stage.LOGPROB,
            version=columns.version, share=times(gap, bound.absolute),
            sentence=f"in {columns.name} the entropy at a token of `{name}` is {actual[at]:.6g} nats, it should be "
            f"{expected[at]:.6g}",
            expected=f"{expected[at]:.6g} (transformers in fp32, at a temperature of {oracle.temperature:g})",
            actual=f"{actual[at]:.6g} (the trainer)", allowed=str(bound),
            hint="look at the temperature, and at what is summed over the ranks of a vocabulary",
        )  # fmt: skip


def _bound(noise: float, temperature: float, num_tokens: int, exact: bool) -> Tolerance:
    tokens = f"on the tokens of the step's updates, times {GREATEST_NOISES}"
    if exact:
        fixed = at_temperature(FP32, temperature)
        source = f"this run's noise: transformers in fp32 against itself in float64 {tokens}"
        return fixed if noise <= fixed.absolute else replace(fixed, absolute=noise, source=source)
    if num_tokens < FEW_TOKENS:
        return Tolerance(absolute=math.inf, unit="nats", source=f"{num_tokens} tokens are no floor, so any finite one")
    source = f"this run's noise: its dtype against fp32 {tokens}"
    return Tolerance(absolute=noise, unit="nats", source=source)
