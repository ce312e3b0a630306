"""megatron-core's scheduler has the rates that the oracle has from formulas of its own, rollout by rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from verifier.megatron.optimizer_megatron import make_scheduler
from verifier.oracle.step_hf import rates_of
from verifier.runs.scenario import RULE


def test_rates_are_those_of_the_oracle_through_warm_up_decay_and_after_it() -> None:
    own = {"max_lr": RULE.embedding_learning_rate, "min_lr": RULE.least_embedding_learning_rate}
    groups: list[dict[str, Any]] = [{}, own]
    scheduler = make_scheduler(SimpleNamespace(param_groups=groups), RULE)
    rule = msgspec.structs.asdict(RULE)
    for past in range(RULE.num_rollouts + 8):
        for group, name in zip(groups, ("model.norm.weight", "lm_head.weight"), strict=True):
            expected = {"learning_rate": group["lr"], "decay": group["weight_decay"]}
            assert rates_of(rule, past, name) == pytest.approx(expected)
        scheduler.step(1)
