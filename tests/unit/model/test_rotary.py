"""Models that the kernel for rotary embeddings fits."""

from __future__ import annotations

import pytest

from verifier.model.mesh_fit import misfit
from verifier.model.named import config_of

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("model", ["tiny:qwen3", "tiny:qwen3-moe", "tiny:llama", "tiny:nemotron-h", "tiny:add"])
def test_it_fits_plain_embeddings_and_models_without(model):
    assert misfit(config_of(model)) == ""


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (config_of("tiny:deepseek-v3"), "latent attention"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN}}, "type yarn"),
        ({"rope_scaling": {"type": "yarn", **YARN}}, "type yarn"),
        ({"rope_parameters": {"full": {"rope_type": "yarn", **YARN}, "window": {"rope_type": "default"}}}, "type yarn"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "several axes"),
    ],
)
def test_it_does_not_fit_what_it_would_compute_otherwise(model, reason):
    assert reason in misfit(model)
