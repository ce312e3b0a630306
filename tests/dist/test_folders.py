"""Folders as they are found in the wild, given to `verifier golden`: one sentence, exit code 4, within 2 s of CPU.

What this does not exercise: every damage of a shard (tests/unit/model/test_checkpoint.py) and every value of
config.json (tests/unit/runs/test_model_under_test.py).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.meta.sources import ROOT
from tests.processes import said
from verifier.model.architectures_hf import write_scaled
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow
MOST_S = 2.0
READS_WEIGHTS_S = 10.0
"""Where two tensors are compared, which imports torch."""
SHARD = "model-00001-of-00002.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
NO_WEIGHTS = "{path} holds no weights: neither model.safetensors.index.json nor model.safetensors names any"
NO_CONFIG = "config.json is missing from {path}"
PICKLED = "holds pickled weights: save them as safetensors by transformers' `save_pretrained`"
CONVERT = "checkpoint {path} is quantized (%s): convert it to bf16 first"
STORED = (
    "the checkpoint is stored in %s and the run is in %s: rounding it would hide what is to be shown; choose the "
    "checkpoint's own dtype, or convert it first"
)
NO_BRIDGE = "unknown family: megatron-bridge has no bridge for %s, which {path} holds"
NO_EMBEDDING = "checkpoint {path} has no tensor `model.embed_tokens.weight`, which its config.json asks for"
BIAS = (
    "shard {path}/model.safetensors holds `model.layers.1.mlp.gate.e_score_correction_bias` in bfloat16, most of the "
    "checkpoint is in float32: convert it first"
)
Change = Callable[[Path], object]


def _config(**changes: object) -> Change:
    def change(path: Path) -> None:
        found = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**found, **changes}))

    return change


def _text(content: str) -> Change:
    return lambda path: (path / "config.json").write_text(content)


def _tensors(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> Change:
    def edit(path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(path.glob("model*.safetensors")):
            tensors |= load_file(shard)
            shard.unlink()
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        found = [change(name, value) for name, value in tensors.items()]
        save_file(dict(item for item in found if item is not None), path / "model.safetensors")

    return edit


def _of_dtype(dtype: torch.dtype, part: str = "") -> Change:
    return _tensors(lambda name, value: (name, value.to(dtype) if part in name else value))


def _renamed(old: str, new: str) -> Change:
    return _tensors(lambda name, value: (new + name.removeprefix(old), value))


def _instead(*names: str, config: bool = True) -> Change:
    """Other files in the place of the weights, and of config.json."""

    def change(path: Path) -> None:
        for file in path.glob("model*"):
            file.unlink()
        if not config:
            (path / "config.json").unlink()
        for name in names:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text("{}")

    return change


def _each(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes]


def _padded(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, torch.cat([value, value[:16]]) if "embed_tokens" in name or "lm_head" in name else value


FOLDERS: dict[str, tuple[str, Change, str]] = {
    "awq": ("qwen3", _config(quantization_config={"quant_method": "awq"}), CONVERT % "awq"),
    "mxfp4": ("qwen3", _config(quantization_config={"quant_method": "mxfp4"}), CONVERT % "mxfp4"),
    "fp8": ("deepseek-v3", _config(quantization_config={"quant_method": "fp8"}), CONVERT % "fp8"),
    "modelopt": ("qwen3", _config(quantization_config={"quant_algo": "NVFP4"}), CONVERT % "NVFP4"),
    "fp8 without a word": (
        "qwen3", _of_dtype(torch.float8_e4m3fn, "proj"), CONVERT % "tensors in float8_e4m3fn",
    ),
    "int8 without a word": ("qwen3", _of_dtype(torch.int8, "mlp"), CONVERT % "tensors in int8"),
    "float16": (
        "qwen3", _each(_config(dtype="float16"), _of_dtype(torch.float16)), STORED % ("float16", "float32"),
    ),
    "float64": (
        "qwen3", _each(_config(dtype="float64"), _of_dtype(torch.float64)), STORED % ("float64", "float32"),
    ),
    "float32 that says bfloat16": ("qwen3", _config(dtype="bfloat16"), STORED % ("float32", "bfloat16")),
    "bfloat16 that says float32": (
        "qwen3", _of_dtype(torch.bfloat16), STORED % ("bfloat16", "float32"),
    ),
    "score bias in bfloat16": ("deepseek-v3", _of_dtype(torch.bfloat16, "correction"), BIAS),
    "score bias in bfloat16, no row": ("glm4_moe", _of_dtype(torch.bfloat16, "correction"), BIAS),
    "base stated twice": (
        "qwen3", _config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "{path}/config.json has `rope_theta` = 500000.0 and `rope_parameters.rope_theta` = 10000.0, of which libraries "
        "read either: make them agree",
    ),
    "rotated part stated twice": (
        "qwen3", _config(rotary_dim=8, partial_rotary_factor=0.75),
        "{path}/config.json has `partial_rotary_factor` = 0.75 and `rotary_dim / head_dim` = 0.25, of which libraries "
        "read either: make them agree",
    ),
    "tied with another head": (
        "qwen3", _config(tie_word_embeddings=True),
        "checkpoint {path} has `tie_word_embeddings` = true and holds another `lm_head.weight` than "
        "`model.embed_tokens.weight`, of which libraries take either as the head: remove it, or set the key to false",
    ),
    "no head": (
        "qwen3", _tensors(lambda name, value: None if name == "lm_head.weight" else (name, value)),
        "checkpoint {path} has no tensor `lm_head.weight`, which its config.json asks for",
    ),
    "pickled": ("qwen3", _instead("pytorch_model.bin"), f"{NO_WEIGHTS}; pytorch_model.bin {PICKLED}"),
    "pickled shards": (
        "qwen3", _instead("pytorch_model-00001-of-00002.bin"),
        f"{NO_WEIGHTS}; pytorch_model-00001-of-00002.bin {PICKLED}",
    ),
    "of Meta": (
        "qwen3", _instead("params.json", "consolidated.00.pth", config=False),
        f"{NO_CONFIG}; consolidated.00.pth {PICKLED}",
    ),
    "of Mistral": (
        "qwen3", _instead("consolidated.safetensors"),
        f"{NO_WEIGHTS}; consolidated.safetensors holds weights under Mistral's names: take the files "
        "model*.safetensors of the same model",
    ),
    "of llama.cpp": (
        "qwen3", _instead("x.Q4_K_M.gguf"),
        f"{NO_WEIGHTS}; x.Q4_K_M.gguf holds weights of llama.cpp: take the model's safetensors",
    ),
    "of TensorFlow": ("qwen3", _instead("tf_model.h5"), NO_WEIGHTS),
    "of Flax": ("qwen3", _instead("flax_model.msgpack"), NO_WEIGHTS),
    "of ONNX": ("qwen3", _instead("onnx/model.onnx"), NO_WEIGHTS),
    "of DeepSpeed": ("qwen3", _instead("global_step10/mp_rank_00_model_states.pt"), NO_WEIGHTS),
    "of Megatron": ("qwen3", _instead("iter_10/common.pt", config=False), NO_CONFIG),
    "adapter alone": (
        "qwen3", _instead("adapter_config.json", "adapter_model.safetensors", config=False),
        f"{NO_CONFIG}; adapter_config.json is an adapter, which is to be merged into its base model first",
    ),
    "folder of checkpoints": (
        "qwen3", _instead("checkpoint-500/config.json", config=False),
        f"{NO_CONFIG}; {{path}}/checkpoint-500 has one: give that folder",
    ),
    "tokenizer alone": ("qwen3", _instead("tokenizer.json", config=False), NO_CONFIG),
    "page of an error": (
        "qwen3", _text("<!doctype html>"),
        "{path}/config.json is not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "mark of byte order": (
        "qwen3", _text("\ufeff{}"),
        "{path}/config.json is not valid JSON: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
    ),
    "comma at the end": (
        "qwen3", _text('{"a": 1,}'),
        "{path}/config.json is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 9 "
        "(char 8)",
    ),
    "pointers of LFS": (
        "qwen3", lambda path: [file.write_text(LFS) for file in path.glob("*.safetensors")],
        f"shard {{path}}/{SHARD} is a pointer of Git LFS and no weights: run `git lfs pull` there",
    ),
    "half a download": (
        "qwen3", lambda path: (path / SHARD).rename(path / f"{SHARD}.incomplete"),
        f"shard {{path}}/{SHARD} is missing: model.safetensors.index.json names it",
    ),
    "names of the inner model": ("qwen3", _renamed("model.", ""), NO_EMBEDDING),
    "names of a wrapped model": ("qwen3", _renamed("", "module."), NO_EMBEDDING),
    "names of a compiled model": ("qwen3", _renamed("", "_orig_mod."), NO_EMBEDDING),
    "padded vocabulary": (
        "qwen3", _tensors(_padded),
        "shard {path}/model.safetensors holds `model.embed_tokens.weight` with shape [528, 96], where config.json asks "
        "for [512, 96]",
    ),
    "classifier": (
        "qwen3", _config(architectures=["Qwen3ForSequenceClassification"]),
        NO_BRIDGE % "Qwen3ForSequenceClassification",
    ),
    "inner model": ("qwen3", _config(architectures=["Qwen3Model"]), NO_BRIDGE % "Qwen3Model"),
    "remote code": (
        "qwen3", _config(model_type="bailing_moe", auto_map={"AutoConfig": "a.B"}),
        "{path}/config.json names architecture Qwen3ForCausalLM with `model_type` = 'bailing_moe', which has to be "
        "'qwen3'",
    ),
}  # fmt: skip
"""Name -> generated model, what is changed, the sentence."""


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_refused_at_once_in_a_true_sentence(name: str, sources: Path, tmp_path: Path) -> None:
    model, change, sentence = FOLDERS[name]
    source = write_tiny(model, sources) if model != "glm4_moe" else write_scaled(model, sources)
    path = Path(shutil.copytree(source, tmp_path / "model"))
    change(path)
    before = _seconds()
    done = subprocess.run(
        [sys.executable, "-m", "verifier", "golden", "--model", str(path), "--trace", str(tmp_path / "trace")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    used = _seconds() - before
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert said(done.stderr) == "verifier: " + sentence.format(path=path)
    assert used < (READS_WEIGHTS_S if name == "tied with another head" else MOST_S)
    assert not (tmp_path / "trace").exists()


def test_there_are_forty() -> None:
    assert len(FOLDERS) >= 40
