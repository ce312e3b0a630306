"""Whole batches of steps: rollouts, and what the loss needs of each token, made once and by id before any split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from verifier.algorithms.aggregation import token_weights
from verifier.config.training import TrainConfig
from verifier.core.record import Probe
from verifier.core.records_trainer import DataOrder, LossColumns, StepAccount
from verifier.data.encode import encode_example
from verifier.data.examples import Example
from verifier.data.order import batch_indices
from verifier.data.rollout import Rollout
from verifier.data.rollout_file import save_rollouts
from verifier.data.text_dataset import ARITHMETIC, load_examples, require_disjoint
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint

Values = Sequence[np.ndarray]
"""Per rollout [L] float64 of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rollouts of one step and the inputs of its loss.

    Attributes:
        weights: weight of each token's loss; the loss of the step is sum(weight * loss). 0 outside of the loss.
        columns: further inputs of the loss by name.
        order: examples that it was made from; None for one that is no step's.
    """

    step: int
    rollouts: Sequence[Rollout]
    weights: Values
    columns: Mapping[str, Values]
    aggregation: str
    order: DataOrder | None
    indices: tuple[int, ...] = ()

    def save(self, file: Path) -> None:
        """Write the batch for the ranks; their weights are multiples of the mean's, which divides by the tokens."""
        num_tokens = sum(int(rollout.mask.sum()) for rollout in self.rollouts)
        scaled = [weight * num_tokens for weight in self.weights]
        save_rollouts(file, self.rollouts, {"weight": scaled, **self.columns})

    def record(self, probe: Probe) -> None:
        """Record the examples, the account of tokens, and the inputs of the loss."""
        if self.order is not None:
            probe.emit(self.order, np.array(self.indices, np.int64))
        probe.emit(
            StepAccount(
                name="step", version=self.step, rollouts=len(self.rollouts),
                tokens=sum(map(len, self.rollouts)), in_loss=sum(int(item.mask.sum()) for item in self.rollouts),
                trained=sum(int((weight != 0).sum()) for weight in self.weights),
            )
        )  # fmt: skip
        arrays = {"weight": np.concatenate([*self.weights]), "mask": np.concatenate([r.mask for r in self.rollouts])}
        arrays |= {name: np.concatenate([*values]) for name, values in self.columns.items()}
        probe.emit(
            LossColumns(
                name="loss inputs", version=self.step, aggregation=self.aggregation,
                ids=tuple(item.id for item in self.rollouts), groups=tuple(item.group for item in self.rollouts),
                lengths=tuple(map(len, self.rollouts)),
            ),
            arrays,
        )  # fmt: skip


class BatchSource(Protocol):
    """Batches of a run, each a function of the config and the number of its step."""

    def batch(self, step: int) -> Batch:
        """Batch of a step, from 1 on."""

    def held_out(self) -> Batch:
        """Problems of the evaluation."""


class TextBatches:
    """Batches of supervised fine-tuning: examples in the order of (seed, epoch), encoded as they come."""

    def __init__(self, config: TrainConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._tokenizer = open_tokenizer(checkpoint.path)
        data, num_problems = config.data, config.evaluation.num_problems
        self._train = load_examples(data.source, "sft", count=data.num_examples, seed=config.seed)
        self._held_out: tuple[Example, ...] = ()
        if num_problems:
            self._held_out = load_examples(
                data.held_out or data.source, "sft", split="held-out", count=num_problems, seed=config.seed
            )
        require_disjoint(self._train, self._held_out)
        if config.data.batch_size > len(self._train):
            raise UsageError(
                f"data.batch_size is {config.data.batch_size}, more than the {len(self._train):,} examples of "
                f"`{config.data.source}`"
            )

    def batch(self, step: int) -> Batch:
        """Encode the examples of a step."""
        config = self._config
        indices = batch_indices(len(self._train), config.data.batch_size, config.seed, step - 1)
        examples = [self._train[index] for index in indices]
        order = DataOrder(
            name="examples", version=step, num_examples=len(self._train), seed=config.seed, step=step,
            examples=tuple(example.id for example in examples), prompts=tuple(example.question for example in examples),
            holds_out_by_crc=config.data.source == ARITHMETIC,
        )  # fmt: skip
        return self._encoded(step, examples, order, indices)

    def held_out(self) -> Batch:
        """Encode the held-out problems."""
        return self._encoded(0, self._held_out, None, ())

    def _encoded(
        self, step: int, examples: Sequence[Example], order: DataOrder | None, indices: tuple[int, ...]
    ) -> Batch:
        rollouts = [encode_example(example, self._tokenizer) for example in examples]
        how = self._config.aggregation
        weights = token_weights([item.mask for item in rollouts], [item.group for item in rollouts], how)
        return Batch(
            step=step, rollouts=rollouts, weights=weights, columns={}, aggregation=how, order=order, indices=indices
        )


def open_batches(config: TrainConfig, checkpoint: Checkpoint) -> BatchSource:
    """Open the data of a run; everything that can be refused is refused here.

    Raises:
        UsageError: data, tokenizer and config do not fit together.
    """
    return TextBatches(config, checkpoint)
