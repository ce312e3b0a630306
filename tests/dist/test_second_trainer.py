"""Ten steps of GRPO by `verifier train` and by a second trainer that shares no code with it.

Both read the same recorded rollouts. Gradients are compared at the trainer's own weights, update by update; the change
of weights is that of two runs that never meet. What this does not exercise: sampling, filters, and corrections.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.meta.sources import ROOT
from tests.sampled_rollouts import write_rollouts
from tests.second_trainer import Recipe, SecondTrainer
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.model.tiny import write_tiny
from verifier.trainer.controller import Trainer

pytestmark = pytest.mark.slow

STEPS = 10
OF_GREATEST = 1e-5
"""Greatest difference of a gradient over the tensor's greatest (issue 16)."""
OF_CHANGE = 0.01
"""L2 norm of the difference of two changes of weights over that of the change (issue 16)."""
KNOBS = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "grpo.group_size=4", "grpo.clip_high=0.28",
    "grpo.kl_weight=0.05", "optimizer.learning_rate=0.002", "optimizer.least_learning_rate=0.0005",
    "optimizer.schedule=linear", "optimizer.warmup_steps=4", "optimizer.clip_grad=0.5",
    "evaluation.num_problems=0",
)  # fmt: skip
RUNS = {
    "ratio over the engine": ("grpo.ratio_over=engine", "batch.micro_batch_size=3"),
    "mini-batches, epochs, two ranks": ("grpo.mini_batches=2", "grpo.epochs=2", "mesh.dp=2", "batch.max_tokens=48"),
}
EACH = [pytest.param(name, marks=[] if "mini-batches" in name else [pytest.mark.slow]) for name in RUNS]


def recipe_of(config: TrainConfig) -> Recipe:
    optimizer, options = config.optimizer, config.grpo
    return Recipe(
        learning_rate=optimizer.learning_rate, least_learning_rate=optimizer.least_learning_rate,
        warmup_updates=optimizer.warmup_steps, updates=STEPS * options.mini_batches * options.epochs,
        clip_grad=optimizer.clip_grad, betas=(optimizer.beta_1, optimizer.beta_2), epsilon=optimizer.epsilon,
        clip_low=options.clip_low, clip_high=options.clip_high, kl_weight=options.kl_weight,
        divisor=options.ratio_over, mini_batches=options.mini_batches, epochs=options.epochs,
    )  # fmt: skip


class Trained:
    """A run of the trainer: folder, recipe, and weights and gradients of each update from 1."""

    def __init__(self, run: Path, seen: Path, checkpoint: Path, rollouts: Path, recipe: Recipe) -> None:
        self.run, self.checkpoint, self.rollouts, self.recipe = run, checkpoint, rollouts, recipe
        updates = range(1, recipe.updates + 1)
        self.weights = {number: load_file(seen / f"weights {number}.safetensors") for number in updates}
        self.gradients = {number: load_file(seen / f"gradients {number}.safetensors") for number in updates}

    def last(self) -> dict[str, torch.Tensor]:
        """Exported weights of the end."""
        found = {}
        for file in (self.run / "hf_model").glob("*.safetensors"):
            found |= load_file(file)
        return found


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads of torch would wait for each other: the second trainer's tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rollouts(checkpoints, tmp_path_factory):
    """Checkpoint, and rollouts sampled from it for every step."""
    checkpoint = write_tiny("add", checkpoints)
    return checkpoint, write_rollouts(checkpoint, tmp_path_factory.mktemp("second") / "rollouts", steps=STEPS)


@pytest.fixture(scope="module")
def trained(rollouts, trainer_launcher, tmp_path_factory):
    checkpoint, folder = rollouts

    @cache
    def train(name: str) -> Trained:
        seen = tmp_path_factory.mktemp("seen")
        run = tmp_path_factory.mktemp("trained") / "run"
        config, _ = load(TrainConfig, overrides=[*knobs(name, folder), f"run={run}"])
        within = ("tests.dist.second_trainer_functions:captured", str(seen))
        Trainer(config, print, launcher=trainer_launcher, within=within).run()
        return Trained(run, seen, checkpoint, folder, recipe_of(config))

    return train


