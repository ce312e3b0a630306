"""Episodes of a policy and an environment, tokens in and tokens out: what was sampled is never encoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, structs

from verifier.config.grpo import GrpoOptions
from verifier.core.seal import seal_of_reply
from verifier.data.examples import Example, Message
from verifier.data.recorded import RolloutRow
from verifier.data.rollout import NO_VERSION
from verifier.data.second_tokenizer import SecondTokenizer, why_unread
from verifier.data.tokenizer import AS_SHIPPED, ChatTemplate, Tokenizer
from verifier.engine.api import Sample, Sampling
from verifier.errors import UsageError
from verifier.rewards.scorer import EpisodeHandle, RewardPool, ScoredEpisode


class Sampler(Protocol):
    """An engine, as far as it samples."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of an episode, as the engine sampled it."""

    prompt: tuple[int, ...]
    """Token ids that the engine was given."""
    sample: Sample
    text: str
    """Text of the turn, without its end token."""
    reply: tuple[int, ...] = ()
    """Token ids from the end of the turn to the beginning of the next; empty where the episode ends."""
    session: EpisodeHandle | None = None
    """Episode of the environment; None where there is none."""


class PlayedTurns(Struct, frozen=True, kw_only=True):
    """Turns of episodes with an environment; lists have an entry a turn."""

    before: str
    """Text that the chat template puts before a tool's message, from the end token of the turn on."""
    after: str
    """Text that it puts between a tool's message and the next turn."""
    end: int
    episodes: tuple[str, ...]
    indices: tuple[int, ...]
    """Number of the turn in its episode, from 0."""
    prompts: tuple[tuple[int, ...], ...]
    sampled: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    """Text of the sampled tokens, without their end token."""
    replies: tuple[tuple[int, ...], ...]
    """Token ids that the environment added; empty where the episode ends."""
    said: tuple[str, ...]
    """Text of the added tokens."""
    seals: tuple[int, ...]
    """Seals of what the environment said, in any order, with the turns that it read."""
    read_replies: tuple[tuple[int, ...], ...]
    """Token ids of each reply by a second reader of the tokenizer's files; none without one."""
    read_texts: tuple[str, ...]
    """Text of each turn by the same reader."""


