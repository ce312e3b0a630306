"""What test_train_parity.py runs on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verifier.data.rollout import Rollout, make_rollout
from verifier.launch.rank import RankContext
from verifier.mesh import Mesh

VOCAB = 512
CONSTANT = 20.0
"""Tokens that the aggregation `constant` divides by."""
SETTINGS = {
    "learning_rate": 1e-2, "least_learning_rate": 0.0, "schedule": "linear", "warmup_steps": 2, "decay_steps": 10,
    "weight_decay": 0.1, "clip_grad": 0.05, "beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8,
}  # fmt: skip
"""The optimizer's: the bound on the norm is far below the norms here, so every step clips."""
STEPS = 2


def batch() -> list[Rollout]:
    """Four prompts with three answers each; answers with gaps in their mask, and one without a token in the loss."""
    rng = np.random.default_rng(11)
    made = []
    for prompt in range(4):
        given = rng.integers(1, VOCAB, int(rng.integers(1, 8)))
        for answer in range(3):
            size = int(rng.integers(6, 30))
            mask = rng.random(size) < (0.0 if (prompt, answer) == (2, 1) else 0.8)
            made.append(
                make_rollout(
                    f"{prompt}/{answer}", given, rng.integers(1, VOCAB, size), group=f"prompt {prompt}", mask=mask
                )
            )
    return made


def columns(rollouts: list[Rollout], scored: list[np.ndarray], how: str) -> dict[str, list[np.ndarray]]:
    """Made-up inputs of the loss around the log-probabilities of one rank.

    The divisor is off by up to 0.4 nats for a sequence and by 0.2 for a token, so clips of 0.2 stop some of both signs.
    """
    from verifier.algorithms.aggregation import token_weights

    rng = np.random.default_rng(12)
    made: dict[str, list[np.ndarray]] = {"divisor": [], "reference": [], "advantage": []}
    for rollout, nats in zip(rollouts, scored, strict=True):
        own = np.concatenate([[0.0], nats])
        made["divisor"].append(own + rng.uniform(-0.4, 0.4) + rng.normal(0, 0.2, len(rollout)))
        made["reference"].append(own + rng.normal(0, 0.3, len(rollout)))
        made["advantage"].append(np.full(len(rollout), rng.choice([-1.5, -0.5, 0.7, 2.0])))
    masks, prompts = [rollout.mask for rollout in rollouts], [rollout.group for rollout in rollouts]
    weights = token_weights(masks, prompts, how, CONSTANT if how == "constant" else None)
    num_tokens = sum(int(mask.sum()) for mask in masks)
    made["weight"] = [weight * num_tokens for weight in weights]
    return {name: [value.astype(np.float32) for value in values] for name, values in made.items()}


def exported_gradients(trainer: Any) -> dict[str, Any]:
    """Reduced gradients under their checkpoint names: put where the weights are for as long as an export takes."""
    import torch

    from verifier.megatron.optimizer_megatron import named_gradients

    found = {(chunk, name): tensor for chunk, name, tensor in named_gradients(trainer)}
    held = []
    for at, chunk in enumerate(trainer.chunks):
        for name, parameter in chunk.named_parameters():
            held.append((parameter, parameter.data))
            parameter.data = found.pop((at, name.replace("module.", "")))
    assert not found
    weights = trainer.bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False)
    with torch.no_grad():
        exported = {name: tensor.clone() for name, tensor in weights if not name.endswith("e_score_correction_bias")}
    for parameter, data in held:
        parameter.data = data
    return exported


@contextlib.contextmanager
def _planted(bug: str | None) -> Iterator[None]:
    """A bug to be seen: a sequence's mean over the tokens of one context-parallel shard alone."""
    from verifier.megatron import policy_loss_megatron

    if bug == "mean of a shard":
        right = policy_loss_megatron._sequence_mean

        def wrong(values_T: Any, mask_T: Any, shard: Any) -> Any:
            return right(values_T, mask_T, replace(shard, alignment=replace(shard.alignment, cp=1)))

        policy_loss_megatron._sequence_mean = wrong
    yield


def steps(context: RankContext) -> dict[str, Any]:
    """Loss, facts and gradients of each recipe at the same weights, then steps by the first recipe.

    Rank 0 writes the gradients of recipe N to N.safetensors, and gradients and weights of the steps.
    """
    from safetensors.torch import save_file

    from verifier.algorithms.registry import LossOptions
    from verifier.config.megatron import MegatronOptions
    from verifier.export.gather_megatron import export
    from verifier.megatron import optimizer_megatron, step_megatron
    from verifier.megatron.policy_loss_megatron import LossMeter, policy_loss
    from verifier.model.provider_megatron import build
    from verifier.trainer.state_megatron import data_parallel_of

    args = context.args
    mesh = Mesh(**args["mesh"])
    data_parallel = data_parallel_of(MegatronOptions())
    built = build(args["checkpoint"], mesh, dtype="float32", tier="cpu", data_parallel=data_parallel)
    rollouts, scores, folder = batch(), Path(args["scores"]), Path(args["folder"])
    if not scores.exists():
        np.savez(scores, *[row.numpy() for row in step_megatron.score(built, rollouts)])
    with np.load(scores) as file:
        scored = [file[name] for name in file.files]

    def keep(name: str, tensors: dict[str, Any]) -> None:
        if context.rank == 0:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")

    def given(recipe: dict[str, Any], meter: LossMeter) -> dict[str, Any]:
        policy = recipe["loss"] != "cross_entropy"
        terms = LossOptions(kl_weight=0.1 if policy else 0.0, entropy_weight=0.01 if policy else 0.0)
        size = {"max_tokens": recipe["max_tokens"]} if "max_tokens" in recipe else {"micro_batch_size": recipe["count"]}
        every = columns(rollouts, scored, recipe["how"])
        used = every if policy else {"weight": every["weight"]}
        return {"loss": policy_loss(recipe["loss"], terms, meter), "columns": used, **size}

    results = []
    with _planted(args.get("bug")):
        for number, recipe in enumerate(args["recipes"]):
            meter = LossMeter()
            with step_megatron.recomputed(built, on=recipe.get("recompute", False)):
                done = step_megatron.backward(built, rollouts, **given(recipe, meter))
            at = mesh.coordinate(context.rank)
            facts = meter.read(counts=at.tp == 0, device=step_megatron.device_of(built))
            keep(str(number), exported_gradients(built))
            results.append({"loss": done.loss, "num_tokens": done.num_tokens, **facts})

    settings = optimizer_megatron.StepSettings(**SETTINGS)
    optimizer = optimizer_megatron.make_optimizer(built, rule=settings)
    scheduler = optimizer_megatron.make_step_scheduler(optimizer, settings)
    keep("weights 0", {name: tensor.clone() for name, tensor in export(built)})
    norms = []
    for step in range(STEPS):
        taken: dict[str, Any] = {}
        result = step_megatron.train_step(
            built, optimizer, rollouts, **given(args["recipes"][0], LossMeter()), scheduler=scheduler,
            scheduler_step=1, on_gradients=lambda taken=taken: taken.update(exported_gradients(built)),
        )  # fmt: skip
        norms.append(result.grad_norm)
        keep(f"gradients {step}", taken)
        keep(f"weights {step + 1}", {name: tensor.clone() for name, tensor in export(built)})
    return {"recipes": results, "norms": norms}
