"""The oracle knows of a run what its trace says: rollouts of another scenario, objective and rule are judged as well.

What this does not exercise: the arithmetic (test_step.py), and transformers (tests/dist).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from verifier.core import store
from verifier.core.manifest import Facts, Manifest
from verifier.core.reader import read
from verifier.core.record import Record
from verifier.data.rollout import make_rollout
from verifier.export.names import layout_of
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Sides
from verifier.oracle.recording import noise_of_logprobs, record_oracle
from verifier.stages.logprob.records import (
    DtypeNoise,
    OracleLogprobs,
    OracleOfNext,
    OracleOfPlaces,
    OracleOfSampled,
    TrainerLogprobs,
)
from verifier.stages.loss.records import GradientRecord, Objective, RouterChoices
from verifier.stages.pack.probe_tokens import record_of_rollouts
from verifier.stages.replay.records import OWN_ROUTES, GivenRoutes, UsedRoutes
from verifier.stages.rollout.records import DrawnTokens, SampledTokens
from verifier.stages.train.records import OptimizerRule

ROLLOUTS = [
    make_rollout("math/7", [5, 6, 7], [8, 9, 3], mask=[True, False, True], logprobs=[-1.5, -2.5, -3.5], reward=0.25),
    make_rollout("math/8", [4], [2, 2], logprobs=[-0.5, -0.25], reward=-1.0),
]
OBJECTIVE = Objective(name="policy loss", temperature=0.9, entropy_weight=0.0, drift_weight=0.3)
CONFIG = {"engine": {"lora_rank": 0, "quantization": None}}
RULE = OptimizerRule(
    name="Adam", first_learning_rate=1e-7, learning_rate=1e-6, least_learning_rate=1e-6, embedding_learning_rate=1e-6,
    least_embedding_learning_rate=1e-6, warm_up=10, num_rollouts=100, weight_decay=0.01, greatest_weight_decay=0.01,
    clip_grad=0.5, beta_2=0.999,
)  # fmt: skip


class Asked:
    """Stands for the oracle: log-probabilities are the negated position, and every question is kept.

    Each token's scale is a thousandth of its position.
    """

    def __init__(self) -> None:
        self.steps: tuple[Any, ...] = ()
        self.inputs: dict[str, dict[str, np.ndarray]] = {}
        self.read: list[str] = []
        self.choices: list[tuple[Any, ...]] = []

    def sides(
        self, checkpoint: Path, sequences: Any, dtype: str, device: str, *, temperature: list[float], reported: Any,
        sampled: list[int],
    ) -> tuple[Sides, Any]:  # fmt: skip
        assert [len(rows) for rows in reported] == [1] * len(sequences)  # the trainer's, or the sample's own
        places = [range(1, len(tokens)) for tokens in sequences]
        exact = [[-divisor * at for at in row] for row, divisor in zip(places, temperature, strict=True)]
        scales = [[1e-3 * at for at in row] for row in places]
        drawn = [tokens[len(tokens) - count :] for tokens, count in zip(sequences, sampled, strict=True)]
        rows = [[[token, [1] * 7, [0.5] * 7, [0.1], [False]] for token in tokens] for tokens in drawn]
        return Sides(exact, exact, scales), rows

    def ask(self, function: str, paths: Any, *arguments: Any, read: Any = ()) -> Any:
        if function == "logprob_hf:next_token":
            tokens, asked, _ = arguments
            return [[-float(len(tokens)), -temperature] for temperature, _ in asked]
        if function == "choices_hf:choice_gaps":
            self.choices.append((*paths, *arguments))
            facts = {"num_tokens": 3, "shortfall": 0.25, "noise": 0.5, "closed": 0, "closed_in_dtype": 1}
            return [{"layer": 2, "place": [1, 2], **facts}]
        assert function == "policy_hf:judge_updates"
        self.steps, self.read = arguments, [path.name for path in read]
        self.inputs = {file.stem: load_file(file) for file in paths[0].glob("inputs-*")}
        return [
            {
                "name": "w", "update": 1, "gradient_scale": 1.0, "gradient_norm": float("nan"), "loss": 1.0,
                "loss_scale": 1.0, "num_tokens": 4,
            }
        ]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_tiny("qwen3", tmp_path / "source"))


def record(trace: Path, source: Checkpoint, *more: tuple[Record, Any]) -> Asked:
    """A trace as ranks and engine leave it, with more of a step, and what the oracle adds."""
    store.create(
        trace,
        Manifest(model="tiny:qwen3", dtype="float32", tier="cpu", facts=Facts(judges_gradients=True), config=CONFIG),
    )
    trainer = store.Recorder(trace, "trainer", 0)
    for name, temperature in (("policy", 1.0), ("policy, warm", 2.0)):
        trainer.emit(*record_of_rollouts(name, 0, ROLLOUTS))
        lengths = tuple(len(rollout) - 1 for rollout in ROLLOUTS)
        scored = TrainerLogprobs(name=name, lengths=lengths, temperature=temperature)
        trainer.emit(scored, np.zeros(sum(lengths), np.float32))
    trainer.emit(*record_of_rollouts("trained", 1, ROLLOUTS))
    trainer.emit(RULE)
    trainer.emit(OBJECTIVE)
    for item, rows in more:
        trainer.emit(item, rows if isinstance(rows, dict) else np.array(rows, np.int32))
    trainer.close()
    engine = store.Recorder(trace, "engine", 0)
    sampled = SampledTokens(
        name="greedy", lengths=(2,), prompts=((1, 2, 3),), tokens=((4, 5),), stops=((),), limits=(2,),
        ended=("length",), temperatures=(0.5,),
    )  # fmt: skip
    engine.emit(sampled, np.zeros(2, np.float32))
    engine.emit(DrawnTokens(name="drawn", prompt=(1, 2, 3, 4), tokens=(5,), temperature=1.5), np.zeros(1, np.float32))
    engine.close()
    for name in ("weights-1", "gradients-1"):
        (trace.parent / name).mkdir(exist_ok=True)
    asked = Asked()
    record_oracle(asked, trace, trace.parent, source, "cpu", layout_of(source.config))  # type: ignore[arg-type]
    return asked


def test_what_was_scored_and_sampled_is_read_from_the_trace(tmp_path: Path, source: Checkpoint) -> None:
    record(tmp_path / "trace", source)
    seen = read(tmp_path / "trace")
    found = {item.name: seen.array(item).tolist() for item in seen.of(OracleLogprobs)}
    assert found == {"policy": [-1, -2, -3, -4, -5, -1, -2], "policy, warm": [-2, -4, -6, -8, -10, -2, -4]}
    (places,) = seen.of(OracleOfPlaces)
    assert {name: array.tolist() for name, array in seen.arrays(places).items() if name in ("rank", "repeats")} == {
        "rank": [4, 5], "repeats": [[False], [False]],
    }  # fmt: skip
    (sampled,), (drawn,) = seen.of(OracleOfSampled), seen.of(OracleOfNext)
    assert seen.array(sampled).tolist() == [-1.5, -2.0]
    assert seen.array(sampled, "scale").tolist() == [3e-3, 4e-3]
    noise = {item.name: (item.scale, item.coarsest) for item in seen.of(DtypeNoise)}
    assert noise["policy"] == (pytest.approx(math.sqrt((1 + 4 + 9 + 16 + 25 + 1 + 4) / 7) * 1e-3), 5e-3)
    assert seen.array(drawn).tolist() == [-4.0, -1.5]


def test_steps_are_judged_by_the_recorded_rollouts_objective_and_rule(tmp_path: Path, source: Checkpoint) -> None:
    asked = record(tmp_path / "trace", source)
    rule, objective, updates, *_, from_first = asked.steps
    inputs = {name: values.tolist() for name, values in asked.inputs["inputs-1"].items()}
    assert inputs["tokens"] == [5, 6, 7, 8, 9, 3, 4, 2, 2]
    assert inputs["mask"] == [0, 0, 0, 1, 0, 1, 0, 1, 1]
    assert inputs["advantage"] == [0.25] * 6 + [-1.0] * 3
    assert inputs["reference"] == inputs["divisor"] == [0, 0, 0, -1.5, -2.5, -3.5, 0, -0.5, -0.25]
    assert inputs["weight"] == [1 / 4] * 9
    assert inputs["lengths"] == [6, 3]
    assert "routes" not in inputs
    assert (updates, from_first) == ([{"number": 1, "past": 0}], True)
    assert (rule["learning_rate"], rule["beta_2"], rule["clip_grad"]) == (1e-6, 0.999, 0.5)
    assert (objective["temperature"], objective["kl_weight"]) == (0.9, 0.3)
    (gradient,) = read(tmp_path / "trace").of(GradientRecord)
    assert (gradient.gradient_norm, gradient.version, gradient.update) == ("nan", 1, 0)


def test_steps_are_judged_up_to_the_first_that_was_not_dumped(tmp_path: Path, source: Checkpoint) -> None:
    (tmp_path / "weights-2").mkdir()
    trained = record_of_rollouts("trained", 2, ROLLOUTS)
    asked = record(tmp_path / "trace", source, trained)
    assert [*asked.inputs] == ["inputs-1"]
    (tmp_path / "gradients-2").mkdir()
    asked = record(tmp_path / "again", source, trained)
    assert asked.steps[2] == [{"number": 1, "past": 0}, {"number": 2, "past": 2}]
    assert asked.inputs["inputs-2"]["weight"][0] == OBJECTIVE.every_second / 4


def test_what_is_known_of_steps_depends_on_all_that_was_dumped(tmp_path: Path, source: Checkpoint) -> None:
    dumped = [f"{kind}-{version}" for kind in ("weights", "gradients") for version in (1, 2)]
    for name in dumped:
        (tmp_path / name).mkdir()
    assert record(tmp_path / "trace", source).read == [tmp_path.name, "weights-0", *dumped]


OWN = [
    (UsedRoutes(name=OWN_ROUTES, version=1, coordinate="tp=0"), [[0, 0, 2, 4, 7], [1, 2, 2, 0, 3]]),
    (UsedRoutes(name=OWN_ROUTES, version=1, coordinate="tp=1"), [[0, 0, 2, 4, 7], [0, 1, 2, 1, 5]]),
]
"""Of two ranks, which both see one token; rollout, position, layer and two experts."""


def test_a_step_is_judged_under_the_experts_that_the_trainer_chose(tmp_path: Path, source: Checkpoint) -> None:
    elsewhere = GivenRoutes(name="sentinel routes", version=0, rollouts=()), [[0, 0, 2, 6, 7]]  # of a pass that scores
    asked = record(tmp_path / "trace", source, elsewhere, *OWN)
    inputs = asked.inputs["inputs-1"]
    assert inputs["routes"].tolist() == [[0, 2, 4, 7], [1, 2, 1, 5], [2, 2, 0, 3]]
    assert inputs["route_counts"].tolist() == [2, 1]
    told = [[5, 6, 7, 8, 9, 3], [4, 2, 2]], [[[0, 2, 4, 7], [1, 2, 1, 5]], [[2, 2, 0, 3]]]
    assert asked.choices == [(tmp_path / "weights-0", *told, "float32", "cpu")]
    (choices,) = read(tmp_path / "trace").of(RouterChoices)
    assert (choices.name, choices.version, choices.layer, choices.place) == ("trained", 1, 2, (1, 2))
    assert (choices.shortfall, choices.noise, choices.closed_in_dtype) == (0.25, 0.5, 1)


def test_routes_that_rollouts_carry_are_told(tmp_path: Path, source: Checkpoint) -> None:
    given = GivenRoutes(name="sentinel routes", version=1, rollouts=()), [[1, 0, 2, 6, 7]]
    inputs = record(tmp_path / "trace", source, given).inputs["inputs-1"]
    assert (inputs["routes"].tolist(), inputs["route_counts"].tolist()) == ([[0, 2, 6, 7]], [0, 1])


def test_routes_of_too_few_experts_are_not_told(tmp_path: Path, source: Checkpoint) -> None:
    """A router that drops experts of a token differs from transformers then, which chooses by itself."""
    dropped = (UsedRoutes(name=OWN_ROUTES, version=1, coordinate="tp=1"), [[1, 0, 2, 4, -1]])
    assert "routes" not in record(tmp_path / "trace", source, *OWN, dropped).inputs["inputs-1"]


def test_noise_of_weights_that_are_not_finite_is_not_finite() -> None:
    """A fault that makes weights NaN is a violated check, and not the end of the oracle."""
    noise = noise_of_logprobs("scored", 1, Sides([[-1.0, math.nan]], [[-1.5, -2.0]], [[]]))
    assert [math.isnan(float(value)) for value in (noise.greatest, noise.mean, noise.deviation)] == [True] * 3
