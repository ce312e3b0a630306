"""The token path on real Megatron ranks: however a step is packed, padded, split and sharded, it is the same step.

What this does not exercise: a neighbour's influence and NaN in padding, bit by bit (test_trainer_step.py), and packing
without a model (tests/property/test_packing.py).
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from verifier.megatron.token_layout import Alignment, cp_rows, lay_out, sp_slice
from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny

LOGPROB_NATS = 1e-5
"""float32 on a CPU, over these cases: measured 1.9e-6 at the most (cp 4); five times that."""
LOSS_RTOL = 5e-7
"""Measured 8e-8 relative at the most; six times that."""
GRADIENT_RTOL = 1e-5
"""Of each tensor's greatest gradient: measured 2.5e-6 at the most (tp 2 cp 2); four times that."""

CASES = [
    ("qwen3", {}, 4),
    ("qwen3", {}, 10),
    ("qwen3", {"cp": 2}, 1),
    ("qwen3", {"cp": 2}, 10),
    ("qwen3", {"cp": 4}, 5),
    ("qwen3", {"tp": 2}, 3),
    ("qwen3", {"dp": 2}, 3),
    ("qwen3", {"dp": 4}, 1),
    ("qwen3", {"tp": 2, "cp": 2}, 4),
    ("qwen3", {"pp": 2, "vpp": 2}, 3),
    ("qwen3", {"pp": 2, "cp": 2}, 2),
    ("qwen3-moe", {}, 10),
    ("qwen3-moe", {"ep": 2, "dp": 2}, 3),
    ("qwen3-moe", {"tp": 2, "ep": 2}, 4),
    ("qwen3-moe", {"cp": 2, "ep": 2}, 4),
]


@pytest.fixture(scope="module")
def gradients(trainer_launcher, checkpoints, tmp_path_factory):
    def run(model, sizes, micro_batch_size):
        path = write_tiny(model, checkpoints)
        mesh = Mesh(**sizes)
        results = trainer_launcher.run(
            "tokens_functions:gradients",
            world_size=mesh.world_size,
            run_dir=tmp_path_factory.mktemp("gradients"),
            args={"checkpoint": str(path), "mesh": sizes, "micro_batch_size": micro_batch_size},
            mesh=mesh,
        )
        return [{**result, "gradients": load_file(result["path"])} for result in results]

    return run


@pytest.fixture(scope="module")
def alone(gradients):
    """One rank, every rollout in a micro-batch of its own: nothing is packed."""
    return cache(lambda model: gradients(model, {}, 1)[0])


@pytest.mark.parametrize(("model", "sizes", "micro_batch_size"), CASES)
def test_packing_splitting_and_sharding_leave_logprobs_loss_and_every_gradient(
    model, sizes, micro_batch_size, gradients, alone
):
    expected = alone(model)
    for actual in gradients(model, sizes, micro_batch_size):
        assert actual["num_tokens"] == expected["num_tokens"]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=LOSS_RTOL)
        differences = [
            (torch.tensor(got) - torch.tensor(want)).abs().max()
            for got, want in zip(actual["scored"], expected["scored"], strict=True)
            if want
        ]
        assert max(differences) < LOGPROB_NATS
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, wanted in expected["gradients"].items():
            scale = wanted.abs().max()
            assert scale > 0, name
            assert (actual["gradients"][name] - wanted).abs().max() < GRADIENT_RTOL * scale, name


@pytest.mark.parametrize("cp", [2, 4])
def test_rows_are_those_of_megatrons_own_slicing(cp, trainer_launcher, tmp_path):
    rng = np.random.default_rng(0)
    alignment = Alignment(cp=cp, tp=2)
    layouts = [lay_out(rng.integers(1, 40, rng.integers(1, 6)), alignment)[1].tolist() for _ in range(20)]
    results = trainer_launcher.run(
        "tokens_functions:megatron_slices", world_size=cp, run_dir=tmp_path, args={"cu_seqlens_padded": layouts}
    )
    for rank, rows in enumerate(results):
        for at, ends in enumerate(layouts):
            assert all(end - begin >= 2 * cp for begin, end in pairwise(ends))
            assert cp_rows(np.array(ends), cp, rank).tolist() == rows[2 * at]
            assert list(range(ends[-1]))[sp_slice(ends[-1], cp, rank)] == rows[2 * at + 1]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_logprob_and_entropy_with_the_vocabulary_split_over_ranks(num_ranks, trainer_launcher, tmp_path):
    """One row is ignored, the temperature is 0.7."""
    for worst in trainer_launcher.run("tokens_functions:logprob_over_ranks", world_size=num_ranks, run_dir=tmp_path):
        assert max(worst["float64"]) < 1e-12
        # Sums of 21 exponentials in another order, of numbers up to 40: a few units of 2^-24 * 40; times row weights.
        assert max(worst["float32"][:2]) < 1e-5
        assert worst["float32"][2] < 1e-4
        assert max(worst["bfloat16"][:2]) < 1e-5
        # A gradient of up to 18 may round to the neighbouring bfloat16.
        assert worst["bfloat16"][2] <= 2.0**-8 * 18


def test_a_label_that_no_rank_holds_is_refused_by_all(trainer_launcher, tmp_path):
    said = trainer_launcher.run("tokens_functions:label_outside", world_size=2, run_dir=tmp_path)
    assert said == ["label 4 of row 1 is held by 0 ranks of the vocabulary, it must be held by one"] * 2
