"""Entropies of a step's loss against the oracle's: each token against its own, and what noise allows."""

from __future__ import annotations

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.advantage.records import LossColumns
from verifier.stages.logprob.records import OracleEntropy, TrainerLogprobs
from verifier.stages.loss.records import LossRows

ENTROPY = np.linspace(0.5, 2.5, 150)
"""Of 150 tokens in the loss: 100 of the first rollout, 50 of the second, each after a prompt of 10."""
ROLLOUT, POSITION = np.repeat([0, 1], [100, 50]), np.concatenate([10 + np.arange(100), 10 + np.arange(50)])


def outcome(
    found: np.ndarray, *, dtype: str = "float32", noise: float = 1e-7, temperature: float = 1.0, num: int = 150,
    noise_of_another: float = 0.0, scale: np.ndarray | None = None, scored: bool = True,
) -> Outcome:  # fmt: skip
    """LGP012 on the first tokens of the two, whose rows two ranks hold in turn, a row of a prompt among them.

    Of another update of the step the noise alone is known, and of one of another step.
    """
    mask = np.zeros(170, bool)
    mask[ROLLOUT[:num] * 110 + POSITION[:num]] = True
    sentinel = (ROLLOUT[:num] + 1) << 32 | POSITION[:num]
    arrays = {
        "columns": {"weight": mask / max(num, 1), "mask": mask},
        "oracle": {"array": ENTROPY[:num]} | ({} if scale is None else {"scale": scale[:num]}),
        **{
            f"rows {rank}": {
                "sentinel": np.append(sentinel[rank::2], 1 << 32 | 3),
                "mask": np.append(np.full(len(sentinel[rank::2]), np.True_), False),
                "entropy": np.append(found[:num][rank::2], 9.0).astype(np.float32),
            }
            for rank in range(2)
        },
    }
    seen = [
        LossColumns(
            name="update 4", version=2, aggregation="token_mean", ids=("x", "y"), groups=("x", "y"), lengths=(110, 60),
            array="columns",
        ),
        *(LossRows(name="update 4", version=2, rank=rank, coordinate="", array=f"rows {rank}") for rank in range(2)),
        OracleEntropy(name="update 4", version=2, temperature=temperature, noise=noise, array="oracle"),
        OracleEntropy(name="update 3", version=2, temperature=temperature, noise=noise_of_another, array="oracle"),
        OracleEntropy(name="update 2", version=1, temperature=temperature, noise=1.0, array="oracle"),
        *([TrainerLogprobs(name="old", version=1, lengths=(), array="scores")] if scored else []),
    ]  # fmt: skip
    return run_check(REGISTRY["LGP012"], Trace(Manifest(dtype=dtype, complete=True), seen, arrays.__getitem__))


def off_by(nats: float, at: int = 120) -> np.ndarray:
    return ENTROPY + np.where(np.arange(150) == at, nats, 0.0)


def third_off_by(nats: float) -> np.ndarray:
    return ENTROPY + np.where(np.arange(150) % 3 == 0, nats, 0.0)


def test_each_rollout_is_compared_row_by_row() -> None:
    found = outcome(off_by(9e-6))
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 2, None)


@pytest.mark.parametrize("nats", [2e-5, np.nan, np.inf])
def test_one_token_that_is_off_shows_in_fp32(nats: float) -> None:
    found = outcome(off_by(nats))
    assert found.verdict is Verdict.VIOLATED
    assert found.finding is not None
    assert [item.what for item in found.finding.bad] == ["y in update 4"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("scored", "before_the_loss"), [(True, False), (False, True)])
def test_a_wrong_pass_is_named_before_the_loss_where_no_other_pass_scored_its_tokens(
    dtype: str, scored: bool, before_the_loss: bool
) -> None:
    finding = outcome(ENTROPY[::-1], dtype=dtype, scored=scored).finding
    assert finding is not None
    assert (finding.first.place < (2, 0, Stage.LOSS)) is before_the_loss


def test_entropies_of_other_tokens_show() -> None:
    assert outcome(ENTROPY[::-1]).verdict is Verdict.VIOLATED


def test_each_token_is_held_against_the_greatest_scale_of_its_rollout() -> None:
    scale = np.where(np.arange(150) == 120, 1e-5, 1e-7)
    assert outcome(off_by(1.1e-4), scale=scale).verdict is Verdict.HOLDS
    assert outcome(off_by(1.3e-4), scale=scale).verdict is Verdict.VIOLATED
    assert outcome(off_by(1.1e-4, at=119), scale=scale).verdict is Verdict.HOLDS
    assert outcome(off_by(2e-5, at=10), scale=scale).verdict is Verdict.VIOLATED


def test_a_low_temperature_divides_the_bound() -> None:
    assert outcome(off_by(4e-5), temperature=0.2).verdict is Verdict.HOLDS
    assert outcome(off_by(6e-5), temperature=0.2).verdict is Verdict.VIOLATED


def test_bf16_is_held_against_its_own_noise() -> None:
    assert outcome(third_off_by(0.02), dtype="bfloat16", noise=0.01).verdict is Verdict.HOLDS
    assert outcome(third_off_by(0.04), dtype="bfloat16", noise=0.01).verdict is Verdict.VIOLATED
    assert outcome(third_off_by(0.04), dtype="bfloat16", noise=0.01, scale=np.full(150, 0.021)).verdict is Verdict.HOLDS


def test_few_tokens_in_bf16_may_be_far_off() -> None:
    """Of 700 steps of clean SFT some had a token at 0.8 of three times the greatest noise."""
    assert outcome(off_by(0.5), dtype="bfloat16", noise=0.01).verdict is Verdict.HOLDS
    assert outcome(off_by(np.inf), dtype="bfloat16", noise=0.01).verdict is Verdict.VIOLATED


def test_the_noisiest_update_of_a_step_is_its_noise() -> None:
    """Clean on an H200: of 160 tokens, 40 of them different, one was off by 3.4 times the greatest noise of all."""
    near = outcome(third_off_by(0.0416), dtype="bfloat16", noise=0.0123, noise_of_another=0.02)
    assert near.verdict is Verdict.HOLDS
    far = outcome(third_off_by(0.07), dtype="bfloat16", noise=0.0123, noise_of_another=0.02)
    assert far.verdict is Verdict.VIOLATED


def test_of_few_tokens_in_bf16_any_finite_one_holds() -> None:
    assert outcome(off_by(0.5, at=40), dtype="bfloat16", noise=0.01, num=60).verdict is Verdict.HOLDS
    assert outcome(off_by(np.nan, at=40), dtype="bfloat16", noise=0.01, num=60).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_without_a_token_in_the_loss_has_no_entropies(dtype: str) -> None:
    found = outcome(ENTROPY, dtype=dtype, num=0)
    assert (found.num_compared, found.error) == (0, None)
