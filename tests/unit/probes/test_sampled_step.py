"""Steps that are sampled, reasons for none, and routes that the trainer's routers chose by themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.rollout import Rollout
from verifier.errors import UsageError
from verifier.probes.training import sampled_step
from verifier.probes.training.sampled_step import (
    OF_RUN,
    OF_UNIT,
    SampledStep,
    chosen_routes,
    is_sampled,
    require_judgeable,
    unsampled_because,
)
from verifier.trainer.batches import OptimizerUpdate, ScoredRollouts


def config_of(*knobs):
    return load(TrainConfig, overrides=["model=tiny:add", "verify.steps=true", *knobs])[0]


LARGEST = 2**34 // (OF_UNIT + OF_RUN)
"""Weights of the largest model of one layer that a host of 16 GiB judges on the CPU."""
FULL = "a sampled step of tiny:add needs 56.0 GiB of memory, and this host has 16.0 GiB"


def model_of(*, num_weights=1, judges_gradients=True, tier="cpu", layers=1):
    metas = {
        f"model.layers.{layer}.{name}.weight": SimpleNamespace(shape=(num_weights // layers // 2,))
        for layer in range(layers) for name in ("up", "down")
    }  # fmt: skip
    checkpoint = SimpleNamespace(num_weights=num_weights, num_bytes=4 * num_weights, metas=metas, config={})
    return SimpleNamespace(checkpoint=checkpoint, judges_gradients=judges_gradients, tier=tier)


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
        (("verify.every=2",), {"num_weights": LARGEST}, ""),
        ((), {"num_weights": 2**33, "tier": "cuda", "layers": 64}, ""),
        (("verify.every=0",), {}, "verify.every is 0"),
        ((), {"num_weights": 2**30}, f"{FULL}, and verify.every is not given"),
        ((), {"num_weights": 2**34, "tier": "cuda", "layers": 64}, "a sampled step of tiny:add needs 512.0 GiB of disk "
         "for the run, and this host has 400.0 GiB, and verify.every is not given"),
        (("verify.every=2",), {"judges_gradients": False}, "the gradients of tiny:add cannot be judged: its family has "
         "no layout"),
        ((), {"judges_gradients": False}, "the gradients of tiny:add cannot be judged: its family has no layout"),
        (("megatron.moe_z_loss=0.5",), {}, "megatron.moe_z_loss is 0.5, which the oracle does not compute"),
        (("megatron.mtp_loss_scaling_factor=0.3",), {}, ""),
        (("megatron.mtp_loss_scaling_factor=0.3", "dtype=bf16"), {}, "megatron.mtp_loss_scaling_factor is 0.3, which "
         "the oracle does not compute"),
        (("lora.rank=4", "dtype=bf16"), {}, ""),
    ],
)  # fmt: skip
def test_reason_for_which_a_run_samples_no_step(monkeypatch, knobs, model, reason):
    monkeypatch.setattr(sampled_step, "host_bytes", lambda: 2**34)
    monkeypatch.setattr(sampled_step, "_free_bytes", lambda _: 400 * 2**30)
    assert unsampled_because(config_of(*knobs), model_of(**model)) == reason


def test_sampled_steps_that_were_asked_for_and_have_no_room_are_refused(monkeypatch):
    monkeypatch.setattr(sampled_step, "host_bytes", lambda: 2**34)
    with pytest.raises(UsageError, match=f"verify.every is 2 and {FULL}: set verify.every=0$"):
        require_judgeable(config_of("verify.every=2"), model_of(num_weights=2**30))


def step_of(tmp_path, lengths, *knobs, advantages=None, step=1):
    """A sampled step of one update of rollouts of these lengths, whose last half is in the loss."""
    rollouts = [
        Rollout(
            id=f"{at}", group=f"{at // 2}", tokens=np.zeros(size, np.int64), mask=np.arange(size) >= size // 2,
            logprobs=np.zeros(size, np.float32), versions=np.where(np.arange(size) >= size // 2, step - 1, -1),
            prompt_length=size // 2, roles=np.zeros(size, np.int8), sampled=np.arange(size) >= size // 2,
        )
        for at, size in enumerate(lengths)
    ]  # fmt: skip
    columns = {} if advantages is None else {"advantage": [np.full(len(item), value) for item, value in zip(
        rollouts, advantages, strict=True
    )]}  # fmt: skip
    weights = [item.mask * 0.1 for item in rollouts]
    update = OptimizerUpdate(step=step, number=7, file=tmp_path, rollouts=rollouts, weights=weights, columns=columns)
    scored = ScoredRollouts(rollouts=rollouts, old=[item.logprobs for item in rollouts], reference=None)
    model = SimpleNamespace(checkpoint=SimpleNamespace(config={"num_hidden_layers": 1}))
    return SampledStep(config_of(*knobs), model, None, tmp_path / "oracle", step, [update], scored)


def test_all_rollouts_of_a_small_step_are_computed(tmp_path):
    found = step_of(tmp_path, [512] * 32)
    assert found.places == {}
    assert len(found.scored.rollouts) == 32


@pytest.mark.parametrize(
    ("knobs", "advantages", "places", "scored"),
    [
        ((), None, [*range(1, 64, 4)], [*range(1, 64, 4)]),
        (("verify.rollouts=2",), None, [1, 33], [1, 33]),
        (("verify.rollouts=2", "mesh.dp=4"), None, [1, 17, 33, 49], [1, 17, 33, 49]),
        (("verify.rollouts=2",), [0.0] * 60 + [1.0, 1.0, 0.0, 1.0], [61, 63], [1, 33]),
        (("verify.rollouts=2",), [0.0] * 64, [1, 33], [1, 33]),
    ],
    ids=["as-many-as-have-the-tokens", "as-many-as-asked-for", "one-a-rank", "those-with-a-gradient", "no-gradient"],
)
def test_rollouts_of_a_large_step_that_are_computed(tmp_path, knobs, advantages, places, scored):
    found = step_of(tmp_path, [1024] * 64, *knobs, advantages=advantages)
    assert found.places == {"7": places}
    assert [int(item.id) for item in found.scored.rollouts] == scored


def test_other_rollouts_are_computed_in_the_next_step(tmp_path):
    assert step_of(tmp_path, [1024] * 64, "verify.rollouts=2", step=2).places == {"7": [2, 34]}


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
