"""Texts of rollouts for the trace: what their tokens say, and what an example's should be, by a second reader too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from verifier.core.record import Probe
from verifier.data.chat_template import AS_SHIPPED, ChatTemplate
from verifier.data.examples import Example
from verifier.data.rollout import Rollout
from verifier.data.second_tokenizer import ReadRow, SecondTokenizer, why_unread
from verifier.data.tokenizer import Tokenizer
from verifier.stages.data.records import RolloutTexts, TokensRead

_second = lru_cache(maxsize=1)(SecondTokenizer)


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


def record_tokens(
    probe: Probe, step: int, tokenizer: Tokenizer, files: Path, rollouts: Sequence[Rollout],
    example_of: Callable[[int], Example], *, whole: bool, chat: ChatTemplate = AS_SHIPPED,
) -> None:  # fmt: skip
    """Record the tokens of a step's rollouts beside a second reading of their examples, if the tokenizer has one.

    Args:
        probe: of the step.
        step: from 1.
        tokenizer: that made and ended the rollouts.
        files: folder of the checkpoint, whose tokenizer a second reader reads; not what the tokenizer says of itself.
        rollouts: of the step.
        example_of: example of a rollout, by its place.
        whole: they are examples of fine-tuning, whose tokens are known to the last.
        chat: template that the run asks for.
    """
    if why_unread(files):
        return
    reader = _second(files, chat)
    keys = [item.id if whole else item.group for item in rollouts]
    known: dict[str, ReadRow] = {}
    for place, key in enumerate(keys):
        if key not in known:
            example = example_of(place)
            known[key] = reader.row(example) if whole else ReadRow(reader.prompt(example))
    given = [item.tokens if whole else item.tokens[: item.prompt_length] for item in rollouts]
    read = [known[key] for key in keys]
    texts = () if whole else tuple(reader.decode(_last_turn(item, tokenizer.eos_id)) for item in rollouts)
    arrays = {
        "tokens": np.concatenate([*given]).astype(np.int64),
        "read": np.array([token for row in read for token in (*row.prompt, *row.rest)], np.int64),
    }
    if whole:
        arrays["mask"] = np.concatenate([item.mask for item in rollouts]).astype(bool)
        marks = [mark for row in read for mark in (*(False for _ in row.prompt), *row.trained)]
        arrays["read_mask"] = np.array(marks, bool)
    probe.emit(
        TokensRead(
            name="tokens", version=step, ids=tuple(item.id for item in rollouts), whole=whole,
            prompt_lengths=tuple(item.prompt_length for item in rollouts), lengths=tuple(map(len, given)),
            read_prompt_lengths=tuple(len(row.prompt) for row in read),
            read_lengths=tuple(len(row.prompt) + len(row.rest) for row in read), texts=texts,
            end=tokenizer.eos_id, read_end=reader.end,
        ),
        arrays,
    )  # fmt: skip


def _last_turn(rollout: Rollout, end: int) -> list[int]:
    """Tokens from the last that was not sampled to the end of the rollout, without an end token."""
    others = np.flatnonzero(~rollout.sampled)
    tokens: list[int] = rollout.tokens[others[-1] + 1 if len(others) else 0 :].tolist()
    return tokens[:-1] if tokens and tokens[-1] == end else tokens
