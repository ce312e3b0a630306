"""A second trainer of GRPO: transformers, plain PyTorch and torch's Adam in float64; no code of `verifier` is in it.

It reads recorded rollouts by json alone, runs each sequence by itself, without padding or packing, and takes the mean
over the tokens of a mini-batch as a textbook has it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of a run, each with the formula that it enters."""

    learning_rate: float
    least_learning_rate: float
    warmup_updates: int
    updates: int
    clip_grad: float
    betas: tuple[float, float]
    epsilon: float
    clip_low: float
    clip_high: float
    kl_weight: float
    divisor: str
    """"old": the trainer's log-probabilities before the batch; "engine": the recorded ones."""
    mini_batches: int
    epochs: int


class SecondTrainer:
    """One process that holds a model in float64.

    Attributes:
        gradients: of each update by its number, from 1, before clipping.
        weights_before: of each update.
        clipped: number of tokens whose gradient the clip stopped, of each update.
        norms: L2 norm of the gradient of each update.
    """

    def __init__(self, checkpoint: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = _load(checkpoint)
        self.reference = _load(checkpoint)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.0, betas=recipe.betas, eps=recipe.epsilon)
        self.gradients: dict[int, dict[str, Tensor]] = {}
        self.weights_before: dict[int, dict[str, Tensor]] = {}
        self.clipped: dict[int, int] = {}
        self.norms: dict[int, float] = {}

    def run(self, folder: Path, steps: int, given: Mapping[int, Weights] | None = None) -> None:
        """Train on a file of rollouts a step, in the order of their names.

        With `given`, each update begins at these weights, whatever the update before it made.
        """
        number = 0
        for file in sorted(folder.glob("*.jsonl"))[:steps]:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            if given is not None:
                self._put(given[number + 1])
            rows = self._prepared(rows)
            parts = _parts(rows, self.recipe.mini_batches)
            for part in parts * self.recipe.epochs:
                number += 1
                if given is not None:
                    self._put(given[number])
                self._update(number, part)

    def weights(self) -> dict[str, Tensor]:
        """Copy of the weights by name."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def advantages(self, rewards: list[float]) -> list[float]:
        """Rewards of a group less their mean, in standard deviations of a sample."""
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        return [(reward - mean) / (deviation + 1e-6) for reward in rewards]

    def mean(self, losses: list[Tensor]) -> Tensor:
        """Mean over all tokens of a mini-batch, from a tensor of losses per sequence."""
        return torch.cat(losses).sum() / sum(len(own) for own in losses)

    def surrogate(self, ratio: Tensor, advantage: float) -> Tensor:
        """PPO's clipped objective of each token."""
        bounded = ratio.clamp(1 - self.recipe.clip_low, 1 + self.recipe.clip_high)
        return torch.minimum(ratio * advantage, bounded * advantage)

    def rate(self, number: int) -> float:
        """Learning rate of an update: a linear rise from 0, then a linear fall to the least."""
        recipe = self.recipe
        if number <= recipe.warmup_updates:
            return recipe.learning_rate * number / recipe.warmup_updates
        done = (number - recipe.warmup_updates) / (recipe.updates - recipe.warmup_updates)
        return recipe.learning_rate + done * (recipe.least_learning_rate - recipe.learning_rate)

    def _prepared(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with their advantage, and log-probabilities of the policy before the batch and of the reference."""
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row["reward"])
        found = {group: iter(self.advantages(rewards)) for group, rewards in groups.items()}
        made = []
        for row in rows:
            with torch.no_grad():
                old = self._logprobs(self.model, row)
                reference = self._logprobs(self.reference, row)
            engine = torch.tensor(row["logprobs"], dtype=torch.float64)
            divisor = {"old": old, "engine": engine}[self.recipe.divisor]
            made.append({**row, "advantage": next(found[row["group"]]), "divisor": divisor, "reference": reference})
        return made

    def _update(self, number: int, rows: list[dict[str, Any]]) -> None:
        self.weights_before[number] = self.weights()
        self.adam.zero_grad()
        losses, clipped = [], 0
        for row in rows:
            keep = torch.tensor(row["mask"])
            current = self._logprobs(self.model, row)[keep]
            ratio = (current - row["divisor"][keep]).exp()
            gap = row["reference"][keep] - current
            divergence = gap.exp() - 1 - gap
            losses.append(self.recipe.kl_weight * divergence - self.surrogate(ratio, row["advantage"]))
            up, down = ratio > 1 + self.recipe.clip_high, ratio < 1 - self.recipe.clip_low
            clipped += int((up if row["advantage"] > 0 else down).sum()) if row["advantage"] else 0
        self.mean(losses).backward()
        self.clipped[number] = clipped
        named = dict(self.model.named_parameters())
        self.gradients[number] = {name: value.grad.detach().clone() for name, value in named.items()}
        self.norms[number] = float(torch.nn.utils.clip_grad_norm_(named.values(), self.recipe.clip_grad))
        for group in self.adam.param_groups:
            group["lr"] = self.rate(number)
        self.adam.step()

    def _logprobs(self, model: Any, row: dict[str, Any]) -> Tensor:
        """Log-probability of each token of the response, nats."""
        tokens = torch.tensor([*row["prompt"], *row["response"]])
        logits = model(tokens[None]).logits[0, len(row["prompt"]) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, tokens[len(row["prompt"]) :, None])[:, 0]

    def _put(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(weights[name])


def _load(checkpoint: Path) -> Any:
    """Load a model in float64.

    transformers gives the padding token's embedding no gradient from inputs (`padding_idx` of `torch.nn.Embedding`).
    Nothing is padded here, and a policy may sample that token like any other, so its gradient counts.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    return model


def _parts(rows: list[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    """Consecutive parts of equal size."""
    size, rest = divmod(len(rows), count)
    if rest:
        raise ValueError(f"{len(rows)} rollouts are not {count} equal parts")
    return [rows[at : at + size] for at in range(0, len(rows), size)]
