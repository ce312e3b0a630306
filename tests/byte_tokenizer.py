"""A small tokenizer of bytes with the marks of Qwen3's turns and, if asked for, its chat template, in a folder."""

from __future__ import annotations

import json
from pathlib import Path

QWEN3_TEMPLATE = Path(__file__).parent / "qwen3_chat_template.jinja"


def write_byte_tokenizer(folder: Path, template: str | None = None) -> Path:
    """Write a tokenizer of 260 tokens into a checkpoint's folder; by default with Qwen3's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={item: at for at, item in enumerate([*marks, *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": QWEN3_TEMPLATE.read_text(encoding="utf-8") if template is None else template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
