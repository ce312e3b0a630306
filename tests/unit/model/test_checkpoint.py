from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verifier.errors import UsageError
from verifier.model.checkpoint import (
    TensorHeader,
    open_checkpoint,
    require_computed,
    require_config,
    write_shard,
    write_shards,
)
from verifier.model.tiny import write_tiny

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("source"))


@pytest.fixture
def path(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


def test_reads_what_safetensors_reads(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    expected = {**load_file(path / FIRST), **load_file(path / SECOND)}
    assert checkpoint.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.meta(name).shape == tuple(tensor.shape)
    assert checkpoint.meta("model.norm.weight") == TensorHeader(
        dtype="float32", shape=(96,), num_bytes=384, shard=SECOND
    )


def test_reading_maps_the_file_and_copies_nothing(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    name = "model.embed_tokens.weight"
    assert checkpoint.read(name).data_ptr() == checkpoint.read(name).data_ptr()


def test_writing_to_a_tensor_leaves_the_file_alone(path: Path) -> None:
    before = (path / SECOND).read_bytes()
    open_checkpoint(path).read("model.norm.weight").fill_(0)
    assert (path / SECOND).read_bytes() == before


def test_one_unindexed_shard_and_every_dtype(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    dtypes = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    dtypes += ["int64", "int32", "int16", "int8", "uint8", "bool"]
    tensors = {name: torch.ones(2, 3).to(getattr(torch, name)) for name in dtypes}
    save_file({**tensors, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert {name: checkpoint.meta(name).dtype for name in dtypes} == {name: name for name in dtypes}
    assert checkpoint.read("scalar").item() == 1.5
    assert checkpoint.read("empty").shape == (0, 4)
    assert checkpoint.read("float8_e4m3fn").dtype == torch.float8_e4m3fn


def test_an_index_of_one_file_is_read(path: Path) -> None:
    tensors = {**load_file(path / FIRST), **load_file(path / SECOND)}
    for file in path.glob("model*"):
        file.unlink()
    save_file(tensors, path / SINGLE)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))
    assert open_checkpoint(path).names() == sorted(tensors)


def test_an_absent_tensor_is_named(path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(path).read("model.layers.9.mlp.down_proj.weight")
    assert str(caught.value) == f"checkpoint {path} has no tensor `model.layers.9.mlp.down_proj.weight`"


def _edit_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return damage


def _edit_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = (path / SECOND).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        (path / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    return damage


def _cut(num_bytes: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = (path / SECOND).read_bytes()
        (path / SECOND).write_bytes(raw[:num_bytes] if num_bytes > 0 else raw + b"\0" * -num_bytes)

    return damage


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "no checkpoint directory at {path}"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json is missing from {path}"),
    "broken config": (
        lambda path: (path / "config.json").write_text("{"),
        "{path}/config.json is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
    ),
    "config without an end": (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        "{path}/config.json is not valid JSON: maximum recursion depth exceeded while decoding a JSON array from a "
        "unicode string",
    ),
    "config is no object": (
        lambda path: (path / "config.json").write_text("[]"),
        "{path}/config.json holds a JSON list, not an object",
    ),
    "config is no text": (
        lambda path: (path / "config.json").write_bytes(b"\xff\xfe{}"),
        "{path}/config.json is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "no architecture": (
        lambda path: (path / "config.json").write_text("{}"),
        "{path}/config.json names no architecture: `architectures` is None",
    ),
    "no weights": (
        lambda path: [file.unlink() for file in path.glob("model*")],
        "{path} holds no weights: neither model.safetensors.index.json nor model.safetensors names any",
    ),
    "no tensors": (
        lambda path: [*map(Path.unlink, path.glob("model*")), save_file({}, path / SINGLE)],
        "{path} holds no weights: neither model.safetensors.index.json nor model.safetensors names any",
    ),
    **{
        f"only {file}": (
            lambda path, file=file: [*map(Path.unlink, path.glob("model*")), (path / file).write_bytes(b"")],
            f"{{path}} holds no weights: neither {INDEX} nor {SINGLE} names any; {file} {says}",
        )
        for file, says in (
            ("pytorch_model.bin", "holds pickled weights: save them as safetensors by transformers' `save_pretrained`"),
            (
                "consolidated.safetensors",
                "holds weights under Mistral's names: take the files model*.safetensors of the same model",
            ),
            ("adapter_config.json", "is an adapter, which is to be merged into its base model first"),
            ("model-q4.gguf", "holds weights of llama.cpp: take the model's safetensors"),
        )
    },
    "adapter alone": (
        lambda path: [*map(Path.unlink, path.iterdir()), (path / "adapter_config.json").write_text("{}")],
        "config.json is missing from {path}; adapter_config.json is an adapter, which is to be merged into its base "
        "model first",
    ),
    "config one folder below": (
        lambda path: ((path / "model").mkdir(), (path / "config.json").rename(path / "model" / "config.json")),
        "config.json is missing from {path}; {path}/model has one: give that folder",
    ),
    "root of a hub's cache": (
        lambda path: (
            [*map(Path.unlink, path.iterdir())],
            (path / "snapshots" / "0a1").mkdir(parents=True),
            (path / "snapshots" / "0a1" / "config.json").write_text("{}"),
        ),
        "config.json is missing from {path}; {path}/snapshots/0a1 has one: give that folder",
    ),
    "pointer of Git LFS": (
        lambda path: (path / SECOND).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "shard {path}/model-00002-of-00002.safetensors is a pointer of Git LFS and no weights: "
        "run `git lfs pull` there",
    ),
    "config with a comment": (
        lambda path: (path / "config.json").write_text("// mine\n{}"),
        "{path}/config.json is not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "tensor in two shards": (
        lambda path: save_file({NORM: torch.ones(96), **load_file(path / FIRST)}, path / FIRST),
        "shard {path}/model-00001-of-00002.safetensors holds `model.norm.weight`, "
        "which model.safetensors.index.json places in `model-00002-of-00002.safetensors`",
    ),
    "link to nothing": (
        lambda path: ((path / SECOND).unlink(), (path / SECOND).symlink_to("../blobs/0a1")),
        "shard {path}/model-00002-of-00002.safetensors is missing: model.safetensors.index.json names it",
    ),
    "config is a pipe": (
        lambda path: ((path / "config.json").unlink(), os.mkfifo(path / "config.json")),
        "config.json is missing from {path}",
    ),
    "one file beside an index": (
        lambda path: save_file({NORM: torch.ones(96)}, path / SINGLE),
        "{path} holds model.safetensors and model.safetensors.index.json or shards, of which libraries read either: "
        "remove one",
    ),
    "one file beside shards": (
        lambda path: (save_file({NORM: torch.ones(96)}, path / SINGLE), (path / INDEX).unlink()),
        "{path} holds model.safetensors and model.safetensors.index.json or shards, of which libraries read either: "
        "remove one",
    ),
    "an adapter": (
        lambda path: (path / "adapter_config.json").write_text("{}"),
        "{path} holds adapter_config.json, by which transformers loads an adapter too: remove it",
    ),
    "empty weight map": (
        lambda path: (path / INDEX).write_text('{"weight_map": {}}'),
        "{path}/model.safetensors.index.json has no usable `weight_map`",
    ),
    "missing shard": (
        lambda path: (path / SECOND).unlink(),
        "shard {path}/model-00002-of-00002.safetensors is missing: model.safetensors.index.json names it",
    ),
    "shard outside of the directory": (
        _edit_index(lambda weight_map: weight_map.update({NORM: f"../{SECOND}"})),
        "{path}/model.safetensors.index.json names shard `../model-00002-of-00002.safetensors`, "
        "which is not a file name in its own directory",
    ),
    "index names an absent tensor": (
        _edit_index(lambda weight_map: weight_map.update({"model.norm.bias": SECOND})),
        "{path}/model.safetensors.index.json names tensor `model.norm.bias`, "
        "but shard `model-00002-of-00002.safetensors` does not hold it",
    ),
    "index names two absent tensors": (
        _edit_index(lambda weight_map: weight_map.update({"b": SECOND, "a": FIRST})),
        "{path}/model.safetensors.index.json names tensor `a` and 1 more, "
        "but shard `model-00001-of-00002.safetensors` does not hold it",
    ),
    "tensor that the index does not name": (
        _edit_index(lambda weight_map: weight_map.pop(NORM)),
        "shard {path}/model-00002-of-00002.safetensors holds `model.norm.weight`, "
        "which model.safetensors.index.json does not name",
    ),
    "tensor in another shard": (
        _edit_index(lambda weight_map: weight_map.update({NORM: FIRST})),
        "shard {path}/model-00002-of-00002.safetensors holds `model.norm.weight`, "
        "which model.safetensors.index.json places in `model-00001-of-00002.safetensors`",
    ),
    "data cut short": (
        _cut(1_000_000),
        "shard {path}/model-00002-of-00002.safetensors, 1,000,000 bytes, is cut or no safetensors file: "
        "incomplete metadata, file not fully covered",
    ),
    "header cut short": (
        _cut(1_000),
        "shard {path}/model-00002-of-00002.safetensors, 1,000 bytes, is cut or no safetensors file: "
        "invalid header length",
    ),
    "five bytes": (
        _cut(5),
        "shard {path}/model-00002-of-00002.safetensors, 5 bytes, is cut or no safetensors file: header too small",
    ),
    "empty file": (
        lambda path: (path / SECOND).write_bytes(b""),
        "shard {path}/model-00002-of-00002.safetensors, 0 bytes, is cut or no safetensors file: header too small",
    ),
    "trailing bytes": (
        _cut(-3),
        "shard {path}/model-00002-of-00002.safetensors, {size} bytes, is cut or no safetensors file: "
        "incomplete metadata, file not fully covered",
    ),
    "header is no JSON": (
        lambda path: (path / SECOND).write_bytes((4).to_bytes(8, "little") + b"oops"),
        "shard {path}/model-00002-of-00002.safetensors, 12 bytes, is cut or no safetensors file: "
        "invalid JSON in header: expected value at line 1 column 1",
    ),
    "unknown dtype": (
        _edit_header(lambda header: header[NORM].update(dtype="F8_E8M0", shape=[384])),
        "shard {path}/model-00002-of-00002.safetensors holds `model.norm.weight` in dtype F8_E8M0, "
        "which is not supported",
    ),
    "shape that does not fit its bytes": (
        _edit_header(lambda header: header[NORM].update(shape=[97])),
        "shard {path}/model-00002-of-00002.safetensors, {size} bytes, is cut or no safetensors file: "
        "invalid shape, data type, or offset for tensor",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_in_one_sentence(name: str, path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(path)
    size = (path / SECOND).stat().st_size if (path / SECOND).exists() else 0
    assert str(caught.value) == message.format(path=path, size=f"{size:,}")
    assert caught.value.exit_code == 4


def test_opening_needs_no_torch(path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from verifier.model.checkpoint import open_checkpoint; "
        f"print(len(open_checkpoint({str(path)!r}).names()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["47", "False"]


def test_a_shard_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"absent/a.safetensors` cannot be written: .*No such file or directory"):
        write_shard(tmp_path / "absent" / "a.safetensors", {"w": torch.zeros(2)})


def test_a_shard_reads_back_by_the_formats_own_library(tmp_path):
    tensors = {
        "scalar": torch.tensor(3, dtype=torch.bfloat16), "turned": torch.randn(3, 5).t(), "\u00fc": torch.arange(7),
        "empty": torch.zeros(0, 4), "flag": torch.tensor([True]),
    }  # fmt: skip
    write_shard(tmp_path / "a.safetensors", tensors)
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], own) and read[name].dtype == own.dtype for name, own in tensors.items())


def test_files_that_are_written_at_once_hold_every_tensor_once(tmp_path, monkeypatch):
    monkeypatch.setattr("verifier.model.checkpoint._SHARD_BYTES", 100)
    tensors = {f"w{at}": torch.full((at,), float(at)) for at in range(60)}
    write_shards(tmp_path / "part", iter(tensors.items()))
    files = sorted(tmp_path.iterdir())
    assert len(files) > 30
    read = [pair for file in files for pair in load_file(file).items()]
    assert sorted(name for name, _ in read) == sorted(tensors)
    assert all(torch.equal(own, tensors[name]) for name, own in read)


def test_one_of_several_files_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"absent/part-00000.safetensors` cannot be written"):
        write_shards(tmp_path / "absent" / "part", [("w", torch.zeros(2))])


@pytest.mark.parametrize("kind", ["bailing_moe_v2", "step3p5"])
def test_a_model_type_that_the_bridge_alone_knows_has_its_weights_judged_and_nothing_computed(kind: str) -> None:
    """Ling 2.0 and Step 3.5: the bridge registers classes of their configs with transformers."""
    config = {"architectures": ["OddForCausalLM"], "model_type": kind}
    require_config(Path("folder"), config)
    with pytest.raises(
        UsageError, match=rf"'{kind}', which transformers \S+ has no class for: `verifier golden` judges"
    ):
        require_computed(config)
