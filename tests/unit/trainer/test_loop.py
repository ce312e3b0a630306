"""The order of steps: what becomes of an engine that sleeps, when a run evaluates, trains and ends.

What this does not exercise: an engine that sleeps, which takes a GPU (tests/h100/test_train_gpu.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.trainer import loop
from verifier.trainer.loop import StepLoop


def calls_of(
    tmp_path, monkeypatch, *words: str, refused: str = "", every: int = 1, steps: int = 2, updates: int = 0,
    accuracy: float = 0.0,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Calls of the ranks in a run whose steps drop all of their groups, or take so many updates each."""
    asked = (f"steps={steps}", f"evaluation.every={every}", f"run={tmp_path}")
    knobs = ("model=tiny:add", "algorithm=grpo", *asked, *words)
    found: list[tuple[str, dict[str, Any]]] = []

    def call(name: str, **given: Any) -> list[Any]:
        found.append((name, given))
        return [{"loss": 1.0, "grad_norm": 1.0}] if name == "train" else [(refused, {}, "")]

    def evaluate(step: int) -> dict[str, float]:
        found.append(("sample", {"step": step}))
        return {"accuracy": accuracy if step else 0.0, "held_out_version": float(step)}

    taken = [SimpleNamespace(step=0, number=at, file="f", first=not at, rollouts=[]) for at in range(updates)]
    plan = SimpleNamespace(updates=lambda *given: taken, facts={})
    continuation = SimpleNamespace(
        updates=0, is_due=lambda step: False, begin=lambda *given: None, finish=lambda *given, wait: None
    )
    metrics = SimpleNamespace(add=lambda *given: None, add_samples=lambda *given: None)
    StepLoop(
        config=load(TrainConfig, overrides=knobs)[0], folder=None, plan=plan, continuation=continuation,
        call=call, progress=lambda text: None, metrics=metrics,
        rollouts=SimpleNamespace(evaluate=evaluate, sent=[], shown=[]), ahead=None, held_out=None,
    ).run(0, {})  # type: ignore[arg-type]  # fmt: skip
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_fell_asleep_gets_the_weights_before_it_samples(tmp_path, monkeypatch, level):
    found = calls_of(tmp_path, monkeypatch, f"engine.sleep_level={level}")
    assert [name for name, _ in found] == ["sync", "sample", "sync", "sample"]
    assert [given["version"] for name, given in found if name == "sync"] == [1, 2]
    assert all(given["note"] is None for name, given in found if name == "sync")


def test_a_run_of_one_step_ends_with_the_accuracy_of_its_own_weights(tmp_path, monkeypatch):
    found = calls_of(tmp_path, monkeypatch, steps=1, every=2)
    assert [given["step"] for name, given in found if name == "sample"] == [0, 1]


@pytest.mark.parametrize(("enough", "taken"), [(2.0, 3), (0.5, 2)])
def test_a_run_takes_all_its_steps_unless_an_evaluation_lets_it_stop(tmp_path, monkeypatch, enough, taken):
    """Each step trains, syncs and is evaluated where that is due: every second one, and what the run begins with."""
    asked = f"evaluation.stop_above={enough}"
    found = calls_of(tmp_path, monkeypatch, asked, steps=3, every=2, updates=2, accuracy=0.75)
    order = [("sample", 0), *[("train", 0)] * 2, ("sync", 1), *[("train", 0)] * 2, ("sync", 2), ("sample", 2)]
    more = [*[("train", 0)] * 2, ("sync", 3), ("sample", 3)] if taken == 3 else []
    assert [(name, given.get("version", given.get("step"))) for name, given in found] == order + more


def test_an_engine_that_stays_awake_gets_no_weights_without_an_update(tmp_path, monkeypatch):
    assert [name for name, _ in calls_of(tmp_path, monkeypatch)] == ["sample", "sample"]


@pytest.mark.parametrize(("every", "versions"), [(0, [2]), (1, [1, 2]), (2, [0, 2])])
def test_what_a_run_begins_with_is_evaluated_before_its_first_step(tmp_path, monkeypatch, every, versions):
    found = calls_of(tmp_path, monkeypatch, every=every)
    assert [given["step"] for name, given in found if name == "sample"] == versions


def test_a_refusal_of_the_weights_that_wake_it_ends_the_run(tmp_path, monkeypatch):
    with pytest.raises(loop.ContractError, match="refused the weights of version 1: short"):
        calls_of(tmp_path, monkeypatch, "engine.sleep_level=2", refused="short")
