"""What is refused before anything is started, and the deadline of what is.

What this does not exercise: `verifier.model.checkpoint` on damaged files (tests/unit/model/test_checkpoint.py).
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from verifier.config import EngineOptions, RoundtripConfig
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess
from verifier.errors import InternalError, UsageError
from verifier.mesh import Mesh
from verifier.model.checkpoint import open_checkpoint, require_room
from verifier.model.tiny import TINY, write_tiny
from verifier.runs.model_under_test import MAX_MODEL_LEN, open_for_roundtrip, open_model, require_roundtrip
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
        ({"num_hidden_layers": 3}, "`num_hidden_layers` = 3, and the weights have 4: make them agree"),
        ({"num_hidden_layers": 5}, "`num_hidden_layers` = 5, and the weights have 4: make them agree"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` = 1,000,000,000, and the weights have 4: make them agree"),
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


SIZES = ("hidden_size", "head_dim", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
NO_ROW = {"attention_bias": True}
"""Change of config.json for which no family row describes the checkpoint."""
ROPES: list[object] = [
    {"rope_type": "spiral"}, {"type": "spiral", "factor": 2.0}, {"rope_type": ["yarn"], "factor": 2.0}, "yarn", [1],
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "spiral"}},
]  # fmt: skip
NO_FACTOR: list[dict] = [
    {"rope_type": "yarn"}, {"type": "linear"}, {"rope_type": "dynamic", "factor": "2"},
    {"rope_type": "yarn", "factor": 0}, {"rope_type": "yarn", "factor": -1.0}, {"rope_type": "llama3"},
    {"rope_type": "yarn", "factor": float("nan")}, {"full_attention": {"rope_type": "yarn"}},
]  # fmt: skip


@pytest.mark.parametrize("row", [{}, NO_ROW], ids=["row", "no-row"])
class TestValuesThatNoLibraryTakes:
    """Values in config.json that are refused, whether a family row describes the checkpoint or not."""

    @pytest.mark.parametrize("key", SIZES)
    @pytest.mark.parametrize("value", [0, -8, "8", 8.0, True, [8]], ids=repr)
    def test_a_size(self, copy, row, key, value):
        self.refused(copy, row, {key: value}, re.escape(f"`{key}` = {value!r} where a positive integer is needed"))

    @pytest.mark.parametrize("layers", [3, 5])
    def test_a_number_of_layers(self, copy, row, layers):
        said = f"`num_hidden_layers` = {layers}, and the weights have 4: make them agree"
        self.refused(copy, row, {"num_hidden_layers": layers}, said)

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("value", ["bf17", "int8", "auto", 16, ["float32"]], ids=repr)
    def test_a_dtype(self, copy, row, key, value):
        said = f"`{key}` = {value!r}: it has to be one of float64 float32 float16 bfloat16"
        self.refused(copy, row, {key: value}, re.escape(said))

    @pytest.mark.parametrize("value", ["sillu", "", 3, ["silu"]], ids=repr)
    def test_an_activation(self, copy, row, value):
        said = f"`hidden_act` = {value!r}: it has to be one of silu gelu "
        self.refused(copy, row, {"hidden_act": value}, re.escape(said))

    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("value", ROPES, ids=repr)
    def test_a_type_of_rope(self, copy, row, key, value):
        said = rf"`{key}` = .* has no usable `rope_type`; types: default, mrope, "
        self.refused(copy, row, {key: value}, said)

    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("value", NO_FACTOR, ids=repr)
    def test_a_rope_without_its_factor(self, copy, row, key, value):
        self.refused(copy, row, {key: value}, rf"`{key}` = .* has no usable `factor`; types: ")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rope_theta", 0), ("rope_theta", -1e4), ("rope_theta", "1e4"), ("rope_theta", float("nan")),
            ("rms_norm_eps", -1e-6), ("rms_norm_eps", float("inf")), ("partial_rotary_factor", 1.5),
        ],
    )  # fmt: skip
    def test_a_number(self, copy, row, key, value):
        said = re.escape(f"`{key}` = {value!r}: it has to be a number above 0, at most ")
        self.refused(copy, row, {key: value}, said)
        if key != "rms_norm_eps":
            self.refused(copy, row, {key: 0.5, "rope_parameters": {"rope_type": "default", key: value}}, said)

    def test_half_a_pair(self, copy, row):
        self.refused(copy, row, {"head_dim": 7}, "`head_dim` = 7: rotary embeddings turn pairs, so it has to be even")

    def refused(self, copy, row, changes, said):
        configure(copy, **row, **changes)
        with pytest.raises(UsageError, match=said):
            open_model(str(copy), "float32", Mesh())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-moe", {"num_experts": 0}),
        ("qwen3-moe", {"num_experts_per_tok": "2"}),
        ("deepseek-v3", {"n_group": 0}),
        ("deepseek-v3", {"topk_group": 1.0}),
        ("nemotron-h", {"chunk_size": -128}),
    ],
    ids=str,
)
def test_a_bad_size_of_one_family_is_refused(name, changes, tmp_path):
    path = Path(shutil.copytree(write_tiny(name, tmp_path / "cache"), tmp_path / "copy"))
    configure(path, **changes)
    ((key, value),) = changes.items()
    with pytest.raises(UsageError, match=re.escape(f"`{key}` = {value!r} where a positive integer is needed")):
        open_model(str(path), "float32", Mesh())


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "float16", "sliding_window": None, "head_dim": 12},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}},
        {"num_hidden_layers": 3, "num_nextn_predict_layers": 1},
    ],
    ids=str,
)
def test_what_published_configs_say_is_taken(copy, changes):
    configure(copy, **NO_ROW, **changes)
    open_model(str(copy), "float32", Mesh())


def test_every_activation_of_megatron_bridge_is_taken(copy):
    (folder,) = find_spec("megatron.core").submodule_search_locations
    source = (Path(folder).parent / "bridge" / "utils" / "activation_map.py").read_text()
    names = re.findall(r'^    "(\w+)":', source.partition("ACTIVATION_FUNC_MAP")[2].partition("}")[0], re.MULTILINE)
    assert "silu" in names
    for name in names:
        configure(copy, hidden_act=name)
        open_model(str(copy), "float32", Mesh())


SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 512, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {}),
        ("gemma2", {}),
        ("olmoe", {"num_experts": 4}),
        ("glm4_moe", {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}),
        ("minimax_m2", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("ernie4_5_moe", {"moe_num_experts": 4}),
        ("llama4_text", {"num_local_experts": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hf_is_refused_just_where_it_cannot_place_a_tensor(kind, changes, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from verifier.model.transformers_hf import checkpoint_places

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint_places(model, checkpoint.names()).keys() == set(checkpoint.names())
    config = RoundtripConfig(model=str(tmp_path), engine=EngineOptions(kind="hf"))
    require_roundtrip(config, checkpoint.config, checkpoint.names(), "cpu")
    odd = "model.layers.0.mlp.experts.blocks"
    said = f"--engine hf has no place for `{odd}` of {tmp_path}: use --engine vllm"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        require_roundtrip(config, checkpoint.config, [*checkpoint.names(), odd], "cpu")


def test_hf_is_taken_with_layers_that_predict_further_tokens(copy):
    configure(copy, num_hidden_layers=3, num_nextn_predict_layers=1)
    open_for_roundtrip(RoundtripConfig(model=str(copy), engine=EngineOptions(kind="hf")))


@pytest.mark.parametrize("name", TINY)
def test_every_generated_family_is_taken_with_hf(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_for_roundtrip(RoundtripConfig(model=f"tiny:{name}", engine=EngineOptions(kind="hf")))


def test_a_round_trip_without_room_for_its_temporary_files_is_refused(copy, monkeypatch):
    size = open_checkpoint(copy).num_bytes
    config = RoundtripConfig(model=str(copy), engine=EngineOptions(kind="hf"), cycles=3)
    needed = 5 * size + 6 * size + 4 * size  # weights, gradients, and a checkpoint, all in float32
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with nullcontext() if free == needed else pytest.raises(UsageError, match="set TMPDIR to a larger folder"):
            open_for_roundtrip(config)


def test_more_ranks_than_can_be_started_are_refused_before_the_model_is_read():
    with pytest.raises(UsageError, match=r"1,000,000 ranks asked for: this machine has .* GiB"):
        open_model("absent", "float32", Mesh(dp=1_000_000))


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
