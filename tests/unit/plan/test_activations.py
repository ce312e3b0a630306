"""Planned activations against measured peaks: golden/activations.json, and its table in docs/scaling-out.md.

What this does not exercise: meshes above one rank, of which the only peaks are others'.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from tests.scaled_configs import published
from verifier.config import PlanConfig
from verifier.mesh import Mesh
from verifier.model.named import sizes_alone
from verifier.plan.held_shards import holdings_of
from verifier.plan.run_plan import GIB, described, memory_of

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "golden" / "activations.json").read_text())["rows"]
DOCS = (ROOT / "docs" / "scaling-out.md").read_text()
ULTRA = "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = {16: 12, 32: 24}
"""Size of the expert parallel group -> layers with experts of its first stage, which has most activations."""


@pytest.fixture(scope="module")
def ultra():
    """Parts of the model that no mesh changes; transformers takes seconds to make it."""
    return described(PlanConfig(model=ULTRA, dtype="bfloat16", mesh=Mesh()), published(ULTRA))


def planned(row, busiest, plan=None):
    """GiB of the rank that needs most: (weights, gradients and optimizer, activations)."""
    away = {} if "from" in row else {"grad_reduce_in_fp32": False, "optimizer_offload": 1.0}
    config = PlanConfig(
        model=row["model"], dtype="bfloat16", mesh=Mesh(**row["mesh"]), tokens=row["tokens"],
        recompute=row["recompute"], busiest=busiest, **away,
    )  # fmt: skip
    if plan is None:
        plan = described(config, QWEN3 if "sizes" in row["model"] else sizes_alone(row["model"], "bfloat16"))
    memory = memory_of(replace(plan, config=config), holdings_of(plan.layout, config.mesh, config.mesh.dense_size))
    most = max(memory, key=lambda item: item.total)
    return (most.weights + most.gradients + most.optimizer) / GIB, most.activations / GIB


def line(row, busiest, plan=None):
    """Row of the table of docs/scaling-out.md, and the ratio that it says."""
    state, activations = planned(row, busiest, plan)
    measured = row["peak_gib"] - state
    where = Mesh(**row["mesh"]).label() + (f", `--busiest {busiest:g}`" if busiest > 1 else "")
    cells = (row["model"], where, f"{row['tokens']:,}", row["recompute"], f"{state:.1f}", f"{measured:.1f}")
    return f"| {' | '.join(cells)} | {activations:.1f} | {activations / measured:.2f} |", activations / measured


@pytest.mark.parametrize("row", [row for row in ROWS if "from" in row], ids=lambda row: f"{row['peak_gib']} GiB")
def test_planned_activations_are_those_of_a_measured_step(row):
    """A bare loop's loss has the logits in fp32 too; with them the plan has 0.97 of what it needed."""
    found = [item["peak_gib"] for item in json.loads((ROOT / row["from"]).read_text())["rows"] if "peak_gib" in item]
    assert row["peak_gib"] in found
    assert line(row, 1.0)[0] in DOCS
    state, activations = planned(row, 1.0)
    logits = row["tokens"] * 151_936 * 4 / GIB if "sizes" in row["model"] else 0.0
    assert (activations + logits) / (row["peak_gib"] - state) == pytest.approx(1, abs=0.04 if logits else 0.01)


@pytest.mark.parametrize("row", [row for row in ROWS if "from" not in row], ids=lambda row: f"{row['peak_gib']} GiB")
def test_planned_activations_are_those_of_published_runs(row, ultra):
    """A sequence of one token repeated takes few experts: then the busiest rank has several times an even share."""
    (even, _), (said, ratio) = (line(row, busiest, ultra) for busiest in (1.0, row["busiest"]))
    assert even in DOCS
    assert said in DOCS
    assert 0.8 < ratio < 1.1


@pytest.mark.parametrize("row", [row for row in ROWS if "busiest" in row], ids=lambda row: f"ep{row['mesh']['ep']}")
def test_the_busiest_rank_of_a_layer_that_draws_its_experts_once_for_all_tokens(row):
    """22 of 512 experts, in each layer of the first stage others: mean of the greatest share over an even one."""
    draw, ranks = random.Random(0), row["mesh"]["ep"]
    shares = [
        max(
            max(Counter(expert * ranks // 512 for expert in draw.sample(range(512), 22)).values())
            for _ in range(layers)
        )
        for layers in [LAYERS[ranks]] * 200
    ]
    assert mean(shares) * ranks / 22 == pytest.approx(row["busiest"], abs=0.15)
