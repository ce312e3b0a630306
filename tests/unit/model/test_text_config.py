"""Models whose language model stands in `text_config`: sizes, experts and meshes are read there.

What this does not exercise: real weights of such a model (tests/dist/published_table.py).
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from verifier.config import RoundtripConfig
from verifier.config_json import is_latent
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.families import num_experts_of, size_if_any
from verifier.model.mesh_fit import misfits
from verifier.model.provider_megatron import _require_rope
from verifier.platform.stand_ins import require_stand_ins
from verifier.runs.model_under_test import require_roundtrip
from verifier.stages.export.checks import _with_open_dtype

TEXT = {"num_experts": 16, "num_attention_heads": 6, "vocab_size": 512, "kv_lora_rank": 8}
WHOLE = {"architectures": ["SeeingForConditionalGeneration"], "text_config": TEXT, "vision_config": {"depth": 2}}


def test_experts_sizes_and_latent_attention_are_those_of_the_text_model() -> None:
    assert num_experts_of(WHOLE) == num_experts_of(TEXT) == 16
    assert size_if_any(WHOLE, "vocab_size") == 512
    assert is_latent(WHOLE)


def test_a_mesh_is_fitted_to_the_text_model() -> None:
    assert list(misfits(WHOLE, Mesh(tp=4))) == [
        "tp = 4 does not divide the 6 attention heads of SeeingForConditionalGeneration"
    ]
    assert list(misfits(WHOLE, Mesh(dp=4, ep=4))) == []


def test_a_text_config_that_is_no_object_is_no_text_model() -> None:
    require_stand_ins({"text_config": "none", "num_attention_heads": 6})
    with pytest.raises(UsageError, match="by an indexer"):
        require_stand_ins({"text_config": {"index_topk": 4}})


@pytest.mark.parametrize(
    ("part", "config"),
    [
        ("text_config", WHOLE),
        ("vision_config", {**TEXT, "vision_config": {"depth": 2}}),  # Qwen2.5-VL
        ("thinker_config", {"thinker_config": {"text_config": TEXT}}),  # Qwen3-Omni
    ],
)
def test_a_round_trip_of_it_is_refused_by_what_it_holds(part, config) -> None:
    config = {"architectures": ["SeeingForConditionalGeneration"], **config}
    said = rf"SeeingFor.* has further parts \(`{part}` in config.json\): .* or a folder of its text model alone"
    with pytest.raises(UsageError, match=said):
        require_roundtrip(RoundtripConfig(model="m", trace="t"), config, (), "cpu")


@pytest.mark.parametrize(
    ("held", "stated", "compared"),
    [
        ({"dtype": "float32", "depth": 2}, {"dtype": None, "depth": 2}, {"dtype": None, "depth": 2}),
        ({"dtype": "float32", "depth": 3}, {"dtype": None, "depth": 2}, {"dtype": None, "depth": 3}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32"}),
        ("float32", None, "float32"),
        (None, {"dtype": None}, None),
    ],
)
def test_a_dtype_that_the_source_leaves_open_is_not_compared(held: object, stated: object, compared: object) -> None:
    assert json.loads(_with_open_dtype(json.dumps(held), json.dumps(stated)) or "") == compared


def test_a_yarn_rope_without_its_numbers_is_refused_by_their_names() -> None:
    numbers = {"yarn_original_max_position_embeddings": 64, "yarn_beta_fast": None, "yarn_beta_slow": None}
    with pytest.raises(UsageError, match=r"^the YaRN rope of config.json has no `beta_fast`, `beta_slow`, for which"):
        _require_rope(SimpleNamespace(position_embedding_type="yarn", **numbers))
    _require_rope(SimpleNamespace(position_embedding_type="rope", **numbers))
    _require_rope(
        SimpleNamespace(position_embedding_type="yarn", **{**numbers, "yarn_beta_fast": 32, "yarn_beta_slow": 1})
    )
