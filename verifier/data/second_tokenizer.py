"""A second reading of a checkpoint's tokenizer: its files, by `tokenizers` and jinja2.

Some classes of transformers, such as LlamaTokenizer, split text otherwise than tokenizer.json says. Checkpoints are
trained with them, so how text is normalized, split and decoded is taken from the class. A tokenizer of bytes is the
exception: its rules stand in tokenizer.json alone, and a class that has others makes tokens that no training saw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from verifier.data.examples import Example, Message
from verifier.data.tokenizer import AS_SHIPPED, ChatTemplate
from verifier.errors import UsageError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a chat template may name."""
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
"""Lists of special tokens without a name."""


class ReadRow(NamedTuple):
    """An example as token ids."""

    prompt: tuple[int, ...]
    rest: tuple[int, ...] = ()
    """Tokens after the prompt; empty where they are sampled."""
    trained: tuple[bool, ...] = ()
    """Tokens of the rest that are in the loss: of each answer those up to its last special token."""


def why_unread(folder: Path) -> str:
    """Reason why no second reader knows the tokenizer of a folder; empty where one does."""
    return "" if (folder / "tokenizer.json").is_file() else "the checkpoint has no tokenizer.json"


class SecondTokenizer:
    """Tokens of examples, and texts of tokens, by tokenizer.json, tokenizer_config.json and the chat template.

    Raises:
        UsageError: its files cannot be read.
    """

    def __init__(self, folder: Path, chat: ChatTemplate = AS_SHIPPED) -> None:
        from tokenizers import AddedToken, Tokenizer

        from verifier.data.tokenizer_hf import load_tokenizer

        self._folder, self._chat = folder, chat
        try:
            self._settings = self._json("special_tokens_map.json") | self._json("tokenizer_config.json")
            known = load_tokenizer(folder)
            self._library = Tokenizer.from_file(str(folder / "tokenizer.json"))
            own = self._splits_bytes(self._json("tokenizer.json").get("pre_tokenizer") or {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as problem:
            raise self._refusal(problem) from problem
        self._defaults: dict[str, Any] = dict(known.special_tokens_map)
        for part in () if own else ("normalizer", "pre_tokenizer", "decoder"):
            setattr(self._library, part, getattr(known.backend_tokenizer, part))
        self._library.no_truncation()
        self._library.no_padding()
        added = self._settings.get("added_tokens_decoder") or {}
        for _, token in sorted(added.items(), key=lambda item: int(item[0])):
            if self._library.token_to_id(token["content"]) is None:
                flags = {name: value for name, value in token.items() if name not in ("content", "special")}
                new = AddedToken(token["content"], special=bool(token.get("special")), **flags)
                (self._library.add_special_tokens if token.get("special") else self._library.add_tokens)([new])

    def _splits_bytes(self, rules: dict[str, Any]) -> bool:
        """Test for rules by which text is split as bytes, with no other say in tokenizer_config.json."""
        parts = [rules, *rules.get("pretokenizers", ())]
        found = [bool(part.get("add_prefix_space")) for part in parts if part.get("type") == "ByteLevel"]
        return found == [bool(self._settings.get("add_prefix_space", *found[:1]))]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones included."""
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    @property
    def end(self) -> int | None:
        """Id of the end token; None where the files name none."""
        found: int | None = self._library.token_to_id(self._special.get("eos_token", ""))
        return found

    def prompt(self, example: Example) -> tuple[int, ...]:
        """Token ids that an engine is given for an example."""
        if example.messages:
            return self._encode(self._render(example.messages, to_answer=True))
        return (*self._begin(example.prompt), *self._encode(example.prompt))

    def row(self, example: Example) -> ReadRow:
        """Token ids of an example of fine-tuning: up to its first answer, and from there on."""
        if not example.messages:
            end = self.end
            rest = (*self._encode(example.response), *(() if end is None else (end,))) if example.response else ()
            return ReadRow(self.prompt(example), rest, (True,) * len(rest))
        done, parts = "", list[tuple[int, ...]]()
        for at, message in enumerate(example.messages):
            if message.role == "assistant" and message.in_loss:
                before = self._render(example.messages[:at], to_answer=True)
                after = self._render(example.messages[: at + 1], to_answer=False)
                parts += [self._encode(before[len(done) :]), self._encode(after[len(before) :])]
                done = after
        trained = [self._answer(part) if at % 2 else (False,) * len(part) for at, part in enumerate(parts)]
        rest = tuple(token for part in parts[1:] for token in part)
        return ReadRow(parts[0], rest, tuple(mark for part in trained[1:] for mark in part))

    def _answer(self, turn: Sequence[int]) -> tuple[bool, ...]:
        """Tokens of an assistant's turn that it writes itself: those up to the last special one."""
        ends = [at for at, token in enumerate(turn) if token in self._special_ids]
        last = ends[-1] if ends else -1
        return tuple(at <= last for at in range(len(turn)))

    def reply(self, said: Sequence[Message]) -> tuple[int, ...]:
        """Token ids between the end of a turn and the next one, for what an environment says; see `framed`.

        What ends a turn and what begins the next message are encoded apart, as a template writes them one by one.
        """
        rest, message = self._frame(said)
        return (*self._encode(rest), *self._encode(message))

    def framed(self, said: Sequence[Message]) -> str:
        """Text that the template writes between the end of a turn and the next one, for what an environment says.

        Raises:
            UsageError: the template refuses such messages, or does not end a turn with the end token.
        """
        rest, message = self._frame(said)
        return rest + message

    def _frame(self, said: Sequence[Message]) -> tuple[str, str]:
        """Text of the template after the end of a turn, and from there to the next one, for messages between them."""
        content = "0" * (sum(len(item.content) for item in said) + 1)  # longer than any of them, so found in none
        talk = (Message(role="user", content="1"), Message(role="assistant", content=content))
        turn = self._render(talk, to_answer=False)
        whole = self._render((*talk, *said), to_answer=True)
        end = content + self._special.get("eos_token", content)
        if end not in turn or end not in whole:
            raise self._refusal(ValueError("the chat template does not end a turn with the end token"))
        rest, further = (text[text.index(end) + len(end) :] for text in (turn, whole))
        return rest, further[len(rest) :]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._library.encode(text, add_special_tokens=False).ids)

    def _begin(self, text: str) -> tuple[int, ...]:
        whole = self._library.encode(text, add_special_tokens=True)
        return tuple(whole.ids[: whole.special_tokens_mask.index(0)]) if 0 in whole.special_tokens_mask else ()

    def _render(self, messages: Sequence[Message], *, to_answer: bool) -> str:
        from jinja2 import TemplateError

        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(
                self._template.render(
                    messages=rows, tools=None, documents=None, add_generation_prompt=to_answer,
                    **(self._special | dict(self._chat.arguments)),
                )
            )  # fmt: skip
        except (TemplateError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise self._refusal(problem) from problem

    @cached_property
    def _special(self) -> dict[str, str]:
        given = {name: self._settings.get(name, self._defaults.get(name)) for name in _NAMES}
        return {
            name: str(value["content"] if isinstance(value, dict) else value) for name, value in given.items() if value
        }

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of a user."""
        added = self._library.get_added_tokens_decoder()
        more = self._settings.get("added_tokens_decoder") or {}
        lists = [own for name in _FURTHER if isinstance(own := self._settings.get(name), list)]
        texts = {str(item["content"] if isinstance(item, dict) else item) for own in lists for item in own}
        named = (self._library.token_to_id(text) for text in texts | set(self._special.values()))
        return frozenset(
            {number for number, token in added.items() if token.special}
            | {int(number) for number, token in more.items() if token.get("special")}
            | {number for number in named if number is not None}
        )

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Blocks that mark what an assistant says, which change no text."""

            tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

            def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
                next(parser.stream)
                body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        room = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )  # fmt: skip
        room.filters["tojson"] = as_json
        room.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        return room.from_string(self._source())

    def _source(self) -> str:
        """The chat template: of a file, or of tokenizer_config.json, by the name "default" among several."""
        file = self._chat.file or self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        given = self._settings.get("chat_template")
        if isinstance(given, list):
            given = {item["name"]: item["template"] for item in given}.get("default")
        return str(given or "")

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found

    def _refusal(self, problem: Exception) -> UsageError:
        return UsageError(
            f"the tokenizer of {self._folder} cannot be read a second time: {type(problem).__name__}, {problem}"
        )
