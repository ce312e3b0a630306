"""Recorded manifests are what the generated checkpoints hold, so that a bitwise export is all that they ask for.

What this does not exercise: the export itself (`verifier golden --against`, tests/dist/test_clean_runs.py).
"""

from __future__ import annotations

import pytest

from tests.meta.sources import ROOT
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import TINY, write_tiny
from verifier.plan.digest import digest_tensor
from verifier.runs.golden import read_manifest, require_same_model
from verifier.runs.model_under_test import ModelUnderTest

MANIFESTS = sorted((ROOT / "golden").glob("tiny-*.json"))


def test_every_generated_model_has_a_manifest():
    assert [path.stem for path in MANIFESTS] == sorted(f"tiny-{name}-float32" for name in TINY)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_is_the_generated_checkpoint(path, tmp_path):
    record = read_manifest(path)
    checkpoint = open_checkpoint(write_tiny(record["model"].removeprefix("tiny:"), tmp_path, record["dtype"]))
    held = {}
    for name in checkpoint.names():
        meta = checkpoint.meta(name)
        held[name] = {"dtype": meta.dtype, "shape": list(meta.shape), "digest": digest_tensor(checkpoint.read(name))}
    assert record["tensors"] == held
    assert record["why"]


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"tensors": {}}'])
def test_what_is_no_manifest_is_refused(text, tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="is no manifest that `verifier golden --record` wrote"):
        read_manifest(file)


@pytest.mark.parametrize("item", ["1", "{}", '{"digest": 1, "shape": [2], "dtype": "float32"}'])
def test_a_damaged_manifest_is_refused_before_the_run(item, tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text(f'{{"tensors": {{"w": {item}}}}}')
    with pytest.raises(UsageError, match="is damaged: tensor `w` lacks its digest, dtype or shape"):
        read_manifest(file)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny-llama-float32", "was recorded for architecture LlamaForCausalLM, and the model has Qwen3ForCausalLM"),
        ("tiny-qwen3-float32", "was recorded for dtype float32, and the model has bfloat16"),
    ],
)
def test_the_manifest_of_another_model_is_refused_before_the_run(name, said, tmp_path):
    checkpoint = open_checkpoint(write_tiny("qwen3", tmp_path, "bfloat16"))
    model = ModelUnderTest(checkpoint=checkpoint, dtype="bfloat16", mesh=Mesh(), tier="cpu")
    file = ROOT / "golden" / f"{name}.json"
    with pytest.raises(UsageError, match=said):
        require_same_model(read_manifest(file), model, file)