class Episodes:
    """Turns by an engine and an environment, up to the greatest number of turns.

    `files` is the folder of the checkpoint, whose tokenizer a second reader reads; not what the tokenizer says of
    itself.
    """

    def __init__(
        self, options: GrpoOptions, tokenizer: Tokenizer, files: Path, chat: ChatTemplate = AS_SHIPPED
    ) -> None:
        self._options, self._tokenizer, self._files, self._chat = options, tokenizer, files, chat
        self._environment: SealedEnvironment | None = None
        self.longest_reply = 0
        """Tokens that an environment adds to an episode, at most."""
        if options.has_turns:
            tokenizer.reply([Message(role="tool", content="0")])
            self.longest_reply = options.max_reply_tokens * (options.max_turns - 1)

    def start(self, pool: RewardPool) -> None:
        """Take the processes in which the environment runs, if there is one."""
        if self._options.has_turns:
            encoded = None if self._second is None else self._second.reply
            self._environment = SealedEnvironment(pool, self._framed, encoded)

    def play(
        self, sampler: Sampler, prompts: Sequence[tuple[int, ...]], sampling: Sampling, stride: int,
        examples: Sequence[Example],
    ) -> list[list[list[Turn]]]:  # fmt: skip
        """Play [prompts][n] episodes, each the list of its turns, turn by turn of all that have not ended.

        `sampling` is of the first turns, `n` for each prompt; the seeds of each later turn are `stride` prompts on, the
        most that a step has.
        """
        first = self.first(prompts, sampler.generate(prompts, sampling))
        episodes = [episode for group in first for episode in group]
        if self._environment is None:
            return first
        rows = [row_of(example) for example, group in zip(examples, first, strict=True) for _ in group]
        seeds = [sampling.seed * sampling.n + at for at in range(len(rows))]
        for own, session in zip(episodes, self._environment.begin(rows, seeds), strict=True):
            own[-1] = replace(own[-1], session=session)
        names = [str(row["id"]) for row in rows]
        self._answer(list(zip(episodes, names, strict=True)))
        for number in range(1, self._options.max_turns):
            going = [(at, own) for at, own in enumerate(episodes) if own[-1].reply]
            if not going:
                break
            given = [next_prompt(own[-1]) for _, own in going]
            seed = sampling.seed + number * stride
            each = [replace(sampling, n=1, seed=seed * sampling.n + at) for at, _ in going]
            answers = sampler.generate(given, replace(sampling, n=1, seed=seed, each=each))
            for (_, own), prompt, (sample,) in zip(going, given, answers, strict=True):
                own.append(replace(self._turn(prompt, sample, own), session=own[-1].session))
            self._answer([(own, names[at]) for at, own in going])
        return first

    def _answer(self, going: Sequence[tuple[list[Turn], str]]) -> None:
        """Have the environment answer the last turn of some episodes, of rows of these names."""
        assert self._environment is not None
        read = [len(own) < self._options.max_turns and self._has_ended(own[-1].sample.tokens) for own, _ in going]
        sessions = [own[-1].session for own, _ in going]
        texts = [[turn.text for turn in own] for own, _ in going]
        said = self._environment.step([item for item in sessions if item], texts, [name for _, name in going], read)
        for (own, _), messages in zip(going, said, strict=True):
            if messages:
                own[-1] = self._replied(own[-1], messages, own[:-1])

    def first(
        self, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[Sample]]
    ) -> list[list[list[Turn]]]:  # fmt: skip
        """Episodes of one turn so far."""
        return [
            [[self._turn(prompt, sample, ())] for sample in own] for prompt, own in zip(prompts, answers, strict=True)
        ]

    @staticmethod
    def asked(
        ids: Sequence[str], examples: Sequence[Example], texts: Sequence[str], episodes: Sequence[Sequence[Turn]]
    ) -> list[ScoredEpisode]:
        """Arguments of a reward, of episodes in order."""
        return [
            ScoredEpisode(id=name, completion=text, row=row_of(example), session=turns[-1].session)
            for name, example, text, turns in zip(ids, examples, texts, episodes, strict=True)
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a turn, without its end token."""
        return self._tokenizer.decode(self._unended(tokens))

    def played(self, episodes: Sequence[tuple[str, Sequence[Turn]]]) -> PlayedTurns | None:
        """Turns of episodes by id; None where there is no environment."""
        if self._environment is None:
            return None
        turns = [(which, at, turn) for which, own in episodes for at, turn in enumerate(own)]
        said = [self._tokenizer.decode(turn.reply) for _, _, turn in turns]
        (before, after), encoded = self._around_reply, self._environment.take_encoded()
        return PlayedTurns(
            before=before, after=after, end=self._tokenizer.eos_id, episodes=tuple(which for which, _, _ in turns),
            indices=tuple(at for _, at, _ in turns), prompts=tuple(turn.prompt for _, _, turn in turns),
            replies=tuple(turn.reply for _, _, turn in turns),
            sampled=tuple(tuple(turn.sample.tokens) for _, _, turn in turns),
            texts=tuple(turn.text for _, _, turn in turns),
            said=tuple(said), seals=self._environment.take_seals(),
            read_replies=() if self._second is None else tuple(encoded.get(text, ()) for text in said),
            read_texts=() if self._second is None else tuple(
                self._second.decode(self._unended(turn.sample.tokens)) for _, _, turn in turns
            ),
        )  # fmt: skip

    @cached_property
    def _around_reply(self) -> tuple[str, str]:
        before, _, after = self._framed([Message(role="tool", content="0")]).rpartition("0")
        return before, after

    @cached_property
    def _second(self) -> SecondTokenizer | None:
        return None if why_unread(self._files) else SecondTokenizer(self._files, self._chat)

    def _framed(self, said: Sequence[Message]) -> str:
        """Text of messages and of what comes before the next turn, by the second reader if there is one."""
        if self._second is not None:
            return self._second.framed(said)
        return self._tokenizer.decode(self._tokenizer.reply(said))

    def _unended(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if self._has_ended(tokens) else tokens

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] == self._tokenizer.eos_id

    def _turn(self, prompt: tuple[int, ...], sample: Sample, before: Sequence[Turn]) -> Turn:
        """A turn after those before it, with its text."""
        return Turn(prompt=prompt, sample=sample, text=self.text(sample.tokens))

    def _replied(self, turn: Turn, said: Sequence[Mapping[str, str]], before: Sequence[Turn]) -> Turn:
        """A turn after those before it, with the token ids of what the environment said to it."""
        reply = self._tokenizer.reply([Message(role=item["role"], content=item["content"]) for item in said])
        if len(reply) > self._options.max_reply_tokens:
            raise UsageError(
                f"environment `{self._options.environment}` replied {len(reply):,} tokens, "
                f"grpo.max_reply_tokens is {self._options.max_reply_tokens:,}: raise it, or shorten the reply"
            )
        return replace(turn, reply=reply)


def row_of(example: Example) -> dict[str, Any]:
    """Row of the data as an environment and a reward have it, with all further columns."""
    asked: dict[str, Any] = {"prompt": example.prompt}
    if example.messages:
        asked = {"messages": [{"role": item.role, "content": item.content} for item in example.messages]}
    return {**example.metadata, "id": example.id, **asked, "answer": example.answer}


def next_prompt(turn: Turn) -> tuple[int, ...]:
    """Token ids of all turns up to this one, and of the reply to it."""
    return (*turn.prompt, *turn.sample.tokens, *turn.reply)


def text_of(turns: Sequence[Turn]) -> str:
    """Text of an episode that a reward reads: that of its last turn, in which no environment has a word."""
    return turns[-1].text


def rows_of(
    turns: Sequence[Turn], row: Callable[[Turn], RolloutRow], *, step_wise: bool
) -> list[RolloutRow]:  # fmt: skip
    """Rollouts of an episode: one with the replies between its turns, or one for each turn.

    `row` makes the rollout of a turn alone. With `step_wise` there is one for each turn, and the text, which a reward
    reads, is the last turn's alone.
    """
    rows = [row(turn) for turn in turns]
    if not step_wise:
        return [joined(rows)]
    last = len(rows) - 1
    return [
        structs.replace(
            item, id=f"{item.id}/{at}", trajectory=item.id, index=at, is_last_step=at == last,
            text=item.text if at == last else None,
        )
        for at, item in enumerate(rows)
    ]  # fmt: skip


def joined(rows: Sequence[RolloutRow]) -> RolloutRow:
    """One rollout of an episode's turns; what stands between two turns was not sampled, and is out of the loss."""
    last, begin = rows[-1], len(rows[0].prompt)
    size = len(last.prompt) + len(last.response) - begin
    sampled, logprobs, versions = [False] * size, [float("nan")] * size, [NO_VERSION] * size
    for item in rows:
        at = len(item.prompt) - begin
        own = slice(at, at + len(item.response))
        sampled[own], logprobs[own], versions[own] = item.sampled, item.logprobs, item.versions
    return structs.replace(
        last, prompt=rows[0].prompt, response=(*last.prompt[begin:], *last.response), sampled=tuple(sampled),
        mask=tuple(sampled), logprobs=tuple(logprobs), versions=tuple(versions),
    )  # fmt: skip


class SealedEnvironment:
    """The environment of a pool, with a seal of each reply that may be read.

    `framed` makes the text that the template writes between the turn and the next one, and `encoded` its token ids by a
    second reader of the tokenizer's files; None where there is none.
    """

    def __init__(
        self, pool: RewardPool, framed: Callable[[Sequence[Message]], str],
        encoded: Callable[[Sequence[Message]], tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._framed, self._encode = pool, framed, encoded
        self.path = pool.made_by
        self._seals: list[int] = []
        self._encoded: dict[str, tuple[int, ...]] = {}

    def begin(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[EpisodeHandle]:
        """Begin episodes; see `RewardPool.begin`."""
        return self._pool.begin(rows, seeds)

    def step(
        self, sessions: Sequence[EpisodeHandle], turns: Sequence[Sequence[str]], names: Sequence[str],
        read: Sequence[bool],
    ) -> list[Sequence[Mapping[str, str]]]:  # fmt: skip
        """Messages after the last of an episode's turns, of some episodes; none where it ends.

        `turns` has the texts of each episode's turns, `names` those of their rows, for errors, and `read` tells which
        may have another turn, so that messages are read.
        """
        found = []
        replies = self._pool.step(sessions, [own[-1] for own in turns], names)
        for own, reply, may in zip(turns, replies, read, strict=True):
            said = () if reply.done or not may else reply.messages
            if may:
                messages = [Message(role=item["role"], content=item["content"]) for item in said]
                framed = self._framed(messages) if messages else ""
                self._seals.append(seal_of_reply(own, framed))
                if messages and self._encode is not None:
                    self._encoded[framed] = self._encode(messages)
            found.append(said)
        return found

    def take_encoded(self) -> dict[str, tuple[int, ...]]:
        """Token ids of all replies since the last call, by the second reader, by their text in its frame."""
        found, self._encoded = self._encoded, {}
        return found

    def take_seals(self) -> tuple[int, ...]:
        """Seals of all replies since the last call, in their order; of no reply too."""
        found, self._seals = tuple(self._seals), []
        return found
