"""What is refused before anything is started, and the deadline of what is.

What this does not exercise: `verifier.model.checkpoint` on damaged files (tests/unit/model/test_checkpoint.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess
from verifier.errors import InternalError, UsageError
from verifier.mesh import Mesh
from verifier.model.checkpoint import require_room
from verifier.model.tiny import write_tiny
from verifier.runs.model_under_test import MAX_MODEL_LEN, open_model
from verifier.runs.resources import Deadline

UP = "model.layers.0.mlp.up_proj.weight"
SHARD = "model.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(write_tiny("qwen3", tmp_path / "cache"), tmp_path / "copy"))


def configure(copy: Path, **changes: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 8}, "has no tensor `model.layers.4.input_layernorm.weight`, which its config.json asks"),
        ({"num_hidden_layers": 10**9}, r"asks for 1,000,000,000 layers, the shards hold \d+ tensors"),
        ({"num_hidden_layers": "four"}, "`num_hidden_layers` = 'four' where a positive integer is needed"),
        ({"num_attention_heads": "8"}, "`num_attention_heads` = '8' where a positive integer is needed"),
        ({"vocab_size": None}, "`vocab_size` = None where a positive integer is needed"),
        ({"vocab_size": 10**12}, r"with shape \[512, 96\], where config.json asks for \[1000000000000, 96\]"),
        ({"num_experts": "many"}, "`num_experts` = 'many' where a positive integer is needed"),
        ({"model_type": "llama"}, "Qwen3ForCausalLM with `model_type` = 'llama', which has to be 'qwen3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"is quantized \(gptq\): convert it to bf16 first"),
    ],
    ids=str,
)
def test_a_config_that_does_not_describe_the_checkpoint_is_refused(copy, changes, said):
    configure(copy, **changes)
    with pytest.raises(UsageError, match=said):
        open_model(str(copy), "float32", Mesh())


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, f"has no tensor `{UP}`, which its config.json asks for"),
        (torch.zeros(7, 64), rf"holds `{UP}` with shape \[7, 64\], where config.json asks for \[128, 96\]"),
        (
            torch.zeros(128, 96, dtype=torch.float16),
            f"holds `{UP}` in float16, most of the checkpoint is in float32: convert it first",
        ),
    ],
    ids=["absent", "shape", "dtype"],
)
def test_a_tensor_that_is_not_what_the_config_asks_for_is_refused(copy, tensor, said):
    tensors = {}
    for shard in sorted(copy.glob("model*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (copy / "model.safetensors.index.json").unlink()
    tensors |= {UP: tensor}
    save_file({name: item for name, item in tensors.items() if item is not None}, copy / SHARD)
    with pytest.raises(UsageError, match=said):
        open_model(str(copy), "float32", Mesh())


def test_more_ranks_than_can_be_started_are_refused_before_the_model_is_read():
    with pytest.raises(UsageError, match="200 ranks asked for: this machine's launcher starts 1 to 128"):
        open_model("absent", "float32", Mesh(dp=200))


def test_a_model_without_room_for_a_round_trip_is_refused(copy):
    configure(copy, max_position_embeddings=16)
    with pytest.raises(UsageError, match="`max_position_embeddings` = 16: sequences of a round trip have up to 512"):
        require_room(open_model(str(copy), "float32", Mesh()).checkpoint.config, MAX_MODEL_LEN)


def test_a_deadline_names_the_step_that_came_too_late():
    assert 0 < Deadline(60).left("lunch") <= 60
    with pytest.raises(InternalError, match=r"--timeout is 1e-09 s, which had passed before lunch"):
        Deadline(1e-9).left("lunch")


def test_a_folder_for_temporary_files_with_too_long_a_name_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(UsageError, match="has too long a name for sockets: set TMPDIR to another"):
        EngineProcess(EngineConfig(kind="hf", checkpoint="absent"))
    assert list(folder.iterdir()) == []
