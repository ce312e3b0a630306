"""Conversion of a GGUF file into a checkpoint directory: weights by transformers, the tokenizer from the metadata."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verifier.errors import ContractError
from verifier.model.checkpoint import write_shard

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SPLITS = {"smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES])}
"""Value of `tokenizer.ggml.pre` -> split of text into words; transformers 5.12.1 reads each as GPT-2's.

Source:
    llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
"""


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write model.safetensors and the tokenizer's files beside the config.json that is in `folder`.

    Args:
        source: GGUF file.
        folder: gets the files.
        dtype: "float32", or "bfloat16" for one rounding of each weight.

    Raises:
        ContractError: the file's metadata say otherwise than config.json.
    """
    metadata = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    tokenizer_of(source, metadata).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    read, rope = model.config.to_dict(), model.config.rope_parameters
    whole, local = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
    read |= {"rope_theta": whole["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    read["rms_norm_eps"] = round(read["rms_norm_eps"], 12)  # GGUF keeps it in float32
    given = ("architectures", "dtype", "rope_scaling", "initializer_range")  # not in the metadata
    if odd := [name for name, value in config.items() if name not in given and read.get(name) != value]:
        raise ContractError(f"the file's `{odd[0]}` is {read.get(odd[0])}, and config.json says {config[odd[0]]}")
    weights = model.state_dict()
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    rounded = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
    write_shard(folder / "model.safetensors", rounded)
    for file in folder.iterdir():
        file.chmod(0o644)


def tokenizer_of(source: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file's metadata, with its special tokens and chat template.

    One of bytes is made here; one of pieces of text, as Gemma's, transformers makes.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    if ggml["model"] == "llama":
        return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if ggml["model"] != "gpt2" or ggml["pre"] not in _SPLITS:
        raise ContractError(f"no tokenizer of kind {ggml['model']}, {ggml['pre']} is known")
    tokens = ggml["tokens"]
    merges = [tuple(merge.split(" ")) for merge in ggml["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _SPLITS[ggml["pre"]]
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, ggml["token_type"], strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[ggml[f"{key}_token_id"]] for name, key in names.items()}
    length = metadata[f"{metadata['general.architecture']}.context_length"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=metadata["tokenizer.chat_template"], model_max_length=length,
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