def knobs(name: str, rollouts: Path) -> list[str]:
    return [*KNOBS, *RUNS[name], f"data.rollouts={rollouts}"]


def gradient_differences(trained: Trained, second: SecondTrainer, steps: int = STEPS) -> list[tuple[float, int, str]]:
    """(greatest difference over the tensor's greatest, update, tensor) of all updates at the trainer's weights."""
    second.run(trained.rollouts, steps, given=trained.weights)
    found = []
    for number, expected in second.gradients.items():
        actual = trained.gradients[number]
        assert expected.keys() <= actual.keys()
        for name, wanted in expected.items():
            scale = float(wanted.abs().max())
            found.append((float((actual[name].double() - wanted).abs().max()) / scale, number, name))
    return found


def change_differences(trained: Trained, second: SecondTrainer) -> dict[str, float]:
    """L2 distance of the changes of weights over the norm of the change, by tensor; "all" is over all of them."""
    second.run(trained.rollouts, STEPS)
    first, ours, theirs = trained.weights[1], trained.last(), second.weights()
    off = {name: float((ours[name].double() - wanted).norm()) for name, wanted in theirs.items()}
    size = {name: float((wanted - first[name].double()).norm()) for name, wanted in theirs.items()}
    total = sum(value**2 for value in off.values()) ** 0.5 / sum(value**2 for value in size.values()) ** 0.5
    return {name: off[name] / size[name] for name in off} | {"all": total}


@pytest.mark.parametrize("name", EACH)
def test_gradients_of_every_update_are_those_of_the_second_trainer(name, trained):
    run = trained(name)
    second = SecondTrainer(run.checkpoint, run.recipe)
    worst = max(gradient_differences(run, second))
    print(f"{name}: gradients {worst}")
    assert worst[0] < OF_GREATEST, worst
    assert len(second.gradients) == run.recipe.updates
    assert sum(second.clipped.values()) > 20  # the clip takes part
    assert max(second.norms.values()) > run.recipe.clip_grad  # and that of the norm


@pytest.mark.parametrize("name", EACH)
def test_weights_change_as_those_of_the_second_trainer(name, trained):
    run = trained(name)
    measured = change_differences(run, SecondTrainer(run.checkpoint, run.recipe))
    worst = max(measured.items(), key=lambda item: item[1])
    print(f"{name}: change {measured['all']:.1e} in all, {worst}")
    assert worst[1] < OF_CHANGE, worst


class SequenceMean(SecondTrainer):
    def mean(self, losses):
        return torch.stack([own.mean() for own in losses]).mean()


class Unclipped(SecondTrainer):
    def surrogate(self, ratio, advantage):
        return ratio * advantage


class WithoutDeviation(SecondTrainer):
    def advantages(self, rewards):
        return [reward - sum(rewards) / len(rewards) for reward in rewards]


class RateOfTheUpdateBefore(SecondTrainer):
    def rate(self, number):
        return super().rate(number - 1)


@pytest.mark.parametrize("wrong", [SequenceMean, Unclipped, WithoutDeviation])
def test_another_loss_has_other_gradients(wrong, trained):
    run = trained("ratio over the engine")
    assert max(gradient_differences(run, wrong(run.checkpoint, run.recipe), steps=2))[0] > 100 * OF_GREATEST


@pytest.mark.parametrize("wrong", [SequenceMean, RateOfTheUpdateBefore])
def test_another_step_changes_weights_otherwise(wrong, trained):
    run = trained("ratio over the engine")
    assert change_differences(run, wrong(run.checkpoint, run.recipe))["all"] > 2 * OF_CHANGE


@pytest.mark.slow
def test_the_command_ends_with_the_weights_that_were_compared(trained, rollouts, tmp_path):
    name = "ratio over the engine"
    command = [sys.executable, "-m", "verifier", "train", *knobs(name, rollouts[1]), f"run={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    for file in sorted((trained(name).run / "hf_model").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "run" / "hf_model" / file.name).read_bytes()
