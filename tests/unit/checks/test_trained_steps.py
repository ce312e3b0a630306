"""LSS007 on recorded steps of a trained model, whose rows nearly cancel: rounding is no fault, and faults are seen."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.reader import read
from verifier.core.record import real
from verifier.core.trace import Trace
from verifier.stages.loss.records import LogitSpreads
from verifier.stages.train.records import GradientProducts

STEPS = Path(__file__).with_name("trained-steps")
"""Clean steps 199 and 350 of `configs/add-sft.yaml`, rows in the loss alone: with a bound of 1e-5 of the root of the
sum of squares, 1.3 and 10 times beyond it. The record of step 199 does not tell the size of logits, and neither what
epsilon takes from each token."""
LAST = "decoder.final_layernorm.weight"


def step(number, *, factors=(), entropies=1.0):
    """Outcome on a recorded step, with other products of some tensors, or entropies times a factor."""
    found, factors = read(STEPS / str(number)), dict(factors)
    records = [
        item if not isinstance(item, GradientProducts) else replace(item, products=tuple(
            replace(each, product=real(float(each.product) * factors.get(each.name, 1.0))) for each in item.products
        ))
        for item in found.records
    ]  # fmt: skip
    by_key = {item.array: found.arrays(item) for item in records if getattr(item, "array", "")}
    arrays = {
        key: {name: np.float32(entropies) * own if name == "entropy" else own for name, own in parts.items()}
        for key, parts in by_key.items()
    }
    return run_check(REGISTRY["LSS007"], Trace(found.manifest, records, arrays.__getitem__))


def test_rounding_of_a_trained_step_is_no_fault():
    outcome = step(350)
    assert (outcome.verdict, outcome.num_compared) == (Verdict.HOLDS, 22)
    assert len(outcome.left_out) == 1
    assert "what epsilon takes" in outcome.left_out[0]


def test_rows_without_the_size_of_their_logits_are_named_as_not_compared():
    outcome = step(199)
    assert (outcome.verdict, outcome.num_compared) == (Verdict.INCONCLUSIVE, 21)
    assert outcome.not_recorded == ("loss/spreads",)
    assert "size of logits" in outcome.left_out[0]


@pytest.mark.parametrize("off", [1 + 1e-3, 1 - 1e-3, 2.0])
def test_a_gradient_that_is_a_thousandth_off_is_seen_by_the_rows(off):
    outcome = step(350, factors={LAST: off})
    assert any(item.what.startswith(f"last norm: {LAST}") for item in outcome.finding.bad)


def test_entropies_that_are_a_hundredth_off_are_seen():
    assert step(350, entropies=1.01).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("number", [199, 350])
def test_every_product_that_is_a_hundredth_off_is_seen_in_both(number):
    found = read(STEPS / str(number))
    products = next(found.of(GradientProducts)).products
    names = [each.name for each in products if "layer_norm_weight" in each.name or each.name.endswith("#up")]
    assert names
    for name in names:
        assert step(number, factors={name: 1.01}).verdict is Verdict.VIOLATED, name


def test_only_the_newer_record_has_sizes():
    assert not read(STEPS / "199").has(LogitSpreads)
    assert read(STEPS / "350").has(LogitSpreads)
