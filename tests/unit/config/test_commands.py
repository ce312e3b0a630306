"""Configs of commands: deadlines, names of traces, contradictions, and what the manifest records."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verifier.config import (
    CONFIGS,
    EngineOptions,
    GoldenConfig,
    NoiseConfig,
    RoundtripConfig,
    claim_trace,
    next_trace,
)
from verifier.errors import UsageError
from verifier.knob import entries
from verifier.mesh import Mesh


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_deadline_that_no_clock_takes_is_refused(seconds):
    with pytest.raises(UsageError, match=r"seconds, it must be above 0 and at most 604800"):
        GoldenConfig(model="tiny:qwen3", trace=Path("t"), timeout_s=seconds)


def test_traces_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert GoldenConfig(model="m").trace == Path("traces/golden-0001")
    (tmp_path / "traces" / "golden-0001").mkdir(parents=True)
    assert GoldenConfig(model="m").trace == Path("traces/golden-0002")
    assert RoundtripConfig(model="m").trace == Path("traces/roundtrip-0001")
    assert next_trace("golden", tmp_path) == tmp_path / "golden-0001"


@pytest.mark.parametrize(
    "config",
    [
        RoundtripConfig(model="tiny:qwen3", trace=Path("t"), mesh=Mesh(tp=2), engine=EngineOptions(tp=2)),
        NoiseConfig(model="tiny:qwen3"),
    ],
    ids=type,
)
def test_to_dict_is_json_able_and_names_no_trace(config):
    values = config.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert "trace" not in values
    assert set(values) == {item.name for item in dataclasses.fields(config)} - {"trace"}
    assert type(config).from_dict({**values, **({"trace": "t"} if hasattr(config, "trace") else {})}) == config


def test_groups_are_nested_and_paths_are_text(tmp_path):
    manifest = tmp_path / "m.json"
    manifest.touch()
    config = GoldenConfig(model="m", trace=Path("t"), against=manifest, mesh=Mesh(tp=2), fixes=("all",))
    values = config.to_dict()
    assert values["against"] == str(manifest)
    assert Mesh(**values["mesh"]) == Mesh(tp=2)
    assert GoldenConfig.from_dict({**values, "trace": "t"}) == config


def test_the_spelling_of_the_command_line_is_refused_in_python():
    with pytest.raises(UsageError, match="--dtype is `bf16`: write `bfloat16`"):
        GoldenConfig(model="m", trace=Path("t"), dtype="bf16")


@pytest.mark.parametrize("command", CONFIGS)
def test_every_knob_has_help_and_a_flag_of_its_own(command):
    knobs = entries(CONFIGS[command])
    assert all(entry.knob.help.endswith(".") and len(entry.knob.help) < 110 for entry in knobs)
    flags = [flag for entry in knobs if entry.knob.flag for flag in entry.knob.flag.split("/")]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("command", CONFIGS)
def test_every_field_is_a_knob_or_a_group(command):
    for kind in (CONFIGS[command], EngineOptions, Mesh):
        assert all({"knob", "make"} & item.metadata.keys() for item in dataclasses.fields(kind))


def test_configs_are_frozen_and_can_be_keys():
    assert len({EngineOptions(), EngineOptions(), EngineOptions(tp=2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoundtripConfig(model="m", trace=Path("t")).cycles = 4


def test_runs_that_begin_at_once_claim_different_traces(tmp_path):
    """All have found the same name free."""
    first = next_trace("golden", tmp_path)
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_trace(first), range(8)))
    assert sorted(path.name for path in claimed) == [f"golden-{number:04d}" for number in range(1, 9)]
    assert all(path.is_dir() for path in claimed)


def test_a_place_where_no_trace_can_be_made_is_named(tmp_path):
    (tmp_path / "traces").touch()
    with pytest.raises(UsageError, match=r"traces/golden-0001` cannot be written: Not a directory"):
        claim_trace(tmp_path / "traces" / "golden-0001")
