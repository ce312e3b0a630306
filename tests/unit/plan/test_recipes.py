"""Every recipe is dry-run and planned by its model's published config.json, and its page shows what these say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from verifier.cli.app import run
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.launch import fork_launcher

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "docs" / "recipes"
PUBLISHED = Path(__file__).parent / "published"
CONFIGS = sorted(RECIPES.glob("*.yaml"))
ROWS = {"train": range(1100), "test": range(5000, 5256)}


def written(folder: Path, recipe: Path) -> TrainConfig:
    """Config of a recipe, whose model is a folder with config.json alone, and whose data are a few rows."""
    config = load(TrainConfig, file=recipe)[0]
    sizes = json.loads((PUBLISHED / recipe.stem / "config.json").read_text())
    sizes.pop("quantization_config", None)  # as the conversion to bf16 leaves it
    (folder / config.model).mkdir()
    (folder / config.model / "config.json").write_text(json.dumps(sizes))
    (folder / config.data.source).mkdir(parents=True)
    for split, numbers in ROWS.items():
        columns = {"question": [f"{item} + 1?" for item in numbers], "answer": [f"#### {item + 1}" for item in numbers]}
        parquet.write_table(pyarrow.table(columns), folder / config.data.source / f"{split}-00000-of-00001.parquet")
    return config


@pytest.mark.parametrize("recipe", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_is_dry_run_and_planned(recipe, tmp_path, monkeypatch, capsys):
    config = written(tmp_path, recipe)
    page = recipe.with_suffix(".md").read_text()
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(recipe), "--verify", "--dry-run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"`{config.model}` holds no weights" in said.splitlines()[-1]
    lines = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert lines
    assert [line for line in lines if line not in said] == []

    command, *shown = re.search(r"^\$ (verifier plan .*?)^```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    words = shlex.split(command)[1:]
    assert run(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(shown) >= 4
    assert [line for line in shown if line not in said] == []
    options = {word: words[place + 1] for place, word in enumerate(words) if word.startswith("--")}
    axes = {axis: int(options.get(f"--{axis}", 1)) for axis in ("tp", "pp", "ep", "cp", "dp")}
    assert axes == {axis: getattr(config.mesh, axis) for axis in axes}, "the plan is of the recipe's mesh"
    assert int(options["--tokens"]) == config.batch.max_tokens
    assert options.get("--recompute", "none") == config.megatron.recompute


def test_every_recipe_has_its_page_and_its_row():
    listed = (RECIPES / "README.md").read_text()
    assert len(CONFIGS) == 4
    for recipe in CONFIGS:
        page = recipe.with_suffix(".md").read_text()
        assert "**Not run here.**" in page
        assert f"({recipe.name})" in page
        assert f"({recipe.stem}.md)" in listed


def dry_run(recipe: str, *words: str) -> int:
    return run(["train", str(RECIPES / f"{recipe}.yaml"), "--dry-run", *words])


def test_a_published_config_of_another_form_is_refused(tmp_path, monkeypatch, capsys):
    """As the folder with weights would be: a quantized one, another model type, and a size that no library takes."""
    config = written(tmp_path, RECIPES / "qwen3-0.6b.yaml")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / config.model / "config.json"
    sizes = json.loads(file.read_text())
    for key, value, said in (
        ("quantization_config", {"quant_method": "fp8"}, "is quantized (fp8): convert it to bf16 first"),
        ("model_type", "llama", "which has to be 'qwen3'"),
        ("head_dim", 63, "has `head_dim` = 63"),
    ):
        file.write_text(json.dumps(sizes | {key: value}))
        assert dry_run("qwen3-0.6b") == 4
        assert said in capsys.readouterr().err


def test_a_folder_that_lacks_some_of_its_weights_is_no_folder_without_weights(tmp_path, monkeypatch, capsys):
    config = written(tmp_path, RECIPES / "qwen3-0.6b.yaml")
    monkeypatch.chdir(tmp_path)
    index = tmp_path / config.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    assert dry_run("qwen3-0.6b") == 4
    assert "model-00001-of-00001.safetensors" in capsys.readouterr().err


def test_without_a_dry_run_weights_are_needed(tmp_path, monkeypatch, capsys):
    written(tmp_path, RECIPES / "qwen3-0.6b.yaml")
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(RECIPES / "qwen3-0.6b.yaml")]) == 4
    assert "holds no weights" in capsys.readouterr().err


def test_a_recipe_on_fewer_nodes_than_its_ranks_need_is_refused(tmp_path, monkeypatch, capsys):
    written(tmp_path, RECIPES / "deepseek-v3.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fork_launcher, "host_bytes", lambda: 255 * fork_launcher.LEAST_RANK_BYTES)
    assert dry_run("deepseek-v3", "ray.nodes=2") == 4
    assert re.search(r"512 ranks asked for: each of 2 nodes .* holds 1 to 255 ranks of", capsys.readouterr().err)
