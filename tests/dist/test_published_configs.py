"""Published configs, scaled down with every key kept: how golden, round trips and plans of each end, and why.

golden/published-configs.json has the ends; `python -m tests.dist.published_table RUN NAME` replaces a row.

What this does not exercise: the published weights; GPUs; vLLM, in whose place transformers stands.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.dist.published_table import RUNS, outcome_of, planned, rows_of
from tests.scaled_configs import NAMES, published, scaled_down, write_scaled_down
from verifier.config_json import quantization
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.runs.model_under_test import open_model
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner

ROWS = rows_of()
QUANTIZED = [name for name in NAMES if quantization(published(name))]
MOST_PLAN_S = 60
AFTER_THE_START = {"Moonlight-16B-A3B": "no mapping of what megatron-core builds"}
"""Refused by ranks: only the built model tells."""


@pytest.mark.parametrize("name", NAMES)
def test_scaled_down_it_has_every_key_and_all_that_is_no_size(name: str) -> None:
    whole, small = published(name), scaled_down(published(name))
    assert whole.keys() == small.keys()
    kept = ("architectures", "model_type", "rope_scaling", "rope_theta", "tie_word_embeddings", "auto_map")
    kept += ("num_nextn_predict_layers", "rms_norm_eps", "layer_norm_epsilon", "max_position_embeddings")
    assert {key: small.get(key) for key in kept} == {key: whole.get(key) for key in kept}
    assert (small.get("num_hidden_layers") or 8) <= 8


@pytest.mark.parametrize("name", QUANTIZED)
def test_as_published_quantized_weights_are_refused(name: str, tmp_path: Path) -> None:
    path = write_scaled_down(name, tmp_path, "bfloat16", quantized=True)
    method = quantization(published(name))
    said = rf"is quantized \({method}\): convert it to bf16 first|no bridge for|no stand-in for"
    with pytest.raises(UsageError, match=said):
        open_model(str(path), "bfloat16", Mesh(tp=2))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_refused_before_ranks_start_in_the_sentence_of_the_table(name: str, tmp_path: Path) -> None:
    row = ROWS[name, "golden"]
    path = str(write_scaled_down(name, tmp_path, "float32"))
    if row["outcome"] != "refused" or name in AFTER_THE_START:
        open_model(path, "float32", Mesh(tp=2))
        return
    with pytest.raises(UsageError) as refusal:
        open_model(path, "float32", Mesh(tp=2))
    assert str(refusal.value).replace(path, name) == row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_has_the_parameters_of_a_model_without_weights(name: str) -> None:
    config: dict[str, Any] = copy.deepcopy(published(name))
    if config["model_type"] == "kimi_k2":  # the same model, for which transformers has no class
        config["model_type"] = "deepseek_v3"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    begin = time.monotonic()
    found, row = planned(name), ROWS[name, "plan"]
    assert time.monotonic() - begin < MOST_PLAN_S
    assert found == {key: row[key] for key in ("outcome", "reason")}
    assert found["outcome"] == f"{sum(item.numel() for item in model.parameters()):,}"


@pytest.fixture(scope="module")
def runner():
    with Resources(warm=True) as resources:
        yield Runner(resources, lambda line: None)
        resources.stop_engines()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_it_ends_as_the_table_says(runner: Runner, name: str, run: str, tmp_path: Path) -> None:
    row = ROWS[name, run]
    found = outcome_of(runner, run, name, tmp_path)
    assert found == {key: row[key] for key in ("outcome", "reason")}
    assert found["outcome"] in ("holds", "refused") or "unexplained" not in found["reason"]
