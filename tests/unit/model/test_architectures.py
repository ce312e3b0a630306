"""Tiny checkpoints of any architecture: transformers loads what was written, nothing is trivial, refusals say why."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verifier.errors import UsageError
from verifier.model.architectures_hf import architectures, content_of, scaled_config
from verifier.model.checkpoint import open_checkpoint, require_described
from verifier.model.families import Content, copies_of, predicts_further
from verifier.model.named import config_of, resolve_model
from verifier.model.tiny import KNOWN, write_tiny

QUICK = ("mistral", "gemma2", "gpt_oss", "nemotron_h")
UNMADE = ("deepseek_v4",)
"""Refused by `test_refusals_are_one_sentence`."""
ALL = sorted({architecture: name for name, architecture in architectures().items() if name not in UNMADE}.values())
SAID_BY_ALL = {"vocab_size": 512, "dtype": "float32"}


@pytest.mark.parametrize("name", QUICK)
def test_transformers_loads_what_was_written(name: str, tmp_path: Path) -> None:
    _loads_and_writes_back(name, tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_layer_that_predicts_a_further_token_is_added_behind_the_last(name: str, tmp_path: Path) -> None:
    plain, more = (open_checkpoint(write_tiny(each, tmp_path)) for each in (name, f"{name}-mtp"))
    require_described(more, "float32")
    further = {each for each in more.names() if predicts_further(each, more.config)}
    assert set(more.names()) - further == set(plain.names())
    own = {each.removeprefix("model.layers.4.") for each in further}
    last = {each.removeprefix("model.layers.3.") for each in plain.names() if ".layers.3." in each}
    added = {"eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert own - last == {f"{each}.weight" for each in added}
    copies = copies_of(more.config)
    assert all(more.read(copy).equal(more.read(whole)) for copy, whole in copies.items())
    assert len(copies) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_transformers_loads_what_was_written_of_every_architecture(name: str, tmp_path: Path) -> None:
    _loads_and_writes_back(name, tmp_path)


def _loads_and_writes_back(name: str, folder: Path) -> None:
    """transformers finds each key at its place, and saves the same tensors again; logits are finite and not flat."""
    architecture = architectures().get(name, name)
    written = open_checkpoint(write_tiny(architecture, folder / "tiny"))
    require_described(written, "float32")
    assert written.config == scaled_config(architecture, "float32")
    assert SAID_BY_ALL.items() <= written.config.items()
    model, info = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    model.save_pretrained(folder / "back")
    back = open_checkpoint(folder / "back")
    assert back.names() == written.names()
    seen: set[str] = set()
    for tensor_name in written.names():
        tensor = written.read(tensor_name)
        assert torch.equal(tensor, back.read(tensor_name)), tensor_name
        assert tensor.unique().numel() > min(tensor.numel() // 2, 100), tensor_name
        assert tensor.all(), f"{tensor_name} has a 0, which nobody would miss"
        assert not (tensor == 1).all(), f"{tensor_name} is 1, which nobody would miss"
        key = hashlib.blake2b(tensor.numpy().tobytes()).hexdigest()
        assert key not in seen, tensor_name
        seen.add(key)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(100)[None]).logits
    assert torch.isfinite(logits).all()
    assert 0.3 < torch.log_softmax(logits, dim=-1).std() < 3.0


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        open_checkpoint(write_tiny("mistral", tmp_path / place, seed=seed))
        for place, seed in (("one", 1), ("two", 1), ("one", 2))
    )
    assert [torch.equal(first.read(name), again.read(name)) for name in first.names()] == [True] * len(first.names())
    assert not any(torch.equal(first.read(name), other.read(name)) for name in first.names())
    assert first.path.name == again.path.name != other.path.name


def test_bfloat16_is_stored_as_such(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(resolve_model("tiny:mistral", tmp_path, "bfloat16"))
    assert {checkpoint.meta(name).dtype for name in checkpoint.names()} == {"bfloat16"}
    assert config_of("tiny:mistral", "bfloat16") == checkpoint.config


def test_the_tokenizer_of_other_tiny_models_comes_with_it(tmp_path: Path) -> None:
    path = write_tiny("mistral", tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} < {file.name for file in path.iterdir()}
    assert {"bos_token_id": 2, "eos_token_id": 1}.items() <= open_checkpoint(path).config.items()


def test_hand_written_names_come_first(tmp_path: Path) -> None:
    assert write_tiny("qwen3", tmp_path).name.startswith("tiny-qwen3-float32-")
    assert write_tiny("Qwen3ForCausalLM", tmp_path).name.startswith("tiny-Qwen3ForCausalLM-float32-")


def test_a_type_of_several_modalities_stands_for_its_text_model() -> None:
    assert architectures()["gemma3"] == architectures()["gemma3_text"] == "Gemma3ForCausalLM"
    assert len(ALL) > 25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("olmo", "no `tiny:olmo`: megatron-bridge .* has no bridge for OlmoForCausalLM, which transformers .* knows"),
        (
            "kimi_k2",
            "no `tiny:kimi_k2`: transformers .* has no causal language model KimiK2ForCausalLM, which megatron-bridge "
            ".* has a bridge for",
        ),
        ("gema2", "unknown model `tiny:gema2`: nearest are `tiny:gemma2`, .*"),
        ("", "`tiny:` lacks a name: known are qwen3, .*, olmoe, .*"),
        ("deepseek_v4", "no tiny DeepseekV4ForCausalLM: `model.layers.0.mlp.gate.tid2eid` is a table of .*"),
    ],
)
def test_refusals_are_one_sentence(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_tiny(name, tmp_path)
    assert re.fullmatch(message, str(caught.value)), caught.value
    assert not list(tmp_path.iterdir())


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="generated checkpoints come in float32 and bfloat16, not float16"):
        write_tiny("mistral", tmp_path, "float16")


def test_the_kind_of_a_tensor_is_told_by_its_first_values() -> None:
    assert content_of("a.norm.weight", torch.ones(4)) is Content.NORM
    assert content_of("a.norm.weight", torch.zeros(4)) is Content.BIAS  # where 1 is added
    assert content_of("a.experts.bias", torch.zeros(4, 4)) is Content.BIAS
    assert content_of("a.weight", torch.randn(4, 4)) is Content.MATRIX
    assert content_of("a.gate.e_score_correction_bias", torch.zeros(1, 4)) is Content.SCORE_BIAS
    assert content_of("a.A_log", torch.ones(4)) is Content.DECAY
    assert content_of("a.dt_bias", torch.ones(4)) is Content.TIME_STEP
    assert content_of("a.experts.gate_up_proj_bias", torch.zeros(4, 4)) is Content.GATED_BIAS


def test_soft_caps_are_lowered_to_where_logits_of_a_tiny_model_reach() -> None:
    config = scaled_config("gemma2", "float32")
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (2.0, 2.0)


def test_no_name_is_taken_twice() -> None:
    """A hand-written name that is also a model type keeps its bytes; the rules' are under the architecture's name."""
    assert KNOWN.keys() & architectures().keys() == {"llama", "qwen2", "qwen3"}
