"""GATE.yaml: lists, waivers as mappings, and what is refused with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifier.config import GateConfig, Waiver
from verifier.config.load import load, resolved
from verifier.errors import UsageError

TEXT = """\
models: [tiny:qwen3, tiny:llama]
meshes: ["tp=2", "pp=2"]
dtypes: [bf16]
engines: [vllm, "vllm,tp=2"]
budget_minutes: 25
folder: gates/x
waivers:
  - {check: WGT001, family: nemotron-h, issue: "miles #975", owner: ada, reason: rounded, until: 2027-01-31}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "GATE.yaml"
    path.write_text(TEXT)
    return path


def test_a_file_is_read_and_written_again(file, tmp_path):
    config, owners = load(GateConfig, file=file)
    assert config.waivers == (
        Waiver(check="WGT001", family="nemotron-h", issue="miles #975", owner="ada", reason="rounded",
               until="2027-01-31"),
    )  # fmt: skip
    assert (config.models, config.dtypes, config.budget_minutes) == (("tiny:qwen3", "tiny:llama"), ("bf16",), 25.0)
    again = tmp_path / "again.yaml"
    again.write_text(resolved(config, owners))
    assert load(GateConfig, file=again)[0] == config
    assert GateConfig.from_dict(config.to_dict()) == config


def test_a_flag_goes_before_the_file(file):
    config, _ = load(GateConfig, file=file, flags={"meshes": ["dp=2"]}, overrides=["budget_minutes=3"])
    assert (config.meshes, config.budget_minutes) == (("dp=2",), 3.0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("owner: ada", "team: ada", "waivers, item 1 has no `team`: give some of check, family, model, issue, owner,"),
        ("reason: rounded", "reason: 5", "waivers, item 1, reason is `5`, it must be text: put it into quotes"),
        ("owner: ada, ", "", "the waiver of WGT001 has no `owner`: a waiver has check,"),
        ("until: 2027-01-31", "until: someday", "the waiver of WGT001 has until `someday`: write a day,"),
        ("budget_minutes: 25", "budget_minutes: -1", "budget_minutes is -1 minutes, it must be above 0 and finite"),
        ("dtypes: [bf16]", "dtypes: [fp8]", "--dtype is `fp8`, it must be one of fp32, bf16"),
        ("models: [tiny:qwen3, tiny:llama]", "models: []", "models is empty: name one or more, by --model"),
        ("engines:", "engine:", "there is no knob `engine` in "),
    ],
)
def test_what_cannot_be_meant_is_refused(file, old, new, said):
    assert old in TEXT
    file.write_text(TEXT.replace(old, new))
    with pytest.raises(UsageError) as refused:
        load(GateConfig, file=file)
    assert str(refused.value).startswith(said)


def test_waivers_that_are_no_list_are_refused():
    with pytest.raises(UsageError, match="waivers is no list of mappings of check, family, model, issue"):
        load(GateConfig, overrides=["models=tiny:qwen3", "waivers=WGT001"])
