from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import pytest
import torch

from verifier.errors import UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import resolve_model
from verifier.model.tiny import TINY, write_tiny

DTYPES = ("float32", "bfloat16")
GOLDEN = {
    ("qwen3", "float32"): "f70dea938654a2cc",
    ("qwen3", "bfloat16"): "1c3bde31d8a5d949",
    ("qwen3-tied", "float32"): "247fe4e9b59ddeb1",
    ("qwen3-tied", "bfloat16"): "d1b3bcbbca97a54b",
    ("qwen2", "float32"): "a99c5ec2bcea4cd3",
    ("qwen2", "bfloat16"): "3fb094950d2c7a7f",
    ("llama", "float32"): "297e69827cebe268",
    ("llama", "bfloat16"): "f55ce1d6c46cee63",
    ("qwen3-moe", "float32"): "39b41b2f32d6d856",
    ("qwen3-moe", "bfloat16"): "ec1d055d3925fd4c",
    ("qwen3-moe-320", "float32"): "febff51bae276563",
    ("qwen3-moe-320", "bfloat16"): "44430e1f8f390f2a",
    ("deepseek-v3", "float32"): "a6c7f3796f045a81",
    ("deepseek-v3", "bfloat16"): "7e2d9214dd35cd88",
    ("deepseek-v3-yarn", "float32"): "a6c7f3796f045a81",
    ("deepseek-v3-yarn", "bfloat16"): "7e2d9214dd35cd88",
    ("nemotron-h", "float32"): "b44d36965f33cc48",
    ("nemotron-h", "bfloat16"): "a79e6d10563d823b",
}
"""(name, dtype) -> digest over names, dtypes, shapes and bytes."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def _digest(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    digest = hashlib.blake2b(digest_size=8)
    for name in checkpoint.names():
        meta = checkpoint.meta(name)
        digest.update(f"{name} {meta.dtype} {meta.shape}".encode())
        digest.update(checkpoint.read(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("name", "dtype"), itertools.product(TINY, DTYPES))
def test_same_bytes_on_every_machine(name: str, dtype: str, cache: Path) -> None:
    assert _digest(write_tiny(name, cache, dtype)) == GOLDEN[name, dtype]


@pytest.mark.parametrize(("name", "dtype"), itertools.product(TINY, DTYPES))
def test_every_tensor_row_head_and_expert_differs(name: str, dtype: str, cache: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(name, cache, dtype))
    seen: set[bytes] = set()
    for tensor_name in checkpoint.names():
        tensor = checkpoint.read(tensor_name).float()
        rows = tensor[None] if tensor.ndim == 1 else tensor.flatten(1)
        for row in rows:
            key = row.numpy().tobytes()
            assert key not in seen, tensor_name
            seen.add(key)
        if tensor.ndim == 1:
            assert not (tensor == (0.0 if "bias" in tensor_name else 1.0)).any(), tensor_name
            # Of bfloat16 some 150 values lie where norm weights do.
            assert tensor.unique().numel() > min(tensor.numel() * 0.5, 100), tensor_name
        else:
            assert tensor.std().item() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.05), tensor_name


def test_decays_stay_float32_and_are_no_bfloat16(cache: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("nemotron-h", cache, "bfloat16"))
    float32 = {name.rpartition(".")[2] for name in checkpoint.names() if checkpoint.meta(name).dtype == "float32"}
    assert float32 == {"A_log", "e_score_correction_bias"}
    decay = checkpoint.read("backbone.layers.0.mixer.A_log")
    assert not torch.equal(decay, decay.bfloat16().float())


def test_score_bias_stays_float32_and_is_no_bfloat16(cache: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("deepseek-v3", cache, "bfloat16"))
    float32 = [name for name in checkpoint.names() if checkpoint.meta(name).dtype == "float32"]
    assert float32 == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]
    for name in float32:
        bias = checkpoint.read(name)
        assert not torch.equal(bias, bias.bfloat16().float())


@pytest.mark.parametrize("name", TINY)
def test_shards_index_and_no_other_file(name: str, cache: Path) -> None:
    path = write_tiny(name, cache)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_model_whose_vocabulary_is_padded_has_known_bytes(cache: Path) -> None:
    assert _digest(write_tiny("qwen3-504", cache)) == "47be427a4613210d"


def test_a_model_to_train_has_a_tokenizer_and_known_bytes(cache: Path) -> None:
    path = write_tiny("add", cache)
    assert {"tokenizer.json", "tokenizer_config.json"} < {file.name for file in path.iterdir()}
    assert _digest(path) == "d1ac145c99d11879"


def test_second_call_finds_the_first(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    before = (path / "config.json").stat().st_mtime_ns
    assert write_tiny("llama", tmp_path) == path
    assert (path / "config.json").stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def test_seed_and_dtype_have_their_own_directory(tmp_path: Path) -> None:
    paths = {
        write_tiny("llama", tmp_path),
        write_tiny("llama", tmp_path, seed=2),
        write_tiny("llama", tmp_path, "bfloat16"),
    }
    assert len(paths) == 3
    assert len({_digest(path) for path in paths}) == 3


def test_other_sizes_of_a_family(tmp_path: Path) -> None:
    path = write_tiny("qwen3-moe", tmp_path, changes={"num_experts": 8, "num_hidden_layers": 2})
    assert len(open_checkpoint(path).names()) == 3 + 2 * (9 + 3 * 8)


def test_resolve_model_takes_an_id_or_a_directory(tmp_path: Path) -> None:
    generated = resolve_model("tiny:qwen3", tmp_path, "bfloat16")
    assert generated == write_tiny("qwen3", tmp_path, "bfloat16")
    assert resolve_model(str(generated), tmp_path) == generated


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda path: resolve_model("tiny:qwen4", path),
            "unknown model `tiny:qwen4`: nearest are `tiny:qwen3`, `tiny:qwen2`, `tiny:qwen3-504`",
        ),
        (
            lambda path: resolve_model("wide:qwen3", path, "bfloat16"),
            "unknown model `wide:qwen3`: known are wide:qwen3-30b-a3b, wide:deepseek-v3, wide:nemotron-3-nano",
        ),
        (
            lambda path: resolve_model("wide:deepseek-v3", path),
            "`wide:deepseek-v3` has the published dtype, so it takes --dtype bf16",
        ),
        (
            lambda path: resolve_model("Qwen/Qwen3-0.6B", path),
            "unknown model `Qwen/Qwen3-0.6B`: it is neither a local checkpoint directory nor one of `tiny:qwen3`, "
            "`tiny:qwen3-tied`, `tiny:qwen2`, `tiny:llama`, `tiny:qwen3-moe`, `tiny:qwen3-moe-320`, "
            "`tiny:deepseek-v3`, `tiny:deepseek-v3-yarn`, `tiny:nemotron-h`, `tiny:add`, `tiny:add-moe`, "
            "`tiny:add-moe-16`, `tiny:add-deepseek`, `tiny:qwen3-504`, `tiny:qwen3-yarn`, `wide:qwen3-30b-a3b`, "
            "`wide:deepseek-v3`, `wide:nemotron-3-nano`, `published:smollm2-135m`, `published:gemma3-270m`, "
            "nor `tiny:` and a model type of docs/models.md",
        ),
        (
            lambda path: write_tiny("llama", path, "float16"),
            "generated checkpoints come in float32 and bfloat16, not float16",
        ),
        (
            lambda path: write_tiny("llama", path, changes={"mlp_bias": True}),
            "this config.json is not of family `llama`: see `requires` and `needs` of the family",
        ),
    ],
)
def test_bad_requests_are_one_sentence(act, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        act(tmp_path)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a checkpoint under"):
        write_tiny("llama", tmp_path / "file")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_tiny("llama", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "dtype"), itertools.product(TINY, DTYPES))
def test_transformers_loads_every_tensor_as_written(name: str, dtype: str, cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny(name, cache, dtype)
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
    assert not any(info.values()), info
    renamed = {"model.": "backbone."} if name == "nemotron-h" else {}
    loaded = {_renamed(key, renamed): tensor for key, tensor in model.state_dict().items()}
    checkpoint = open_checkpoint(path)
    for tensor_name in checkpoint.names():
        expected = checkpoint.read(tensor_name)
        actual = loaded[tensor_name] if tensor_name in loaded else _expert(loaded, tensor_name)
        if tensor_name.endswith(".A_log"):  # rounded to the model's dtype
            expected = expected.to(getattr(torch, dtype))
        assert actual.dtype == expected.dtype, tensor_name
        assert torch.equal(actual, expected), tensor_name


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    return next((to + name.removeprefix(old) for old, to in prefixes.items() if name.startswith(old)), name)


def _expert(loaded: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One expert's matrix out of transformers' fused ones."""
    block, _, rest = name.partition(".experts.")
    expert, projection, _ = rest.split(".")
    if f"{block}.experts.{projection}" in loaded:
        return loaded[f"{block}.experts.{projection}"][int(expert)]
    gate, up = loaded[f"{block}.experts.gate_up_proj"][int(expert)].chunk(2)
    return {"gate_proj": gate, "up_proj": up}[projection]
