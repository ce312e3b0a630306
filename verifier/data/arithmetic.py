"""Generated arithmetic, and the character tokenizer of the generated model for it.

Sums are of two numbers of two digits, held out by a hash of the prompt, alone or by a tool. The vocabulary has exactly
32 entries: seven specials, 24 characters and `####`, which is one token. The library drops any other character;
`verifier.data.tokenizer` refuses text that does not come back.
"""

from __future__ import annotations

import hashlib
import json
import zlib

from verifier.data.examples import Example, Message
from verifier.errors import UsageError

TRAIN = "train"
HELD_OUT = "held-out"
SPLITS = (TRAIN, HELD_OUT)
_OPERANDS = range(10, 100)
_PARTS = 10
"""One prompt of so many is held out."""
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


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt belongs to the held-out split: crc32 of its text is a multiple of 10.

    A hash, since a split by a linear rule of the operands would hold out a whole kind of sum.
    """
    return zlib.crc32(prompt.encode()) % _PARTS == 0


def arithmetic_examples(split: str, count: int | None = None, seed: int = 1) -> tuple[Example, ...]:
    """Examples such as `37+85=` with the response `####122` and the answer `122`, no two alike.

    The sum has three digits, leading zeros included, so that every example has the same length. Of the 8,100 prompts
    one in ten is held out.

    Args:
        split: "train" or "held-out".
        count: number of examples; all of the split by default.
        seed: seed of the choice and its order, which is by blake2b of seed and prompt.

    Raises:
        UsageError: unknown split, or a count that the split does not have.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split `{split}` of arithmetic: there are {' and '.join(SPLITS)}")
    prompts = {f"{first}+{second}=": first + second for first in _OPERANDS for second in _OPERANDS}
    own = [prompt for prompt in prompts if is_held_out(prompt) == (split == HELD_OUT)]
    count = len(own) if count is None else count
    if not 0 < count <= len(own):
        raise UsageError(f"{count:,} arithmetic examples asked for: split `{split}` has 1 to {len(own):,}")
    own.sort(key=lambda prompt: hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=16).digest())
    return tuple(
        Example(
            id=f"arithmetic/{prompt}",
            prompt=prompt,
            response=f"####{prompts[prompt]:03d}",
            answer=str(prompts[prompt]),
        )
        for prompt in own[:count]
    )


def calculator_examples(split: str, count: int | None = None, seed: int = 1, *, solved: bool) -> tuple[Example, ...]:
    """Conversations in which a calculator is asked for the sum: see `arithmetic_examples`, also for the order.

    If `solved`, with the call `37+85=`, the tool's `122` and the answer `####122`; else the question alone.
    """

    def messages(prompt: str, answer: str) -> tuple[Message, ...]:
        said = (("user", prompt), ("assistant", prompt), ("tool", answer), ("assistant", f"####{answer}"))
        return tuple(Message(role=role, content=content) for role, content in said[: 4 if solved else 1])

    return tuple(
        Example(id=f"calculator/{item.prompt}", messages=messages(item.prompt, item.answer or ""), answer=item.answer)
        for item in arithmetic_examples(split, count, seed)
    )


def tokenizer_files() -> dict[str, str]:
    """File name -> content of tokenizer.json and tokenizer_config.json, as transformers and vLLM load them.

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
