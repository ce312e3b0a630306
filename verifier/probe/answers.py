"""Records of a step's answers and data: as the engine gave them, as they read, what they are rewarded for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verifier.config_json import texts_of
from verifier.core.seal import seal_of_array
from verifier.errors import UsageError
from verifier.probe.steps import StepRecorder
from verifier.probe.tokens import Rows, row_of, step_tokens
from verifier.stages.data.records import (
    DataOrder,
    EpisodeTurns,
    HeldOutRead,
    RequestSeeds,
    RolloutTexts,
    TokensRead,
    TrainedText,
)
from verifier.stages.load.records import StatedConfig
from verifier.stages.replay.records import GivenRoutes, UsedRoutes
from verifier.stages.reward.records import GivenRewards
from verifier.stages.rollout.records import EvaluatedAnswers, SampledTokens

NEUTRAL = {
    "temperature": (1, 1.0),
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
}
"""Sampling parameters -> values with which they change no distribution."""


class AnswerRecorder(StepRecorder):
    """Calls of one process on answers, on the examples that they answer, and on evaluations."""

    def answers(
        self,
        step: int,
        *,
        tokens: Rows,
        logprobs: Rows,
        ids: Sequence[Any] | None = None,
        seeds: Sequence[int] = (),
        versions: Sequence[int] = (),
        sampling_params: Mapping[str, Any] | None = None,
    ) -> None:
        """Answers of a step as the engine returned them, before anything pads, filters or reorders them.

        Args:
            step: number of the step.
            tokens: token ids of each answer.
            logprobs: of these tokens, nats.
            ids: of the rollout that each answer is; by default "step/number", as `rollouts` has them.
            seeds: of the request of each.
            versions: of the weights that the engine says it held for each.
            sampling_params: of the requests: temperature, top_p, top_k, min_p and penalties, by vLLM's names. They are
                to be neutral but for the temperature of `rollouts`.

        Raises:
            UsageError: lists of different lengths.
        """
        rows = [(row_of(own, np.int64), row_of(nats, np.float32)) for own, nats in zip(tokens, logprobs, strict=False)]
        if {len(tokens), len(logprobs), len(seeds) or len(tokens), len(versions) or len(tokens)} != {len(rows)}:
            raise UsageError(f"step {step} has {len(tokens)} answers and {len(logprobs)} rows of log-probabilities")
        params = sampling_params or {}
        shaped = [f"{key}={params[key]!r}" for key, same in NEUTRAL.items() if params.get(key, same[0]) not in same]
        record = RequestSeeds(
            name="round 0",
            version=step,
            round=0,
            turns=(tuple(seeds),) if seeds else (),
            seals=(tuple((seal_of_array(own), seal_of_array(nats)) for own, nats in rows),),
            answers=tuple(map(str, ids)) if ids is not None else tuple(f"{step}/{at}" for at in range(len(rows))),
            shaped=(", ".join(shaped),) if sampling_params is not None else (),
            weights=(tuple(((version, len(row)),) for version, (row, _) in zip(versions, rows, strict=True)),)
            if versions
            else (),
        )
        self.emit(record)

    def samples(
        self,
        version: int,
        *,
        prompts: Rows,
        responses: Rows,
        logprobs: Rows,
        end_token: int | Sequence[int],
        max_response_tokens: int,
        finish_reasons: Sequence[str],
        seeds: Sequence[int | None] = (),
        temperature: float = 1.0,
        name: str = "samples",
    ) -> None:
        """Answers of requests that no step trains on, such as some that are asked twice with one seed.

        Args:
            version: of the weights.
            prompts: token ids of each.
            responses: token ids of each.
            logprobs: of the responses as the engine reported them, nats, at the temperature.
            end_token: token that ends an answer, or several.
            max_response_tokens: tokens that an answer may have.
            finish_reasons: of each, "stop" or "length".
            seeds: of each request; the same prompt and seed are to give the same answer.
            temperature: of the requests.
            name: of this set.
        """
        ends = (end_token,) if isinstance(end_token, int) else tuple(end_token)
        rows, count = tuple(map(_ids, responses)), len(responses)
        record = SampledTokens(
            name=name,
            version=version,
            lengths=tuple(map(len, rows)),
            prompts=tuple(map(_ids, prompts)),
            tokens=rows,
            stops=(ends,) * count,
            limits=(max_response_tokens,) * count,
            ended=tuple(finish_reasons),
            temperatures=(temperature,) * count,
            seeds=tuple(seeds),
        )
        self.emit(record, np.concatenate([row_of(row, np.float32) for row in logprobs]))

    def turns(
        self,
        step: int,
        turns: Sequence[Sequence[Mapping[str, Any]]],
        *,
        max_turns: int,
        end_token: int,
        environment: str = "",
    ) -> None:
        """Turns of each rollout of a step with an environment, as the engine sampled them.

        Args:
            step: number of the step, after its `rollouts`.
            turns: of each rollout in order, each with "prompt", token ids that the engine was given, "sampled",
                those that it sampled, "text", what the environment read of them, "reply", token ids that it added, and
                "said", their text; the last two are empty where the episode ends.
            max_turns: that an episode may have.
            end_token: that ends a turn.
            environment: its name.

        Raises:
            UsageError: no rollouts, or another number of them.
        """
        ids = self.opened(step).tokens.ids
        if len(turns) != len(ids):
            raise UsageError(f"`turns` has {len(turns)} episodes for {len(ids)} rollouts")
        flat = [(name, at, turn) for name, own in zip(ids, turns, strict=True) for at, turn in enumerate(own)]
        columns: dict[str, Any] = {
            "prompts": tuple(_ids(turn["prompt"]) for *_, turn in flat),
            "sampled": tuple(_ids(turn["sampled"]) for *_, turn in flat),
            "replies": tuple(_ids(turn.get("reply", ())) for *_, turn in flat),
            "texts": tuple(str(turn["text"]) for *_, turn in flat),
            "said": tuple(str(turn.get("said", "")) for *_, turn in flat),
        }
        record = EpisodeTurns(
            name="round 0",
            version=step,
            environment=environment,
            max_turns=max_turns,
            step_wise=False,
            before="",
            after="",
            end=end_token,
            episodes=tuple(name for name, *_ in flat),
            indices=tuple(at for _, at, _ in flat),
            **columns,
        )
        self.emit(record)

    def examples(
        self,
        step: int,
        *,
        ids: Sequence[Any],
        rendered: Sequence[str],
        answers: Sequence[str | None] = (),
        questions: Sequence[Any] = (),
        of: Sequence[int] | None = None,
        decode: Callable[[Sequence[int]], str],
        begin: str = "",
        tokenizer: Path | str = "",
        chat_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Examples of the data set that a step asks, in order, and what its rollouts say by `decode`.

        Args:
            step: number of the step, after its `rollouts`.
            ids: of each example.
            rendered: text of all that the engine is given for it, as the chat template writes it.
            answers: gold answer of each.
            questions: prompt of each as the data set has it: a text, or messages with "role" and "content".
            of: example of each rollout, by its place; by default the examples in order, equally often.
            decode: text of token ids, special tokens included.
            begin: text of the tokens that the tokenizer puts before a whole text, such as "<bos>".
            tokenizer: folder whose tokenizer.json and chat template alone are to make the prompts' tokens of
                `questions`; empty where they are made otherwise.
            chat_arguments: of the chat template.

        Raises:
            UsageError: no rollouts, or lists of other lengths.
        """
        tokens, count = self.opened(step).tokens, len(ids)
        if of is None:
            of = [at * count // max(len(tokens.ids), 1) for at in range(len(tokens.ids))]
        if len(of) != len(tokens.ids) or {len(rendered), len(answers) or count, len(questions) or count} != {count}:
            raise UsageError(f"step {step} has {count} examples: give as many texts and answers, and `of` each rollout")
        asked = [_said(item) for item in questions or rendered]
        order = DataOrder(
            name="examples",
            version=step,
            step=step,
            examples=tuple(map(str, ids)),
            prompts=tuple(asked),
            answers=tuple(answers) or (None,) * count,
            rendered=tuple(rendered),
        )
        self.emit(order)
        ends = self.opened(step).ends
        texts = RolloutTexts(
            name="texts",
            version=step,
            begin=begin,
            ids=tokens.ids,
            groups=tuple(f"{step}/{at}/{ids[at]}" for at in of),
            prompts=tuple(map(decode, tokens.prompts)),
            answers=tuple(decode(row[:-1] if row[-1:] and row[-1] in ends else row) for row in tokens.responses),
        )
        self.emit(texts)
        if tokenizer:
            self._read_again(step, Path(tokenizer), [questions[at] for at in of], dict(chat_arguments or {}))

    def _read_again(self, step: int, folder: Path, questions: Sequence[Any], arguments: dict[str, Any]) -> None:
        """Record the prompts' tokens beside those that the tokenizer's files alone make."""
        from verifier.data.examples import Example, Message
        from verifier.data.second_tokenizer import SecondTokenizer, why_unread
        from verifier.data.tokenizer import ChatTemplate

        if why := why_unread(folder):
            raise UsageError(f"`{folder}` cannot be read again: {why}")
        tokens, reader = self.opened(step).tokens, SecondTokenizer(folder, ChatTemplate(arguments=arguments))
        read = []
        for name, item in zip(tokens.ids, questions, strict=True):
            told = {"prompt": item} if isinstance(item, str) else {"messages": tuple(Message(**part) for part in item)}
            read.append(reader.prompt(Example(id=name, **told)))
        ends = self.opened(step).ends
        record = TokensRead(
            name="tokens",
            version=step,
            ids=tokens.ids,
            whole=False,
            prompt_lengths=tuple(map(len, tokens.prompts)),
            lengths=tuple(map(len, tokens.prompts)),
            read_prompt_lengths=tuple(map(len, read)),
            read_lengths=tuple(map(len, read)),
            end=ends[0] if ends else None,
            read_end=reader.end,
        )
        columns = {"tokens": tokens.prompts, "read": read}
        self.emit(record, {key: np.array([id_ for row in rows for id_ in row]) for key, rows in columns.items()})

    def rewards(self, step: int, *, texts: Sequence[str | None], answers: Sequence[str | None], name: str = "") -> None:
        """Texts that the reward of each rollout of a step read, and the gold answers that it compared them with.

        `name` is "answer" for a reward of 1 where the last number of the text is the gold answer and 0 otherwise.
        Without a name rewards of 0 and 1 are judged where the gold answer is a number.

        Raises:
            UsageError: no rollouts, or lists of other lengths.
        """
        tokens = self.opened(step).tokens
        if not len(texts) == len(answers) == len(tokens.ids):
            raise UsageError(f"`rewards` has {len(texts)} texts and {len(answers)} answers, step {step} other rollouts")
        record = GivenRewards(
            name="rewards",
            version=step,
            reward=name,
            ids=tokens.ids,
            texts=tuple(texts),
            answers=tuple(answers),
            rewards=tokens.rewards,
        )
        self.emit(record)

    def trained_text(
        self, step: int, *, ids: Sequence[Any], responses: Sequence[str], texts: Sequence[str], end: str
    ) -> None:
        """Examples of a step of fine-tuning: the response of each, and the text that its tokens in the loss decode to.

        `end` is the text of the end token, which is in the loss too.
        """
        self.current = step
        record = TrainedText(
            name="trained",
            version=step,
            ids=tuple(map(str, ids)),
            responses=tuple(responses),
            texts=tuple(texts),
            end=end,
        )
        self.emit(record)

    def held_out(self, version: int, *, ids: Sequence[Any], questions: Sequence[Any], trained: Sequence[Any]) -> None:
        """Problems of an evaluation of the weights of a version, and the questions that the loop trains on."""
        places: dict[str, int] = {}
        for at, item in enumerate(trained):
            places.setdefault(_said(item), at)
        found = np.array([places.get(_said(item), -1) for item in questions], np.int64)
        self.emit(HeldOutRead(name="held-out", version=version, source="", ids=tuple(map(str, ids))), found)

    def evaluation(
        self,
        version: int,
        *,
        ids: Sequence[Any],
        prompts: Rows,
        responses: Rows,
        engine_logprobs: Rows,
        trainer_logprobs: Rows,
        end_token: int | Sequence[int],
        max_response_tokens: int,
        claimed: int | None = None,
        greedy: bool = False,
        shortfalls: Rows | None = None,
        temperature: float = 1.0,
        engine_versions: Sequence[int] = (),
    ) -> None:
        """Answers of an evaluation, and the trainer's own scores of them by the weights of a version.

        Args:
            version: of the weights that the trainer scores with.
            ids: of the held-out problem that each answers.
            prompts: token ids of each.
            responses: token ids of each.
            engine_logprobs: of the responses as the engine reported them, nats, at the temperature; of greedy ones 1.
            trainer_logprobs: the same by the trainer.
            end_token: token that ends an answer, or several.
            max_response_tokens: tokens that an answer may have.
            claimed: version that the metrics name; by default the same.
            greedy: the answers are greedy.
            shortfalls: of greedy answers, how far the logit of each token is below the greatest one in the trainer.
            temperature: divisor of the logits.
            engine_versions: of the weights that the engine says it held.

        Raises:
            UsageError: rows of other numbers or lengths.
        """
        ends = (end_token,) if isinstance(end_token, int) else tuple(end_token)
        found = step_tokens(
            prompts,
            responses,
            [[1] * len(row) for row in responses],
            engine_logprobs,
            version,
            None,
            None,
            [f"{'accuracy' if greedy else 'sampled'} {version}/{at}/0/{name}" for at, name in enumerate(ids)],
            temperature,
            version,
        )
        short = shortfalls if shortfalls is not None else [np.full(len(row), np.nan) for row in found.responses]
        arrays = {
            "tokens": found.tokens,
            "mask": found.mask,
            "engine": found.engine,
            "trainer": found.column(trainer_logprobs, "trainer_logprobs"),
            "shortfall": found.column(short, "shortfalls"),
        }
        record = EvaluatedAnswers(
            name="held-out problems" + (", greedy" if greedy else ""),
            version=version,
            claimed=version if claimed is None else claimed,
            temperature=temperature,
            ids=found.ids,
            lengths=found.lengths,
            greedy=(greedy and shortfalls is not None,) * len(found.ids),
            max_answer_tokens=max_response_tokens,
            end=ends[0],
            other_ends=ends[1:],
            weights=tuple(engine_versions),
            sent=max((own for own in self._sent if own <= version), default=None),
        )
        self.emit(record, arrays)

    def routes(self, step: int, rows: Any, *, passes: Sequence[str] = ("train",)) -> None:
        """Experts that the engine reported for a step's tokens, and that each pass has to replay.

        `rows` is [N, 3 + K]: number of the rollout, position, global layer, K experts.
        """
        ids = self.opened(step).tokens.ids
        self.emit(GivenRoutes(name="rollouts", version=step, rollouts=ids, passes=tuple(passes)), row_table(rows))

    def routed(self, step: int, rows: Any, *, during: str = "train") -> None:
        """Experts that this process's routers used in a pass over a step's tokens; rows as those of `routes`."""
        self.emit(UsedRoutes(name="rollouts", version=step, coordinate="", during=during), row_table(rows))

    def model_config(self, values: Mapping[str, Any]) -> None:
        """Values of the checkpoint's config.json, defaults included, which settings are compared with."""
        self.emit(StatedConfig(name="config.json", values=texts_of(values)))


def row_table(rows: Any) -> np.ndarray:
    """Rows of whole numbers, [N, K] int32."""
    return np.asarray(rows.cpu() if hasattr(rows, "cpu") else rows, np.int32)


def _ids(row: Any) -> tuple[int, ...]:
    return tuple(row_of(row, np.int64).tolist())


def _said(question: Any) -> str:
    return question if isinstance(question, str) else json.dumps([[row["role"], row["content"]] for row in question])
