"""Rollouts from a live engine: prompts in the order of the data, answers sampled from the version that it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from verifier.algorithms.registry import path_of_reward
from verifier.config import TrainConfig
from verifier.config.grpo import GrpoOptions
from verifier.data.encode import encode_prompt
from verifier.data.examples import Example, batch_indices, seed_of_round
from verifier.data.recorded import RolloutRow
from verifier.data.tokenizer import open_tokenizer
from verifier.engine.api import EngineConfig, Sample, Sampling
from verifier.engine.client import EngineClient
from verifier.engine.kv_cache import LENT_SHARE, OWN_SHARE, cache_bytes
from verifier.errors import ContractError
from verifier.model.checkpoint import Checkpoint
from verifier.platform import Tier
from verifier.rewards.scorer import RewardPool
from verifier.trainer.batches import whole_routes
from verifier.trainer.engines import Revival
from verifier.trainer.episodes import Episodes, PlayedTurns, Turn, row_of, rows_of, text_of
from verifier.trainer.evaluation import Answered, Noted, NotedAnswers, Rewarded, noted_of, places, seeds_of, weights_of
from verifier.trainer.fitting import require_room
from verifier.trainer.observer import SILENT, Observer
from verifier.trainer.run_data import RunData, load_held_out, load_train, open_chat_template
from verifier.trainer.sampled_batch import Round, SampledBatch, read_round, require_numbers, versions_of

SHOWN = 8
"""Rollouts of a step whose texts are shown."""
_SEEDS = 1_000_003
"""Seeds of a run begin at a multiple of it, so that runs of neighbouring seeds share none."""
_MOST_SEEDS = 2**62
"""Number that seeds of evaluations, which count down, go on from below 0: none is negative."""


class EngineRollouts:
    """Rollouts of each step, sampled by an engine and scored by a reward in a process of its own.

    With `whole_answers` the end token ends no answer of a step, so that each has `grpo.max_answer_tokens`.

    Attributes:
        data: of the run.
        revival: of the engine; None where its death ends the run.
        sent: versions that the engine was sent, in order.
        shown: texts of some rollouts of the last step, with their gold answers and rewards.
    """

    def __init__(
        self, config: TrainConfig, checkpoint: Checkpoint, *, whole_answers: bool = False, observer: Observer = SILENT
    ) -> None:
        self._config, self._checkpoint, self._whole_answers = config, checkpoint, whole_answers
        self._observer, chat = observer, open_chat_template(config)
        self._tokenizer = open_tokenizer(checkpoint.path, chat)
        self._examples = load_train(config, "grpo")
        self._held_out = load_held_out(config, self._examples, "grpo")
        self.data = RunData(
            task="grpo", tokenizer=self._tokenizer, files=checkpoint.path, chat=chat, train=self._examples,
            held_out=self._held_out,
        )  # fmt: skip
        self._prompts = [encode_prompt(example, self._tokenizer) for example in self._examples]
        self._held_out_prompts = [encode_prompt(example, self._tokenizer) for example in self._held_out]
        self._episodes = Episodes(config.grpo, self._tokenizer, checkpoint.path, chat)
        require_room(config, max(map(len, self._prompts)), self._longest_rest)
        try_environment(config.grpo, self._examples[0])
        self._longest_prompt = max(map(len, [*self._prompts, *self._held_out_prompts]))
        self._num_seqs = -(-config.data.batch_size // config.engine.replicas) * config.grpo.group_size
        if config.grpo.mode == "inflight":
            self._num_seqs *= config.grpo.max_staleness
        self._cache_bytes = cache_bytes(
            config.engine.kv_cache_gib, checkpoint.config, dtype=config.dtype, engine=config.engine,
            length=self._longest_prompt + self._longest_rest, count=self._num_seqs,
        )  # fmt: skip
        self._client: EngineClient | None = None
        self.revival: Revival | None = None
        self._reward: RewardPool | None = None
        self._answered: Answered | None = None
        self.facts: Mapping[str, float] = {}
        self.shown: Sequence[Mapping[str, Any]] = ()
        self.sent: list[int] = []

    def engine_config(
        self, gpus: str, fixes: Sequence[str], replica: int = 0, *, tier: Tier = "cpu", lent: bool = False
    ) -> EngineConfig:
        """Config of an engine, by its number: room for all answers of a step side by side.

        For `gpus` and `fixes` see `EngineConfig`. If `lent`, a trainer is on the engine's GPU, and the engine stays
        there while it trains.
        """
        config, options, engine = self._config, self._config.grpo, self._config.engine
        longest, inflight = self._longest_prompt, options.mode == "inflight"
        longest += self._longest_rest - options.max_answer_tokens
        at_once = longest + (options.max_answer_tokens if inflight else 0)  # answers are prefilled anew at an update
        num_seqs = self._num_seqs
        return EngineConfig(
            kind=engine.kind, tp=engine.tp, pp=engine.pp, ep=engine.ep, cuda_graphs=engine.replays_graphs(tier),
            sleep_level=engine.sleep_level, quantization=engine.quantization, dtype=config.dtype,
            lora_rank=config.lora.engine_rank(samples=True), lora_targets=config.lora.targets,
            checkpoint=str(self._checkpoint.path),
            max_model_len=longest + options.max_answer_tokens, max_num_seqs=num_seqs,
            max_batch_tokens=max(640, num_seqs * at_once), gpus=gpus, fixes=tuple(fixes), routes=options.replay_routes,
            inflight=inflight, replica=replica, kv_cache_bytes=self._cache_bytes,
            kv_cache_share=0.0 if engine.kv_cache_gib is not None else LENT_SHARE if lent else OWN_SHARE,
        )  # fmt: skip

    @property
    def deadline_s(self) -> float:
        """Seconds that one request of an engine may take, of which the answers of a step are the largest."""
        return self._config.engine.request_deadline_s(self._num_seqs * self._config.grpo.max_answer_tokens)

    @property
    def _longest_rest(self) -> int:
        """Tokens of an episode after its first prompt, at most: answers and replies."""
        return self._config.grpo.max_turns * self._config.grpo.max_answer_tokens + self._episodes.longest_reply

    def start(self, client: EngineClient) -> None:
        """Take the engine, in the place of one before it, and start the reward's processes."""
        self._client = client
        if self._reward is None:
            options = self._config.grpo
            self._reward = RewardPool(
                path_of_reward(options.reward), options.environment, options.reward_processes,
                options.reward_timeout_s, options.reward_errors,
            )  # fmt: skip
            self._episodes.start(self._reward)

    def close(self) -> None:
        """End the reward's processes."""
        if self._reward is not None:
            self._reward.close()

    def rollouts(self, step: int) -> tuple[Sequence[RolloutRow], str]:
        """Sample the answers of a step from the weights that the steps before it made."""
        return self.handed_on(step, self.sample_now(step))

    def handed_on(self, step: int, batch: SampledBatch) -> tuple[Sequence[RolloutRow], str]:
        """Hand on a step's rollouts, with the name of their reward."""
        assert self._reward is not None
        self.facts = batch.facts
        self.shown = [
            {
                "id": row.id, "prompt": self._tokenizer.decode(row.prompt),
                "completion": self._tokenizer.decode(row.response), "answer": row.answer, "reward": row.reward,
            }
            for row in batch.rows[:: max(1, len(batch.rows) // SHOWN)][:SHOWN]
        ]  # fmt: skip
        self._observer.on_rollouts(step, batch, self.sent)
        return batch.rows, self._config.grpo.reward

    def sample_now(self, step: int) -> SampledBatch:
        """Sample the answers of a step, all of them again for each death of the engine, from the trained weights."""
        if self.revival is None:
            return self.sample(step, step - 1)
        return self.revival.repeated(lambda: self.sample(step, step - 1), step - 1)

    def sample(self, step: int, version: int) -> SampledBatch:
        """Sample the answers of a step from the weights of a version, which the engine holds."""
        return self._completed(step, version, self._round(step, 0, version))

    def restored(self, step: int, saved: Sequence[Any]) -> SampledBatch:
        """Answers of a step that were sampled before a stop; see `SampledBatch.saved`."""
        rounds = []
        for number, (groups, turns, noted) in enumerate(map(read_round, saved)):
            indices = self._indices(step, number)[: len(groups)]
            rounds.append(self._ordered(step, number, indices, groups, turns, noted))
        return SampledBatch(rounds=rounds, limit=self._config.grpo.max_sampling_rounds)

    def begin(self, step: int, last: bool = True) -> None:
        """Begin a step's answers; if it is the last to begin before an update, sample a part of all that have begun."""
        prompts, sampling = self._asked(step, 0, self._indices(step, 0))
        self._holding.begin_batch(prompts, sampling, self._config.grpo.steps_before_update if last else 0)

    def finish(self, step: int, held: Sequence[int]) -> SampledBatch:
        """Sample the rest of the answers of the first step that has begun.

        The engine has held the versions `held`, in order, since they were begun.

        Raises:
            ContractError: the engine did not drop keys and values that are of the weights before.
        """
        answers = self._holding.finish_batch()
        if self._config.grpo.keep_kv_cache and not self._holding.reset_prefix_cache():
            raise ContractError("the engine did not drop its prefix cache, which holds keys of the old weights")
        indices = self._indices(step, 0)
        episodes = self._episodes.first([self._prompts[index] for index in indices], answers)
        return self._completed(step, held[-1], self._scored(step, 0, held, indices, episodes, [noted_of(answers)]))

    def _completed(self, step: int, version: int, first: Round) -> SampledBatch:
        """Replace groups without variance, round by round, by answers that a version samples."""
        rounds, limit = [first], self._config.grpo.max_sampling_rounds
        while len(rounds) < limit and (lost := rounds[-1].without_variance()):
            rounds.append(self._round(step, len(rounds), version, len(lost)))
        return SampledBatch(rounds=rounds, limit=limit)

    def _round(self, step: int, number: int, version: int, count: int | None = None) -> Round:
        assert self._client is not None
        indices = self._indices(step, number)[:count]
        prompts, sampling = self._asked(step, number, indices)
        noted = NotedAnswers(self._client)
        asked = [self._examples[index] for index in indices]
        episodes = self._episodes.play(noted, prompts, sampling, self._config.data.batch_size, asked)
        return self._scored(step, number, (version,), indices, episodes, noted.noted)

    @property
    def _holding(self) -> EngineClient:
        return cast(EngineClient, self._client)

    def _indices(self, step: int, number: int) -> tuple[int, ...]:
        seed = seed_of_round(self._config.seed, number)
        return batch_indices(len(self._examples), self._config.data.batch_size, seed, step - 1)

    def _asked(self, step: int, number: int, indices: Sequence[int]) -> tuple[list[tuple[int, ...]], Sampling]:
        """Prompts of a round of a step, and how they are sampled: no two rounds, or turns of one, share seeds."""
        options, whole = self._config.grpo, self._whole_answers
        place = ((step - 1) * options.max_sampling_rounds + number) * options.max_turns * self._config.data.batch_size
        return [self._prompts[index] for index in indices], Sampling(
            seed=self._config.seed * _SEEDS + place, n=options.group_size, max_tokens=options.max_answer_tokens,
            temperature=options.temperature, stop=() if whole else (self._tokenizer.eos_id,), ignore_end=whole,
            seeded=options.request_seeds,
        )  # fmt: skip

    def _scored(
        self, step: int, number: int, held: Sequence[int], indices: Sequence[int],
        episodes: Sequence[Sequence[Sequence[Turn]]], noted: Sequence[Noted],
    ) -> Round:  # fmt: skip
        """Rollouts of a round with their rewards; the engine has held versions, in order, since they were begun."""
        assert self._reward is not None
        at, examples = f"{step}.{number}" if number else f"{step}", [self._examples[index] for index in indices]
        groups, played = [], []
        for place, (example, own) in enumerate(zip(examples, episodes, strict=True)):
            group = []
            for which, turns in enumerate(own):
                found = self._rows(held, f"{at}/{place}", which, example, turns)
                played.append((found[-1].trajectory or found[-1].id, turns))
                group += found
            groups.append(group)
        rows = [row for group in groups for row in group if row.text is not None]
        asked = [example for example, own in zip(examples, episodes, strict=True) for _ in own]
        ids, texts = zip(*((row.id, row.text or "") for row in rows), strict=True)
        given = self._reward.score(Episodes.asked(ids, asked, texts, [turns for own in episodes for turns in own]))
        rewards = dict(zip(ids, given, strict=True))
        rewarded = [[replace(row, reward=rewards.get(row.id, 0.0)) for row in group] for group in groups]
        told = self._episodes.played(played)
        done = self._ordered(step, number, indices, rewarded, told, noted)
        return dataclasses.replace(done, failures=self._reward.take_failures(), seals=self._reward.seals)

    def _ordered(
        self, step: int, number: int, indices: Sequence[int], groups: Sequence[Sequence[RolloutRow]],
        turns: PlayedTurns | None, noted: Sequence[Noted],
    ) -> Round:  # fmt: skip
        return Round(groups=groups, indices=indices, turns=turns, noted=noted)

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean reward of held-out problems by the weights that the engine holds: sampled, and decoded greedily.

        These are the weights of a step; the samples of each evaluation have seeds of their own.

        Returns:
            "held_out_reward" at the temperature of training and "accuracy" at 0; empty without held-out problems.

        Raises:
            LogprobLost: a token of an answer that is kept has none that is finite, and nothing will judge it.
        """
        if not self._held_out:
            return {}
        found = (
            self._evaluated(step)
            if self.revival is None
            else self.revival.repeated(lambda: self._evaluated(step), step)
        )
        answered = self._answered
        if answered is not None and (not self._observer.judges or self._config.engine.quantization):
            require_numbers(self._config, [*answered.sampled, *answered.greedy])
        self._observer.on_evaluation(step, answered)
        return found

    def _evaluated(self, step: int) -> dict[str, float]:
        assert self._client is not None
        assert self._reward is not None
        options, prompts, kept, given = (
            self._config.grpo,
            self._held_out_prompts,
            list[list[RolloutRow]](),
            list[Rewarded](),
        )
        played, shaped = list[tuple[str, Sequence[Turn]]](), list[tuple[str, ...]]()
        found, drawn, weights = {"held_out_version": float(step)}, list[list[list[int]]](), set[int]()
        failures = 0
        for name, temperature in (("held_out_reward", self._config.grpo.temperature), ("accuracy", 0.0)):
            sampling = Sampling(
                seed=((self._config.seed + 1) * _SEEDS - (step + 1) * options.max_turns * len(prompts)) % _MOST_SEEDS,
                temperature=temperature, max_tokens=options.max_answer_tokens, stop=(self._tokenizer.eos_id,),
            )  # fmt: skip
            episodes = self._episodes.play(self._client, prompts, sampling, len(prompts), self._held_out)
            shaped.append(tuple(sorted({turn.sample.shaped for own in episodes for turn in own[0]})))
            drawn.append(seeds_of([own[0] for own in episodes]))
            weights |= weights_of([own[0] for own in episodes])
            texts = [text_of(own[0]) for own in episodes]
            ids = [example.id for example in self._held_out]
            rewards = self._reward.score(Episodes.asked(ids, self._held_out, texts, [own[0] for own in episodes]))
            failures += self._reward.take_failures()
            found[name] = sum(rewards) / len(rewards)
            given.append(Rewarded(number=name, texts=texts, rewards=rewards))
            where = [(at, self._held_out[at]) for at in places(step, len(prompts))]
            rows = [self._rows((step,), f"{name} {step}/{at}", 0, example, episodes[at][0]) for at, example in where]
            kept.append([row for own in rows for row in own])
            played += [
                (own[-1].trajectory or own[-1].id, episodes[at][0]) for (at, _), own in zip(where, rows, strict=True)
            ]
        self._answered = Answered(
            version=step, sampled=kept[0], greedy=kept[1], rewards=given, turns=self._episodes.played(played),
            shaped=(shaped[0], shaped[1]), seeds=drawn[0], sent=self.sent[-1] if self.sent else None,
            weights=sorted(weights),
        )  # fmt: skip
        return found | ({"held_out_errors": float(failures)} if failures else {})

    def _rows(
        self, held: Sequence[int], place: str, which: int, example: Example, turns: Sequence[Turn]
    ) -> list[RolloutRow]:  # fmt: skip
        """Rollouts of an episode, without their reward; see `_row`."""

        def row(turn: Turn) -> RolloutRow:
            return self._row(held, place, which, example, turn.prompt, turn.sample)

        return rows_of(turns, row, step_wise=self._config.grpo.step_wise)

    def _row(
        self, held: Sequence[int], place: str, number: int, example: Example, prompt: tuple[int, ...], sample: Sample,
    ) -> RolloutRow:  # fmt: skip
        """Rollout of a sample.

        For `held` see `versions_of`; `place` has the step and number of the prompt, and `number` is the sample's in its
        group.
        """
        name, tokens, eos_id = f"{place}/{number}/{example.id}", sample.tokens, self._tokenizer.eos_id
        ended, replays = bool(tokens) and tokens[-1] == eos_id, self._config.grpo.replay_routes
        drawn = (True,) * len(tokens)
        return RolloutRow(
            id=name, group=f"{place}/{example.id}", prompt=prompt, response=tuple(tokens), sampled=drawn, mask=drawn,
            logprobs=tuple(sample.logprobs), versions=versions_of(sample, held), reward=0.0, answer=example.answer,
            text=self._episodes.text(tokens), truncated=not ended,
            routes=whole_routes(name, sample.routes, len(prompt) + len(tokens)) if replays else None,
        )  # fmt: skip


def try_environment(options: GrpoOptions, example: Example) -> None:
    """Refuse an environment that fails on a first turn of a row, which is its gold answer; none is not tried."""
    if not options.has_turns:
        return
    row = row_of(example)
    with RewardPool(path_of_reward(options.reward), options.environment, 1, options.reward_timeout_s) as pool:
        pool.step(pool.begin([row], [0]), [example.answer or ""], [example.id])
