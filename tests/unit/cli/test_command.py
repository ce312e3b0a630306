"""Commands made from configs: flags, files and keys on a real command line."""

import subprocess
import sys

import pytest

from tests.meta.sources import ROOT
from verifier.cli import app as cli


def test_flags_keys_and_a_file_print_the_same_config(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["roundtrip", "--model", "tiny:qwen3", "--tp", "2", "--cuda-graphs", "--print-config"]) == 0
    by_flags = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(by_flags)
    for ways in (["model=tiny:qwen3", "mesh.tp=2", "engine.cuda_graphs=true"], ["--config", "run.yaml"]):
        assert cli.run(["roundtrip", *ways, "--print-config"]) == 0
        printed = capsys.readouterr().out
        assert [line.partition("  # ")[0] for line in printed.splitlines()] == [
            line.partition("  # ")[0] for line in by_flags.splitlines()
        ]
    assert "# --cuda-graphs; default null" in by_flags
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tp", "2", "mesh.tp=4"], "--tp and mesh.tp=4 set the same knob: leave one of the two out"),
        (["mesh.tq=4"], "there is no knob `mesh.tq`: did you mean `mesh.tp`"),
        (["4"], "`4` is neither an option nor key=value, such as model=..."),
        (["--config", "absent.yaml"], "--config `absent.yaml` is no file"),
        (
            ["engine.kind=hf", "engine.tp=2"],
            "--engine hf has one rank, --engine-tp is 2: leave it out, or use --engine vllm",
        ),
        (["--fix", "vllm-1"], "--fix is `vllm-1`, and there is no such fix: did you mean `vllm-48251`?"),
    ],
)
def test_a_contradiction_is_one_sentence_and_code_4(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["roundtrip", "--model", "tiny:qwen3", *arguments]) == 4
    assert capsys.readouterr().err == f"verifier: {sentence}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "loaded"), [(["--model", "m"], False), (["model=m"], True)])
def test_omegaconf_is_loaded_only_for_files_and_keys(arguments, loaded):
    program = f"""
import sys
from verifier.cli.app import run
assert run(["roundtrip", "--print-config", *{arguments}]) == 0
print("omegaconf" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{loaded} False"


def test_a_command_that_is_refused_leaves_no_trace_of_the_name_that_it_took(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["golden", "--model", "tiny:gpt5"]) == 4
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "traces").mkdir()
    assert cli.run(["golden", "--model", "tiny:gpt5"]) == 4
    assert list((tmp_path / "traces").iterdir()) == []
    assert "unknown model" in capsys.readouterr().err
