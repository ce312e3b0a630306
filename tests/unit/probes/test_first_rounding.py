"""Runs that measure what float32 rounds before their first step.

What this does not exercise: the measurement in a whole run of a published model (tests/dist/test_published.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.probes.training import sampled_step
from verifier.probes.training.sampled_step import OF_RUN, OF_UNIT
from verifier.stages.logprob import probe_first_rounding as module
from verifier.stages.logprob.probe_first_rounding import first_rounding, measures_rounding

TRAINED = "published:smollm2-135m"
HOST = 2**33
"""Bytes of the host."""
SAMPLED = HOST // (OF_UNIT + OF_RUN)
"""Weights of the largest model of one tensor whose steps are sampled by default."""


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(sampled_step, "host_bytes", lambda: HOST)


def measured(*knobs, model=TRAINED, num_weights=SAMPLED + 1, dtype="float32"):
    config, _ = load(TrainConfig, overrides=["model=tiny:add", *(knobs or ("verify.steps=true",))])
    metas = {"w": SimpleNamespace(shape=(num_weights,))}
    checkpoint = SimpleNamespace(num_weights=num_weights, num_bytes=4 * num_weights, metas=metas, config={})
    found = SimpleNamespace(checkpoint=checkpoint, judges_gradients=True, dtype=dtype, tier="cpu")
    return measures_rounding(SimpleNamespace(**{**vars_of(config), "model": model}), found)


def vars_of(config):
    names = ("run", "verify", "lora", "dtype", "megatron", "algorithm", "grpo", "beyond_oracle")
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize(
    ("case", "measures"),
    [
        ({}, True),
        ({"num_weights": SAMPLED}, False),  # steps 1, 2, 4 ... measure it
        ({"dtype": "bfloat16"}, False),
        ({"model": "tiny:add"}, False),
    ],
)
def test_runs_in_float32_that_sample_no_step_measure_their_rounding(case, measures):
    assert measured(**case) == measures


def test_a_run_that_is_not_judged_measures_nothing():
    assert not measured("verify.steps=false")
    assert measured("verify.steps=true", "verify.every=0", num_weights=1)
    assert not measured("verify.steps=true", "verify.every=2")


def test_the_scale_is_that_of_the_oracles_places(monkeypatch):
    class Oracle:
        def __init__(self, path, deadline_s):
            self.asked = path, deadline_s

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def sides(self, path, tokens, dtype):
            assert all(0 <= token < 9 for row in tokens for token in row)
            rows = [[-1.0] * (len(row) - 1) for row in tokens]
            scales = [[3e-6] * len(row) for row in rows]
            scales[1][5] = 5e-5
            return [SimpleNamespace(exact=rows, other=rows, scales=scales)]

    monkeypatch.setattr(module, "Oracle", Oracle)
    model = SimpleNamespace(checkpoint=SimpleNamespace(config={"vocab_size": 9}, path="folder"))
    found = first_rounding(model, SimpleNamespace(left=lambda what: 5.0))
    assert (found.drawn, found.tokens, found.measured, float(found.coarsest)) == (True, 252, 0, pytest.approx(5e-5))
    assert 3e-6 < float(found.scale) < 5e-6
