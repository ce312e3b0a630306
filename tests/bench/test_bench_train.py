"""A training step on the CPU tier: our step against a bare Megatron loop, and what recording and judging it cost.

What this does not exercise: kernels, and a step as long as a real model's (tests/h100/test_train_speed.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.train_cost import GREATEST_COST, LEAST_SPEED, SAME_WORK, measure
from verifier.launch.fork_launcher import ForkLauncher

SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
}  # fmt: skip


@pytest.mark.slow
def test_our_step_costs_little_more_than_a_bare_loop(trainer_launcher: ForkLauncher, tmp_path: Path) -> None:
    args = {
        "sizes": SIZES, "dtype": "float32", "tier": "cpu", "overrides": {}, "rows": 1024, "micro_batches": 2,
        "rounds": 3, "most_rounds": 3,
    }  # fmt: skip
    cost = measure(trainer_launcher, tmp_path, args)
    assert cost.gap < SAME_WORK
    assert cost.speed >= LEAST_SPEED
    # Steps on two shared cores differ by up to a tenth; of what records them nothing runs beside them here.
    assert cost.own + cost.judging <= GREATEST_COST
