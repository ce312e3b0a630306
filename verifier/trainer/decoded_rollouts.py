"""Texts of rollouts for the trace: what their tokens say, and what the prompt of an example should say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifier.core.records_trainer import RolloutTexts
from verifier.data.examples import Example
from verifier.data.rollout import Rollout
from verifier.data.tokenizer import Tokenizer


def rendered(example: Example, tokenizer: Tokenizer) -> str:
    """Text of all that an engine is given for an example, made apart from its tokens."""
    if example.messages:
        return tokenizer.chat_text(example.messages, to_answer=True)
    return tokenizer.decode(tokenizer.begin_ids) + example.prompt


def texts_of(step: int, tokenizer: Tokenizer, rollouts: Sequence[Rollout]) -> RolloutTexts:
    """Record of what the tokens of a step's rollouts say."""
    return RolloutTexts(
        name="texts", version=step, begin=tokenizer.decode(tokenizer.begin_ids),
        ids=tuple(item.id for item in rollouts), groups=tuple(item.group for item in rollouts),
        prompts=tuple(tokenizer.decode(item.tokens[: item.prompt_length].tolist()) for item in rollouts),
        answers=tuple(tokenizer.decode(_last_turn(item, tokenizer.eos_id)) for item in rollouts),
    )  # fmt: skip


def _last_turn(rollout: Rollout, end: int) -> list[int]:
    """Tokens from the last that was not sampled to the end of the rollout, without an end token."""
    others = np.flatnonzero(~rollout.sampled)
    tokens: list[int] = rollout.tokens[others[-1] + 1 if len(others) else 0 :].tolist()
    return tokens[:-1] if tokens and tokens[-1] == end else tokens
