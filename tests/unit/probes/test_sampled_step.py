"""Steps that are sampled, reasons for none, and routes that the trainer's routers chose by themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.probes.training import sampled_step
from verifier.probes.training.sampled_step import COPIES, chosen_routes, is_sampled, unsampled_because


def config_of(*knobs):
    return load(TrainConfig, overrides=["model=tiny:add", "verify.steps=true", *knobs])[0]


LARGEST = 2**34 // (4 * COPIES)
"""Weights of the largest model that a host of 16 GiB judges by default."""


def model_of(*, num_weights=1, judges_gradients=True):
    return SimpleNamespace(checkpoint=SimpleNamespace(num_weights=num_weights), judges_gradients=judges_gradients)


@pytest.mark.parametrize(
    ("knobs", "steps"),
    [((), [1, 2, 4, 8]), (("verify.every=3",), [3, 6, 9]), (("verify.every=0",), []), (("verify.steps=false",), [])],
)
def test_steps_that_are_sampled(knobs, steps):
    kept = ["model=tiny:add", *(("verify.steps=true",) if "verify.steps=false" not in knobs else ()), *knobs]
    config, _ = load(TrainConfig, overrides=kept)
    assert [step for step in range(1, 11) if is_sampled(config, step)] == steps


@pytest.mark.parametrize(
    ("knobs", "model", "reason"),
    [
        ((), {}, ""),
        ((), {"num_weights": LARGEST}, ""),
        (("verify.every=2",), {"num_weights": 2**30}, ""),
        (("verify.every=0",), {}, "verify.every is 0"),
        ((), {"num_weights": 2**30}, "tiny:add needs 144 GiB for that, this host has 16 GiB, and verify.every is not "
         "given"),
        (("verify.every=2",), {"judges_gradients": False}, "the gradients of tiny:add cannot be judged: its family has "
         "no layout, or it is too large for the host"),
        ((), {"judges_gradients": False}, "the gradients of tiny:add cannot be judged: its family has no layout, or it "
         "is too large for the host"),
        (("megatron.moe_z_loss=0.5",), {}, "megatron.moe_z_loss is 0.5, which the oracle does not compute"),
        (("lora.rank=4", "dtype=bf16"), {}, "the gradients of tiny:add cannot be judged: the "
         "oracle does not compute gradients of adapters in less than float32"),
    ],
)  # fmt: skip
def test_reason_for_which_a_run_samples_no_step(monkeypatch, knobs, model, reason):
    monkeypatch.setattr(sampled_step, "host_bytes", lambda: 2**34)
    assert unsampled_because(config_of(*knobs), model_of(**model)) == reason


def test_routes_of_ranks_are_put_together_by_rollout_position_and_layer(tmp_path):
    first = [[1, 0, 2, 5, 6], [0, 1, 2, 1, 3]]  # rollout, position, layer, experts
    second = [[0, 0, 2, 0, 7], [1, 0, 0, 2, 4], [0, 1, 2, 1, 3]]  # the last was seen by both
    for rank, rows in enumerate((first, second)):
        np.save(tmp_path / f"{rank:04d}.npy", np.array(rows, np.int32))
    found = chosen_routes(tmp_path, 3)
    assert [rows.tolist() for rows in found] == [
        [[0, 2, 0, 7], [1, 2, 1, 3]], [[0, 0, 2, 4], [0, 2, 5, 6]], []
    ]  # fmt: skip


def test_a_run_that_tells_no_routes_has_none(tmp_path):
    assert chosen_routes(tmp_path / "routes-1", 2) == []
