"""Rollouts from a live engine: prompts in the order of the data, answers sampled from the version that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from verifier.config import TrainConfig
from verifier.core.record import Probe
from verifier.data.encode import encode_prompt
from verifier.data.examples import Example
from verifier.data.order import batch_indices
from verifier.data.recorded import RolloutRow, Routes
from verifier.data.rollout import MISSING_ROUTE
from verifier.data.text_dataset import load_examples, require_disjoint
from verifier.data.tokenizer import open_tokenizer
from verifier.engine.api import EngineConfig, Sample, Sampling
from verifier.errors import ContractError
from verifier.model.checkpoint import Checkpoint
from verifier.rewards.scorer import RewardProcess
from verifier.trainer.batches import order_of
from verifier.trainer.fitting import load_train

_SEEDS = 1_000_003
"""Seeds of a run begin at a multiple of it, so that runs of neighbouring seeds share none."""


class Sampler(Protocol):
    """An engine, as far as it samples."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`."""


class EngineRollouts:
    """Rollouts of each step, sampled by an engine and scored by a reward in a process of its own.

    Args:
        config: of the run.
        checkpoint: whose tokenizer writes the prompts.
        whole_answers: the end token ends no answer of a step, so that each has `grpo.max_answer_tokens`.
    """

    def __init__(self, config: TrainConfig, checkpoint: Checkpoint, *, whole_answers: bool = False) -> None:
        self._config, self._checkpoint, self._whole_answers = config, checkpoint, whole_answers
        self._tokenizer = open_tokenizer(checkpoint.path)
        self._examples = load_train(config, "grpo")
        self._held_out: Sequence[Example] = ()
        if config.evaluation.num_problems:
            source, count = config.data.held_out or config.data.source, config.evaluation.num_problems
            self._held_out = load_examples(source, "grpo", split="held-out", count=count, seed=config.seed)
        require_disjoint(self._examples, self._held_out)
        self._prompts = [encode_prompt(example, self._tokenizer) for example in self._examples]
        self._client: Sampler | None = None
        self._reward: RewardProcess | None = None

    def engine_config(self, gpus: str, fixes: Sequence[str]) -> EngineConfig:
        """Config of the engine: room for all answers of a step side by side."""
        config, options, engine = self._config, self._config.grpo, self._config.engine
        longest = max(map(len, self._prompts))
        num_seqs = config.data.batch_size * options.group_size
        return EngineConfig(
            kind=engine.kind, tp=engine.tp, cuda_graphs=engine.cuda_graphs, sleep_level=engine.sleep_level,
            quantization=engine.quantization, lora_rank=config.lora.engine_rank(samples=True),
            lora_targets=config.lora.targets, checkpoint=str(self._checkpoint.path),
            dtype=config.dtype, max_model_len=longest + options.max_answer_tokens, max_num_seqs=num_seqs,
            max_batch_tokens=max(640, num_seqs * longest), gpus=gpus, fixes=tuple(fixes), routes=options.replay_routes,
        )  # fmt: skip

    def start(self, client: Sampler) -> None:
        """Take the engine, and start the reward's process."""
        self._client = client
        self._reward = RewardProcess(self._config.grpo.reward)

    def close(self) -> None:
        """End the reward's process."""
        if self._reward is not None:
            self._reward.close()

    def rollouts(self, step: int, probe: Probe | None) -> tuple[Sequence[RolloutRow], str]:
        """Sample the answers of a step from the weights that the steps before it made."""
        assert self._client is not None
        assert self._reward is not None
        config = self._config
        indices = batch_indices(len(self._examples), config.data.batch_size, config.seed, step - 1)
        examples = [self._examples[index] for index in indices]
        if probe is not None:
            probe.emit(order_of(config, step, len(self._examples), examples), np.array(indices, np.int64))
        prompts = [self._prompts[index] for index in indices]
        sampling = Sampling(
            seed=config.seed * _SEEDS + (step - 1) * config.data.batch_size, n=config.grpo.group_size,
            max_tokens=config.grpo.max_answer_tokens, temperature=config.grpo.temperature,
            stop=() if self._whole_answers else (self._tokenizer.eos_id,), ignore_end=self._whole_answers,
        )  # fmt: skip
        answers = self._client.generate(prompts, sampling)
        rows = [
            self._row(step, place, number, example, prompt, sample)
            for place, (example, prompt, samples) in enumerate(zip(examples, prompts, answers, strict=True))
            for number, sample in enumerate(samples)
        ]
        rewards = self._reward.score(
            [row.id for row in rows], [row.text or "" for row in rows], [row.answer or "" for row in rows]
        )
        return [_with_reward(row, reward) for row, reward in zip(rows, rewards, strict=True)], config.grpo.reward

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean reward of held-out problems by the weights that the engine holds: sampled, and decoded greedily.

        Args:
            step: whose weights these are; the samples of each evaluation have seeds of their own.

        Returns:
            "held_out_reward" at the temperature of training and "accuracy" at 0; empty without held-out problems.
        """
        if not self._held_out:
            return {}
        assert self._client is not None
        assert self._reward is not None
        prompts = [encode_prompt(example, self._tokenizer) for example in self._held_out]
        found = {}
        for name, temperature in (("held_out_reward", self._config.grpo.temperature), ("accuracy", 0.0)):
            sampling = Sampling(
                seed=(self._config.seed + 1) * _SEEDS - (step + 1) * len(prompts), temperature=temperature,
                max_tokens=self._config.grpo.max_answer_tokens, stop=(self._tokenizer.eos_id,),
            )  # fmt: skip
            samples = [answers[0] for answers in self._client.generate(prompts, sampling)]
            rewards = self._reward.score(
                [example.id for example in self._held_out], [self._text(sample.tokens) for sample in samples],
                [example.answer or "" for example in self._held_out],
            )  # fmt: skip
            found[name] = sum(rewards) / len(rewards)
        return found

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of an answer, without its end token."""
        return self._tokenizer.decode(tokens[:-1] if tokens and tokens[-1] == self._tokenizer.eos_id else tokens)

    def _row(
        self, step: int, place: int, number: int, example: Example, prompt: tuple[int, ...], sample: Sample
    ) -> RolloutRow:
        name, tokens, eos_id = f"{step}/{place}/{number}/{example.id}", sample.tokens, self._tokenizer.eos_id
        for at, nats in enumerate(sample.logprobs):
            if not math.isfinite(nats):
                raise ContractError(f"rollout `{name}`: the engine's log-probability of answer token {at} is {nats}")
        ended = bool(tokens) and tokens[-1] == eos_id
        drawn = (True,) * len(tokens)
        return RolloutRow(
            id=name, group=f"{step}/{place}/{example.id}", prompt=prompt, response=tuple(tokens), sampled=drawn,
            mask=drawn, logprobs=tuple(sample.logprobs), versions=(step - 1,) * len(tokens), reward=0.0,
            answer=example.answer, text=self._text(tokens), truncated=not ended,
            routes=_whole(name, sample.routes, len(prompt) + len(tokens)) if self._config.grpo.replay_routes else None,
        )  # fmt: skip


def _whole(name: str, routes: Routes, length: int) -> Routes:
    """Routes of all tokens of a rollout but its last, which the engine does not run."""
    if len(routes) != length - 1:
        raise ContractError(
            f"rollout `{name}`: the engine reported the routes of {len(routes)} tokens, it ran {length - 1}"
        )
    return (*routes, tuple((MISSING_ROUTE,) * len(experts) for experts in routes[0]))


def _with_reward(row: RolloutRow, reward: float) -> RolloutRow:
    from msgspec.structs import replace

    return replace(row, reward=reward)
