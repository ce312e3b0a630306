"""Conversion of a GGUF file into a checkpoint directory: weights by transformers, the tokenizer from the metadata."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from verifier.errors import ContractError
from verifier.model.checkpoint import write_shard

_SPACE = "\u2581"
"""Character for a space in the pieces of a vocabulary."""
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SPLITS = {"smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES])}
"""Value of `tokenizer.ggml.pre` -> split of text into words; transformers 5.12.1 reads each as GPT-2's.

Source:
    llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
"""


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write model.safetensors and the tokenizer's files beside the config.json that is in `folder`.

    Raises:
        ContractError: the file's metadata say otherwise than config.json.
    """
    metadata = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    tokenizer_of(metadata).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    read, rope = model.config.to_dict(), model.config.rope_parameters
    whole, local = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
    read |= {"rope_theta": whole["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    read["rms_norm_eps"] = round(read["rms_norm_eps"], 12)  # GGUF keeps it in float32
    given = (
        "architectures",
        "dtype",
        "rope_scaling",
        "initializer_range",
        "transformers_version",
    )  # not in the metadata
    if odd := [name for name, value in config.items() if name not in given and read.get(name) != value]:
        raise ContractError(f"the file's `{odd[0]}` is {read.get(odd[0])}, and config.json says {config[odd[0]]}")
    weights = model.state_dict()
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    rounded = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
    write_shard(folder / "model.safetensors", rounded)
    for file in folder.iterdir():
        file.chmod(0o644)


def tokenizer_of(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file's metadata, with its special tokens, and its chat template if it has one.

    Raises:
        ContractError: a kind of tokenizer that is not known here.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    tokens = ggml["tokens"]
    if ggml["model"] == "llama":
        tokenizer = _of_pieces(tokens, ggml["scores"], ggml["token_type"])
    elif ggml["model"] == "gpt2" and ggml["pre"] in _SPLITS:
        merges = [tuple(merge.split(" ")) for merge in ggml["merges"]]
        tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = _SPLITS[ggml["pre"]]
        tokenizer.decoder = decoders.ByteLevel()
    else:
        raise ContractError(f"no tokenizer of kind {ggml['model']}, {ggml['pre']} is known")
    added = {TokenType.CONTROL: tokenizer.add_special_tokens, TokenType.USER_DEFINED: tokenizer.add_tokens}
    for kind, add in added.items():
        own = [token for token, each in zip(tokens, ggml["token_type"], strict=True) if each == kind]
        add([AddedToken(token, normalized=False, special=kind == TokenType.CONTROL) for token in own])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[ggml[f"{key}_token_id"]] for name, key in names.items()}
    length = metadata[f"{metadata['general.architecture']}.context_length"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=metadata.get("tokenizer.chat_template"), model_max_length=length,
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip


def _of_pieces(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> Tokenizer:
    """Tokenizer of pieces of text with scores, as SentencePiece's BPE: of two pieces the best scored is made first.

    transformers 5.12.1 orders pieces otherwise: "Hello world" of Gemma 3 is four tokens there in the place of two.
    """
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = []
    for at, (piece, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        for cut in range(1, len(piece) if kind == TokenType.NORMAL else 0):
            parts = piece[:cut], piece[cut:]
            if parts[0] in vocabulary and parts[1] in vocabulary:
                merges.append((-score, at, *map(vocabulary.__getitem__, parts)))
    pairs = [(tokens[first], tokens[second]) for *_, first, second in sorted(merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
