"""Text that a step of fine-tuning trains on, for the trace: what its tokens say, and what the data set has."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import normalize

from verifier.data.examples import Example, Message
from verifier.data.rollout import Rollout
from verifier.data.tokenizer import Tokenizer
from verifier.errors import UsageError
from verifier.stages.data.records import TrainedText


def trained_text(
    step: int, examples: Sequence[Example], rollouts: Sequence[Rollout], tokenizer: Tokenizer
) -> TrainedText:
    """Record of what a step's examples train on.

    Conversations whose template writes something else than an assistant says are left out.
    """
    frame = turn_frame(tokenizer) if any(item.messages for item in examples) else None
    kept, conversations = [], {}
    for item, rollout in zip(examples, rollouts, strict=True):
        if item.messages:
            said = tuple(message.content for message in item.messages if message.is_learned)
            if frame is None or not _stands(said, tokenizer.chat_text(item.messages)):
                continue
            conversations[rollout.id] = said
        kept.append((item, rollout))
    opening, closing = frame or ("", "")
    return TrainedText(
        name="examples", version=step, ids=tuple(rollout.id for _, rollout in kept),
        responses=tuple(item.response or "" for item, _ in kept), end=tokenizer.decode((tokenizer.eos_id,)),
        texts=tuple(tokenizer.decode(rollout.tokens[rollout.mask].tolist()) for _, rollout in kept),
        conversations=conversations, opening=opening, closing=closing,
    )  # fmt: skip


def turn_frame(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Text that the template puts around what an assistant says, from its header to the turn's last special token.

    None where the template refuses a question and an answer, or does not write them one after the other.
    """
    question, answer = Message(role="user", content="0"), Message(role="assistant", content="1")
    try:
        before, after = tokenizer.chat_text((question,), to_answer=True), tokenizer.chat_text((question, answer))
        opening, said, rest = after.removeprefix(before).partition("1")
        tokens = tokenizer.encode(rest)
    except UsageError:
        return None
    ends = [place for place, token in enumerate(tokens) if token in tokenizer.special_ids]
    if not after.startswith(before) or not said or "1" in rest or not ends:
        return None
    return opening, tokenizer.decode(tokens[: ends[-1] + 1])


def _stands(said: Sequence[str], text: str) -> bool:
    """True if a template's text has all that an assistant says, in order and but for whitespace."""
    text, at = "".join(normalize("NFC", text).split()), 0
    for part in said:
        own = "".join(normalize("NFC", part).split())
        if (at := text.find(own, at)) < 0:
            return False
        at += len(own)
    return True
