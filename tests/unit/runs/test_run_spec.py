"""What ranks and engines are told: the config whole, and what the runner adds; JSON there and back."""

import dataclasses
import json
from pathlib import Path

from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.engine.api import EngineConfig
from verifier.knob import entries
from verifier.mesh import Mesh
from verifier.runs.scenario import workload
from verifier.runs.spec import RunSpec

WORKLOAD = workload([[1, 2, 3]], [[[4, 5, 6, 7]]] * 2, [[1, 2]], [3, 4, 5, 6], adapter=True)
TOLD = {"checkpoint": "c", "tier": "cpu", "trace": "t", "work": "w"}


def sent(spec: RunSpec) -> RunSpec:
    found = RunSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert json.dumps(found.to_json()) == json.dumps(spec.to_json())
    return found


def test_a_round_trip_survives_json():
    config = RoundtripConfig(
        model="m", trace=Path("t"), mesh=Mesh(tp=2, pp=2), dtype="bfloat16", seed=3, fixes=("miles-975",),
        engine=EngineOptions(lora_rank=8),
    )  # fmt: skip
    spec = RunSpec(config=config, workload=WORKLOAD, **TOLD)
    assert (sent(spec).config, sent(spec).workload) == (config, WORKLOAD)
    assert (sent(spec).roundtrip, sent(spec).lora_rank, sent(spec).fixes) == (config, 8, ["miles-975"])


def test_golden_survives_json():
    spec = RunSpec(config=GoldenConfig(model="m", trace=Path("t"), fixes=("all",)), **TOLD)
    assert sent(spec).config == spec.config
    assert sent(spec).lora_rank == 0
    assert len(spec.fixes) > 1


def test_no_knob_is_spelled_a_second_time():
    """Each session has a trace of its own, and a transport that was left out is chosen; the oracle is an engine too."""
    knobs = {entry.key.rpartition(".")[2] for entry in entries(RoundtripConfig)}
    assert knobs & {item.name for item in dataclasses.fields(RunSpec)} == {"trace", "transport"}
    own = {item.name for item in dataclasses.fields(EngineConfig)} - {
        item.name for item in dataclasses.fields(EngineOptions)
    }
    assert own & knobs == {"dtype", "fixes"}
