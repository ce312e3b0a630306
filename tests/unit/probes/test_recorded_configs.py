"""What is recorded of the config.json of a source and of its export."""

import json
from types import SimpleNamespace

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.stages.load.probe_configs_megatron import record_config

MINISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {"model_type": "ministral3", "tie_word_embeddings": False},
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
    "text_config": {"model_type": "qwen3_vl_moe_text"}, "vision_config": {"model_type": "qwen3_vl_moe"},
}  # fmt: skip
"""Published without a tie of the text model, whose class in transformers 5.12.1 has true by default."""


def differing(folder, exported, source=MINISTRAL):
    records = []
    for name, config in (("source", source), ("export", exported)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    record_config(SimpleNamespace(emit=records.append), SimpleNamespace(path=folder / "source"), folder / "export", 0)
    finding = run_check(REGISTRY["WGT011"], make_trace(records)).finding
    return finding and finding.first.what


def test_a_tie_that_the_text_model_alone_states_is_that_of_the_whole(tmp_path):
    assert differing(tmp_path, {**MINISTRAL, "tie_word_embeddings": False}) is None


def test_another_tie_of_the_text_model_differs(tmp_path):
    text = {**MINISTRAL["text_config"], "tie_word_embeddings": True}
    assert differing(tmp_path, {**MINISTRAL, "text_config": text}) == "config.json text_config"


@pytest.mark.parametrize(("tied", "what"), [(False, None), (True, "config.json tie_word_embeddings")])
def test_a_tie_that_the_whole_alone_states_is_not_that_of_the_text_model_in_its_export(tmp_path, tied, what):
    text = {**QWEN3_VL["text_config"], "tie_word_embeddings": True}
    assert differing(tmp_path, {**QWEN3_VL, "text_config": text, "tie_word_embeddings": tied}, QWEN3_VL) == what
