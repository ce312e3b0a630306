"""The chat template that a run asks for in the place of the checkpoint's, and the arguments that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verifier.errors import UsageError

_TAKEN = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments that a rendering has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A file, and arguments by name."""

    file: Path | None = None
    """Jinja template; None for the checkpoint's own."""
    text: str = ""
    """Content of the file."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


AS_SHIPPED = ChatTemplate()
"""The checkpoint's own template, with no arguments."""


def chat_template_of(file: Path | None, given: Sequence[str]) -> ChatTemplate:
    """Read a template's file and its arguments, each written `name=value`, the value as in YAML.

    Raises:
        UsageError: the file cannot be read or is empty; an argument without a name or a value, or with a taken name.
    """
    arguments = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier() or name in _TAKEN:
            raise UsageError(
                f"data.chat_template_kwargs has `{item}`: write name=value, such as enable_thinking=false, with a name "
                f"other than {', '.join(_TAKEN)}"
            )
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"data.chat_template_kwargs has `{item}`, whose value is no YAML") from error
    if file is None:
        return ChatTemplate(arguments=arguments)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.chat_template, `{file}`, cannot be read: {error}") from error
    if not text.strip():
        raise UsageError(f"data.chat_template, `{file}`, is empty")
    return ChatTemplate(file=file, text=text, arguments=arguments)
