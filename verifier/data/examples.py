"""One example of a data set: a prompt or a conversation, with a response to learn or an answer to be right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
