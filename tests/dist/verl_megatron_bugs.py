"""Bugs that test_verl_megatron.py plants in verl's Megatron engine, and a script that runs the loop with each.

`python verl_megatron_bugs.py CHECKPOINT FOLDER SETTINGS NAME...` leaves FOLDER/NAME for each, SETTINGS in JSON by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from planted_bugs import run_planted
from verl_megatron import MegatronLoop, model_forward, train, transformer_impl

Patch = pytest.MonkeyPatch
ENGINE = transformer_impl.MegatronEngineWithLMHead


def scaled_by_micro_batches(patch: Patch) -> None:
    """The loss is not multiplied by the number of micro-batches, by which Megatron's schedule divides it."""
    real = ENGINE.postprocess_micro_batch_func

    def wrong(self: Any, output: Any, data: Any, **told: Any) -> Any:
        loss, found = real(self, output, data, **told)
        return loss / data["num_micro_batch"], found

    patch.setattr(ENGINE, "postprocess_micro_batch_func", wrong)


def temperature_left_out(patch: Patch) -> None:
    """The trainer scores at a temperature of 1."""
    real = ENGINE._lm_head_logits_processor
    patch.setattr(
        ENGINE,
        "_lm_head_logits_processor",
        lambda self, logits, label, temperature, **told: real(
            self, logits, label, torch.ones_like(temperature), **told
        ),
    )


def packed(change: Callable[..., Any], **changed: Any) -> Callable[[Patch], None]:
    """A bug in how sequences are packed in training."""

    def plant(patch: Patch) -> None:
        real = model_forward.preprocess_thd_engine

        def wrong(given: Any, **told: Any) -> Any:
            if not torch.is_grad_enabled():
                return real(given, **told)
            rows, pack, positions = real(given, **{**told, **changed})
            return change(rows, pack), pack, positions

        patch.setattr(model_forward, "preprocess_thd_engine", wrong)

    return plant


def told_shorter(rows: Any, pack: Any) -> Any:
    """Kernels are told that the longest sequence of keys is a token shorter; those of the CPU tier do not read it."""
    pack.max_seqlen_kv -= 1
    return rows


def gradients_of_the_last(patch: Patch) -> None:
    """Gradient buffers are zeroed before each micro-batch."""
    real = ENGINE.forward_step

    def wrong(self: Any, *args: Any, **told: Any) -> Any:
        if torch.is_grad_enabled():
            self.optimizer_zero_grad()
        return real(self, *args, **told)

    patch.setattr(ENGINE, "forward_step", wrong)


def not_clipped(patch: Patch) -> None:
    """The norm is reported, and no gradient is clipped by it."""
    patch.setattr("megatron.core.optimizer.optimizer.clip_grad_by_total_norm_fp32", lambda *_, **__: None)


def names_swapped(patch: Patch) -> None:
    """Keys and values of attention are sent under each other's name."""
    real = ENGINE.get_per_tensor_param
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def wrong(self: Any, **told: Any) -> Any:
        sent, adapter = real(self, **told)
        named = ((name, next((at for at in other if at in name), ""), tensor) for name, tensor in sent)
        return ((name.replace(at, other[at]) if at else name, tensor) for name, at, tensor in named), adapter

    patch.setattr(ENGINE, "get_per_tensor_param", wrong)


def sent_once(patch: Patch) -> None:
    """Each sync sends what the first one has sent."""
    real, kept = ENGINE.get_per_tensor_param, dict[str, torch.Tensor]()

    def wrong(self: Any, **told: Any) -> Any:
        if not kept:
            kept.update((name, tensor.clone()) for name, tensor in real(self, **told)[0])
        return iter(kept.items()), None

    patch.setattr(ENGINE, "get_per_tensor_param", wrong)


def old_of_the_update(patch: Patch) -> None:
    """The ratio is to log-probabilities of the model as it is trained, not as it was before the step."""
    from verl.trainer.ppo import core_algos

    real = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    patch.setitem(
        core_algos.POLICY_LOSS_REGISTRY,
        "vanilla",
        lambda **given: real(**{**given, "old_log_prob": given["log_prob"].detach()}),
    )


def not_finalized(patch: Patch) -> None:
    """Megatron is not told what reduces gradients once the backward passes have ended."""
    real = transformer_impl.register_megatron_training_hooks

    def wrong(model: Any, optimizer: Any) -> None:
        real(model, optimizer)
        for chunk in model:
            chunk.config.finalize_model_grads_func = None

    patch.setattr(transformer_impl, "register_megatron_training_hooks", wrong)


def not_gathered(patch: Patch) -> None:
    """Each rank steps its part of the weights and keeps the others' as they were."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patch.setattr(DistributedOptimizer, "start_param_sync_for_bucket_group_subset", lambda self: None)


def tokens_of_the_rank(patch: Patch) -> None:
    """The mean is over the tokens of the rank's own rows."""
    real = ENGINE.prepare_model_inputs

    def wrong(self: Any, batch: Any) -> Any:
        from verl.utils import tensordict_utils

        tensordict_utils.assign_non_tensor(batch, dp_size=1)
        return real(self, batch)

    patch.setattr(ENGINE, "prepare_model_inputs", wrong)


BUGS: dict[str, Callable[[Patch], None]] = {
    "scaled by micro-batches": scaled_by_micro_batches, "temperature left out": temperature_left_out,
    "labels not rolled": packed(lambda rows, pack: rows, need_roll=False),
    "longest sequence told shorter": packed(told_shorter), "gradients of the last micro-batch": gradients_of_the_last,
    "norm reported, not clipped": not_clipped, "keys sent as values": names_swapped, "sent once": sent_once,
    "old of the update": old_of_the_update, "gradients not reduced": not_finalized,
    "weights not gathered": not_gathered,
    "mean not multiplied by the ranks": tokens_of_the_rank,
}  # fmt: skip


if __name__ == "__main__":
    run_planted(partial(train, kind=MegatronLoop), BUGS, *sys.argv[1:])
