"""Tokenizer of a checkpoint folder: text to token ids and back, and where an assistant's turn ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any
from unicodedata import normalize

import yaml

from verifier.data.examples import Message, short
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


_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""Files of which a folder with a tokenizer has at least one."""
_MAX_UNUSED = 1024
"""Rows of an embedding that no token uses, at the most: vocabularies are padded to multiples of up to 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer that fits its model; make it with `open_tokenizer`."""

    folder: Path
    vocab_size: int
    """Number of rows of the model's embedding; every id is below it."""
    eos_id: int
    special_ids: frozenset[int]
    """Ids that stand for no text of a user, such as ends of turns."""
    chat: ChatTemplate
    _library: Any = field(repr=False)

    def encode(self, text: str, *, begin: bool = False) -> tuple[int, ...]:
        """Token ids of a text.

        Args:
            text: any text that the vocabulary can write.
            begin: put the tokens before it that the tokenizer puts before a whole text, such as `<bos>`.

        Raises:
            UsageError: the tokens do not decode to the text, so a part of it would be lost. Some tokenizers compose
                accents (Unicode's NFC), which is allowed.
        """
        ids = tuple(self._library.encode(text, add_special_tokens=False))
        kept, given = (normalize("NFC", side) for side in (self.decode(ids), text))
        if kept != given:
            at = next((at for at, (old, new) in enumerate(zip(given, kept, strict=False)) if old != new), len(kept))
            raise UsageError(
                f"the tokenizer of {self.folder} does not keep the text {short(text)}: "
                f"character {min(at, len(given))} is lost or changed"
            )
        if not begin:
            return ids
        whole = tuple(self._library.encode(text, add_special_tokens=True))
        ends = range(len(ids), len(whole) + 1)
        return next(whole[:end] for end in ends if whole[end - len(ids) : end] == ids)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Special tokens that it puts before a whole text, by the text "0"."""
        text, whole = (self._library.encode("0", add_special_tokens=added) for added in (False, True))
        return tuple(takewhile(lambda token: token in self.special_ids and token not in text[:1], whole))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones included."""
        return str(self._library.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def chat_text(self, messages: Sequence[Message], *, to_answer: bool = False) -> str:
        """Text of a conversation in the chat template; `to_answer` adds the beginning of an assistant's turn.

        Raises:
            UsageError: the tokenizer has no chat template, or the template refuses the conversation.
        """
        if not (self.chat.text or self._library.chat_template):
            raise UsageError(
                f"the tokenizer of {self.folder} has no chat template: give data.chat_template, or `prompt` and not "
                "`messages`"
            )
        from jinja2.exceptions import TemplateError

        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(
                self._library.apply_chat_template(
                    rows, tokenize=False, add_generation_prompt=to_answer, chat_template=self.chat.text or None,
                    **self.chat.arguments,
                )
            )  # fmt: skip
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{self.template_name} refuses a conversation: {problem}") from error

    @property
    def template_name(self) -> str:
        """The chat template as errors name it."""
        return f"the chat template {self.chat.file or f'of {self.folder}'}"

    def reply(self, said: Sequence[Message]) -> tuple[int, ...]:
        """Token ids between the end token of a sampled turn and the next turn, for what an environment says.

        The turn is a placeholder as the template renders it, so it does not matter whether the template would write an
        earlier turn otherwise: the tokens that were sampled stay, and these are appended. What ends the turn and what
        begins the next message are encoded apart, as a template writes them one by one.

        Raises:
            UsageError: the template refuses such messages, or does not end an assistant's turn with the end token.
        """
        mark = "turn"
        while any(mark in item.content for item in said):
            mark += "."
        talk = (Message(role="user", content="0"), Message(role="assistant", content=mark))
        end = self.decode((self.eos_id,))
        _, _, rest = self.chat_text(talk).rpartition(mark)
        _, _, whole = self.chat_text((*talk, *said), to_answer=True).partition(mark)
        if not rest.startswith(end) or not whole.startswith(rest):
            raise UsageError(
                f"{self.template_name} does not end an assistant's turn with the end token before another message: "
                "use another template, or grpo.environment=single"
            )
        return (*self.encode(rest.removeprefix(end)), *self.encode(whole.removeprefix(rest)))


def open_tokenizer(folder: Path | str, chat: ChatTemplate = AS_SHIPPED) -> Tokenizer:
    """Open the tokenizer of a checkpoint folder and compare its size with the model's vocabulary.

    A model may have more rows than the tokenizer has tokens, as published ones do to divide evenly, up to 1,024 more.

    Raises:
        UsageError: the folder has no config.json or no tokenizer, its files are broken, it has no end token, or
            tokenizer and vocabulary are of different size.
    """
    folder = Path(folder)
    vocab_size = _vocab_size(folder)
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"{folder} has no tokenizer: put tokenizer.json and tokenizer_config.json beside config.json")
    from verifier.data.tokenizer_hf import load_tokenizer

    try:
        library = load_tokenizer(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(f"the tokenizer of {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    size = max(library.get_vocab().values(), default=-1) + 1
    if not size <= vocab_size <= size + _MAX_UNUSED:
        raise UsageError(
            f"tokenizer and vocabulary of different size: the tokenizer of {folder} has {size:,} tokens, "
            f"config.json says `vocab_size` = {vocab_size:,}"
        )
    if library.eos_token_id is None:
        raise UsageError(f"the tokenizer of {folder} has no end token: set `eos_token` in tokenizer_config.json")
    special = {number for number, token in library.added_tokens_decoder.items() if token.special}
    return Tokenizer(
        folder=folder,
        vocab_size=vocab_size,
        eos_id=library.eos_token_id,
        special_ids=frozenset(special | set(library.all_special_ids)),
        chat=chat,
        _library=library,
    )


def _vocab_size(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size", config.get("text_config", {}).get("vocab_size")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} has no config.json that says `vocab_size`: it is no checkpoint folder") from error
