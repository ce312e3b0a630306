"""Batches of optimizer steps: rollouts, and what the loss needs of each token, made once and by id before any split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verifier.algorithms.aggregation import token_weights
from verifier.config import TrainConfig
from verifier.config_json import text_model
from verifier.data.encode import encode_example, require_kept
from verifier.data.examples import Example, batch_indices
from verifier.data.recorded import RolloutRow, Routes
from verifier.data.rollout import MISSING_ROUTE, Rollout, save_rollouts
from verifier.data.tokenizer import Tokenizer, open_tokenizer
from verifier.errors import ContractError, UsageError
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import JSON, moe_layers_of, num_experts_of
from verifier.trainer.fitting import near_budget, require_budget
from verifier.trainer.observer import SILENT, Observer, TextBatch
from verifier.trainer.run_data import RunData, load_held_out, load_train, open_chat_template

Values = Sequence[np.ndarray]
"""Per rollout [L] values of its tokens."""
Score = Callable[[Path, str], list[np.ndarray]]
"""(batch file, "current" or "reference") -> per rollout [L] float32 log-probabilities by these weights, nats; the
first token's is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """One optimizer step: its rollouts and the inputs of its loss."""

    step: int
    """Step of the run, from 1; it may have several updates."""
    number: int
    """Number of the optimizer step in the run, from 1."""
    file: Path
    """Batch as ranks read it."""
    rollouts: Sequence[Rollout]
    weights: Values
    """Weight of each token's loss, 0 outside of the loss; the loss of the update is sum(weight * loss)."""
    columns: Mapping[str, Values] = field(default_factory=dict)
    """Further inputs of the loss, by name."""
    first: bool = True
    """The weights are still those that made the `old` log-probabilities."""

    @property
    def name(self) -> str:
        """Name by which it is told of."""
        return f"update {self.number}"

    def save(self) -> None:
        """Write the batch; its weights are multiples of those of the mean over tokens, by which ranks divide."""
        num_tokens = sum(int(rollout.mask.sum()) for rollout in self.rollouts)
        scaled = [weight * num_tokens for weight in self.weights]
        save_rollouts(self.file, self.rollouts, {"weight": scaled, **self.columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollouts:
    """Rollouts of a step with their log-probabilities; lists have an entry a rollout."""

    rollouts: Sequence[Rollout]
    old: Values
    reference: Values | None


class UpdatePlan(Protocol):
    """Updates of a run, each a function of the config, the number of its step and the weights that it finds."""

    facts: Mapping[str, Any]
    """Metrics of the last step's batch, by name."""

    def updates(self, step: int, taken: int, score: Score) -> list[OptimizerUpdate]:
        """Make and save the updates of a step, from 1 on; `taken` updates were taken before it."""


def weights_of(config: TrainConfig, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Weights of the tokens of one optimizer step."""
    return token_weights(
        [item.mask for item in rollouts], [item.group for item in rollouts], config.aggregation,
        config.aggregation_constant,
    )  # fmt: skip


class HeldOut:
    """Held-out problems: the text data set that a run evaluates on."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, train: Sequence[Example]) -> None:
        self.tokenizer = tokenizer
        self.examples = load_held_out(config, train, "sft", tokenizer)
        require_kept(self.examples, tokenizer)
        require_budget(config, [encode_example(example, tokenizer) for example in near_budget(config, self.examples)])

    def save(self, file: Path) -> None:
        """Write the problems with their responses, for ranks that score them."""
        save_rollouts(file, [encode_example(example, self.tokenizer) for example in self.examples])


class SftPlan:
    """Supervised fine-tuning: examples in the order of (seed, epoch), encoded as they come, one update a step."""

    def __init__(
        self, config: TrainConfig, checkpoint: Checkpoint, folder: Callable[[int], Path], observer: Observer = SILENT
    ) -> None:
        self.facts: Mapping[str, Any] = {}
        self._config, self._file, self._observer = config, folder, observer
        files, chat = checkpoint.path, open_chat_template(config)
        self._tokenizer = open_tokenizer(checkpoint.path, chat)
        self._examples = load_train(config, "sft", self._tokenizer)
        require_kept(self._examples, self._tokenizer)
        near = [encode_example(example, self._tokenizer) for example in near_budget(config, self._examples)]
        require_budget(config, near)
        self.held_out = HeldOut(config, self._tokenizer, self._examples)
        self.data = RunData(
            task="sft", tokenizer=self._tokenizer, files=files, chat=chat, train=self._examples,
            held_out=self.held_out.examples,
        )  # fmt: skip

    def updates(self, step: int, taken: int, score: Score) -> list[OptimizerUpdate]:
        """Encode the examples of a step."""
        config = self._config
        indices = batch_indices(len(self._examples), config.data.batch_size, config.seed, step - 1)
        examples = [self._examples[index] for index in indices]
        rollouts = [
            replace(encode_example(example, self._tokenizer), id=f"{step}/{place}/{example.id}", group=example.id)
            for place, example in enumerate(examples)
        ]  # an example may occur twice where two epochs meet
        update = OptimizerUpdate(
            step=step, number=taken + 1, file=self._file(step), rollouts=rollouts, weights=weights_of(config, rollouts)
        )
        update.save()
        self._observer.on_batch(TextBatch(step=step, examples=examples, update=update))
        return [update]


SCORED = {"current": "old", "reference": "reference"}
"""Weights that score a batch -> name of the pass."""


def require_routes(file: Path, rows: Sequence[RolloutRow], sizes: Mapping[str, JSON]) -> None:
    """Refuse recorded rollouts whose routes the routers of a model cannot take."""
    shape, num_experts = [len(moe_layers_of(sizes)), text_model(sizes)["num_experts_per_tok"]], num_experts_of(sizes)
    for row in rows:
        where = f"grpo.replay_routes is true, but rollout `{row.id}` of `{file}`"
        if row.routes is None:
            raise UsageError(f"{where} has no routes: record them, or leave it out")
        if any([len(t), len(k)] != shape for t in row.routes for k in t):
            raise UsageError(
                f"{where} has routes of other sizes than the model's, [layers, experts per token] = {shape}"
            )
        ordered = np.sort(np.array(row.routes), axis=-1)
        missing = (ordered == MISSING_ROUTE).all(-1).all(-1)
        kept = ordered[:-1] if missing[-1] else ordered
        if kept.size and (kept.min() < 0 or kept.max() >= num_experts or (np.diff(kept, axis=-1) == 0).any()):
            raise UsageError(f"{where} has routes that are not different experts below {num_experts}")


def whole_routes(name: str, routes: Routes, length: int) -> Routes:
    """Routes of all tokens of a rollout but its last, which the engine does not run."""
    if len(routes) != length - 1:
        raise ContractError(
            f"rollout `{name}`: the engine reported the routes of {len(routes)} tokens, it ran {length - 1}"
        )
    return (*routes, tuple((MISSING_ROUTE,) * len(experts) for experts in routes[0]))
