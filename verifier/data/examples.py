"""One example of a data set: a prompt or a conversation, with a response to learn or an answer to be right.

Order: the examples of an epoch are sorted by ``blake2b(f"{seed}/{epoch}/{index}", digest_size=16)``, which no library's
random numbers change. Epochs follow one another without a gap, and each step takes the next `batch_size` of them.
Further rounds of dynamic sampling have streams of their own, in which ``f"{seed}.{round}"`` stands for the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from verifier.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
"""Authors of a message, as chat templates name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    Raises:
        UsageError: a role that is none of `ROLES`.
    """

    role: str
    content: str
    in_loss: bool = True
    """False for an assistant's message that fine-tuning does not learn."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"a message has the role `{self.role}`: it must be one of {', '.join(ROLES)}")

    @property
    def is_learned(self) -> bool:
        """True for what fine-tuning learns."""
        return self.role == "assistant" and self.in_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row: either `prompt`, plain text, or `messages`, for the chat template.

    Raises:
        UsageError: it has both or neither, or a response beside messages.
    """

    id: str
    prompt: str = ""
    """Plain text, in no chat template."""
    messages: tuple[Message, ...] = ()
    """Conversation; its assistant messages are what SFT learns."""
    response: str | None = None
    """Text that follows the prompt, for SFT."""
    answer: str | None = None
    """Gold answer, for a reward."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further columns of the row, as JSON has them."""

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            what = "both `prompt` and `messages`" if self.prompt else "neither `prompt` nor `messages`"
            raise UsageError(f"example `{self.id}` has {what}: give one of them")
        if self.messages and self.response is not None:
            raise UsageError(f"example `{self.id}` has `messages` and `response`: the response is its last message")

    @property
    def question(self) -> str:
        """Text that two examples of one question share: the prompt, or what stands before the first answer.

        A conversation that does not end with an answer, as GRPO takes them, is a question as a whole.
        """
        if self.prompt:
            return self.prompt
        asked = [(message.role, message.content) for message in self.messages]
        if asked[-1][0] == "assistant":
            asked = asked[: [role for role, _ in asked].index("assistant")]
        return json.dumps(asked)


def short(text: str) -> str:
    """A text as errors quote it."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


PARTS = ("id", "prompt", "messages", "response", "answer")
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
"""Authors of a message with the keys `from` and `value`, where chat templates have another name."""
_KNOWN = (
    ({"conversations"}, "data.messages_key=conversations"),
    ({"instruction", "input", "output"}, "data.prompt_key=instruction+input data.response_key=output"),
    ({"question", "answer"}, "data.prompt_key=question, and data.response_key=answer for sft"),
)  # fmt: skip
"""Columns of widespread data sets (ShareGPT, Alpaca, GSM8K), and the knobs that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Column of each part of a row; None for a part that is not read.

    A name is a column's, or a path of names with dots between them into a column of mappings. Names with `+` between
    them are joined by a newline, empty texts left out.
    """

    id: str | None = "id"
    prompt: str | None = "prompt"
    messages: str | None = "messages"
    response: str | None = "response"
    answer: str | None = "answer"
    apply_chat_template: bool = False
    """A prompt is a user's message, and its response in fine-tuning the assistant's."""

    def parts(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parts of a row, and its further columns; a column that a given name has read is read by no default.

        Raises:
            UsageError: a name that is no column's; names the columns there are.
        """
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name in PARTS}
        own = {part: name for part, name in given.items() if name not in (part, None)}
        found = {part: _value(row, f"data.{part}_key", name) for part, name in own.items()}
        read = {column for name in own.values() for column in (name, *name.split("+"))}
        for part, name in given.items():
            if name == part and part not in read:
                found[part] = row.get(part)
        read |= {part for part in found if part not in own}
        return found, {name: as_json(value) for name, value in row.items() if name not in read}


def as_json(value: Any) -> Any:
    """A value as JSON has it: what it has no form for, such as a date, is its text."""
    return json.loads(json.dumps(value, default=str))


def messages_of(value: Any) -> Any:
    """Messages with `role` and `content`; those with `from` and `value`, as ShareGPT's are, by their roles' names."""
    if not isinstance(value, list):
        return value
    return [_message(item) if isinstance(item, Mapping) else item for item in value]


def unread(row: Mapping[str, Any]) -> str:
    """Refusal of a row that has neither prompt nor messages: its columns, and the knobs that read such a data set."""
    way = next((way for columns, way in _KNOWN if columns <= row.keys()), "data.prompt_key or data.messages_key")
    return f"it has neither `prompt` nor `messages`; its columns are {', '.join(row) or 'none'}: give {way}"


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in item.items() if value is not None}  # columns of Arrow have all keys
    if "from" in own and "value" in own:
        role = own.pop("from")
        own |= {"role": _SHARE_GPT.get(role, role), "content": own.pop("value")}
    return own


def _value(row: Mapping[str, Any], knob: str, name: str) -> Any:
    if name not in row and "+" in name:
        parts = [_value(row, knob, part) for part in name.split("+")]
        if wrong := next((part for part in parts if not isinstance(part, str | None)), None):
            raise UsageError(f"{knob} is `{name}`, which joins texts, and `{wrong}` is none")
        return "\n".join(part for part in parts if part)
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UsageError(f"{knob} is `{name}`, which is no column: there are {', '.join(row)}")
        value = value[part]
    return value


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """All indices below `num_examples`, in the order of an epoch."""
    keys = (
        hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest() for index in range(num_examples)
    )
    return tuple(index for _, index in sorted(zip(keys, range(num_examples), strict=True)))


def seed_of_round(seed: int, sampling_round: int) -> int | str:
    """The seed of the stream from which a round of dynamic sampling takes its prompts, rounds counted from 0."""
    return f"{seed}.{sampling_round}" if sampling_round else seed


def batch_indices(num_examples: int, batch_size: int, seed: int | str, step: int) -> tuple[int, ...]:
    """[batch_size] indices of the examples of a step, steps counted from 0.

    A batch that spans two epochs may hold an example twice.

    Raises:
        UsageError: no examples, a batch of none, or a negative step.
    """
    if num_examples < 1 or batch_size < 1 or step < 0:
        raise UsageError(
            f"no batch of {batch_size} from {num_examples} examples at step {step}: "
            "batch and data set need at least 1, steps count from 0"
        )
    places = range(step * batch_size, (step + 1) * batch_size)
    epochs = {place // num_examples for place in places}
    orders = {epoch: epoch_order(num_examples, seed, epoch) for epoch in sorted(epochs)}
    return tuple(orders[place // num_examples][place % num_examples] for place in places)
