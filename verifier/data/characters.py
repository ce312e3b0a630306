"""Character tokenizer of the generated model for arithmetic, as the files that transformers and vLLM load.

The vocabulary has exactly 32 entries: seven specials, 24 characters and `####`, which is one token. The library drops
any other character; `verifier.data.tokenizer` refuses text that does not come back.
"""

from __future__ import annotations

import json

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
_SPECIALS = (PAD, EOS, BOS, "<system>", "<user>", "<assistant>", "<tool>")
VOCABULARY = (*_SPECIALS, "####", *"0123456789+=#,:-*./$()", " ", "\n")
"""Tokens by id."""
PAD_ID, EOS_ID, BOS_ID = (VOCABULARY.index(token) for token in (PAD, EOS, BOS))
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Each message after the marker of its role; an assistant's ends with `<eos>`."""


def tokenizer_files() -> dict[str, str]:
    """File name -> content of tokenizer.json and tokenizer_config.json.

    Encoding with special tokens puts `<bos>` first, and nothing last.
    """
    specials = [
        {
            "id": VOCABULARY.index(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for token in _SPECIALS
    ]  # fmt: skip
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": r"####|[\s\S]"}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, second],
            "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "vocab": {token: number for number, token in enumerate(VOCABULARY)}, "merges": [],
            "ignore_merges": True,
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": 1024, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    return {
        name: json.dumps(content, indent=1) + "\n"
        for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings))
    }
