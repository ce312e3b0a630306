"""Bugs that tests/dist/test_verl.py plants in verl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Plant = Callable[[pytest.MonkeyPatch], None]


def responses_cut_late(patch: pytest.MonkeyPatch) -> None:
    """The loss has the log-probabilities of the token after each."""
    from verl.workers.utils import losses

    real = losses.no_padding_2_padding

    def wrong(tensor: torch.Tensor, data: Any) -> torch.Tensor:
        values = tensor.values() if tensor.is_nested else tensor
        ends = data["input_ids"].offsets()
        return real(torch.nested.nested_tensor_from_jagged(values.roll(-1, 0), ends), data)

    patch.setattr(losses, "no_padding_2_padding", wrong)


def rows_not_restored(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities stay in the order of the micro-batches."""
    from verl.workers.engine import utils

    patch.setattr(utils, "restore_dynamic_batch", lambda data, indices: data)


def stale_old(patch: pytest.MonkeyPatch) -> None:
    """The log-probabilities before the step are those of the batch before."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    real, kept = RayPPOTrainer._compute_old_log_prob, []

    def wrong(self: Any, batch: Any) -> Any:
        kept.append(real(self, batch))
        found, flops = kept[-1]
        if len(kept) > 1:
            found.batch["old_log_probs"] = kept[-2][0].batch["old_log_probs"].clone()
        return found, flops

    patch.setattr(RayPPOTrainer, "_compute_old_log_prob", wrong)


def groups_of_others(patch: pytest.MonkeyPatch) -> None:
    """Advantages are those of groups that begin a row later."""
    import numpy as np
    from verl.trainer.ppo import core_algos

    real = core_algos.compute_grpo_outcome_advantage
    patch.setattr(
        core_algos, "compute_grpo_outcome_advantage", lambda index, **told: real(index=np.roll(index, 1), **told)
    )


def penalty_of_the_other_sign(patch: pytest.MonkeyPatch) -> None:
    """A KL in the loss that drives away from the reference."""
    from verl.workers.utils import losses

    real = losses.kl_penalty
    patch.setattr(
        losses,
        "kl_penalty",
        lambda logprob, ref_logprob, kl_penalty: real(2 * ref_logprob - logprob, ref_logprob, kl_penalty),
    )


def policy(change: Callable[[dict[str, Any]], None], name: str = "vanilla") -> Plant:
    """A bug in what a policy loss of verl reads."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        import verl_loop  # noqa: F401 - which sets verl's platform
        from verl.trainer.ppo import core_algos

        real = core_algos.POLICY_LOSS_REGISTRY[name]

        def wrong(**given: Any) -> Any:
            change(given)
            return real(**given)

        patch.setitem(core_algos.POLICY_LOSS_REGISTRY, name, wrong)

    return plant


def no_dual_clip(given: dict[str, Any]) -> None:
    import copy

    given["config"] = copy.copy(given["config"])
    object.__setattr__(given["config"], "clip_ratio_c", 100.0)


def mean(**changed: Any) -> Plant:
    """A bug in the denominators of verl's means."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from verl.trainer.ppo import core_algos
        from verl.workers.utils import losses

        real = core_algos.agg_loss

        def wrong(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **told: Any) -> Any:
            return real(loss_mat, loss_mask, loss_agg_mode, **{**told, **changed})

        for module in (core_algos, losses):
            patch.setattr(module, "agg_loss", wrong)

    return plant


def sent_before_the_last_step(patch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    real, kept = FSDPEngine.optimizer_step, {}

    def step(self: Any) -> Any:
        kept.update((name, value.full_tensor().clone()) for name, value in self.module.state_dict().items())
        return real(self)

    given = FSDPEngine.get_per_tensor_param
    patch.setattr(FSDPEngine, "optimizer_step", step)
    patch.setattr(
        FSDPEngine,
        "get_per_tensor_param",
        lambda self, **told: (iter(kept.items()), None) if kept else given(self, **told),
    )


def positions_of_the_pack(patch: pytest.MonkeyPatch) -> None:
    """Positions count on over the sequences of a pack, in training."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    real = FSDPEngineWithLMHead.prepare_model_inputs

    def wrong(self: Any, micro_batch: Any) -> Any:
        inputs, told = real(self, micro_batch)
        if torch.is_grad_enabled():
            inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1])[None]
        return inputs, told

    patch.setattr(FSDPEngineWithLMHead, "prepare_model_inputs", wrong)


def labels_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """Each place is to predict the token before it, in training."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    real = FSDPEngineWithLMHead.prepare_model_inputs

    def wrong(self: Any, micro_batch: Any) -> Any:
        inputs, told = real(self, micro_batch)
        if torch.is_grad_enabled():
            told["input_ids_rmpad_rolled"] = inputs["input_ids"][0].roll(1)
        return inputs, told

    patch.setattr(FSDPEngineWithLMHead, "prepare_model_inputs", wrong)


def micro_batch_dropped(patch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    real = transformer_impl.prepare_micro_batches

    def wrong(**told: Any) -> Any:
        parts, indices = real(**told)
        return (parts[:-1] if torch.is_grad_enabled() else parts), indices

    patch.setattr(transformer_impl, "prepare_micro_batches", wrong)


def gradients_of_the_last(patch: pytest.MonkeyPatch) -> None:
    """Gradients are zeroed before each micro-batch."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    real = FSDPEngineWithLMHead.forward_step

    def wrong(self: Any, *args: Any, **told: Any) -> Any:
        self.optimizer_zero_grad()
        return real(self, *args, **told)

    patch.setattr(FSDPEngineWithLMHead, "forward_step", wrong)


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    """The norm is reported, and no gradient is clipped by it."""
    from verl.workers.engine.fsdp import transformer_impl

    real = transformer_impl.fsdp2_clip_grad_norm_
    patch.setattr(transformer_impl, "fsdp2_clip_grad_norm_", lambda given, max_norm: real(given, 1e9))


def scheduler_each_step(patch: pytest.MonkeyPatch) -> None:
    """The schedule counts mini-batches."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    real = FSDPEngine.optimizer_step

    def step(self: Any) -> Any:
        norm = real(self)
        self.lr_scheduler.step()
        return norm

    patch.setattr(FSDPEngine, "optimizer_step", step)


def temperature_left_out(patch: pytest.MonkeyPatch) -> None:
    """The trainer scores at a temperature of 1."""
    from verl.workers.engine.fsdp import transformer_impl

    patch.setattr(transformer_impl, "_scale_logits_by_temperature", lambda logits, *_, **__: logits)


def weights_of_the_inverse(patch: pytest.MonkeyPatch) -> None:
    """Importance weights are engine over trainer."""
    from verl.trainer.ppo import rollout_corr_helper

    real = rollout_corr_helper.compute_rollout_correction_weights
    patch.setattr(
        rollout_corr_helper,
        "compute_rollout_correction_weights",
        lambda log_ratio, **told: real(log_ratio=-log_ratio, **told),
    )


def rejection(change: Callable[..., torch.Tensor]) -> Plant:
    """A bug in which tokens stay."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from verl.trainer.ppo import rollout_corr_helper

        real = rollout_corr_helper.compute_rollout_rejection_mask

        def wrong(log_ratio: torch.Tensor, response_mask: torch.Tensor, **told: Any) -> Any:
            kept, metrics = real(log_ratio=log_ratio, response_mask=response_mask, **told)
            other, _ = real(log_ratio=-log_ratio, response_mask=response_mask, **told)
            return change(response_mask, kept, other), metrics

        patch.setattr(rollout_corr_helper, "compute_rollout_rejection_mask", wrong)

    return plant


def scaled_by_root(patch: pytest.MonkeyPatch) -> None:
    """The forward pass scales the adapter by the root of its rank: 8 / 2 for 8 / 4."""
    from peft.tuners.lora import layer

    real = layer.LoraLayer.update_layer

    def wrong(self: Any, *args: Any, **told: Any) -> Any:
        found = real(self, *args, **told)
        self.scaling["default"] *= 2
        return found

    patch.setattr(layer.LoraLayer, "update_layer", wrong)


def adapter_before_the_last_step(patch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    real, kept = transformer_impl.collect_lora_params, []

    def wrong(module: Any, base_sync_done: bool, **told: Any) -> Any:
        found = real(module=module, base_sync_done=base_sync_done, **told)
        if base_sync_done:
            kept.append({name: item.clone() for name, item in found.items()})
            return kept[max(len(kept) - 2, 0)]
        return found

    patch.setattr(transformer_impl, "collect_lora_params", wrong)


def adapter_of_the_other_side(patch: pytest.MonkeyPatch) -> None:
    """The rows of each inward matrix are sent in reverse."""
    from verl.workers.engine.fsdp import transformer_impl

    real = transformer_impl.collect_lora_params

    def wrong(**told: Any) -> Any:
        found = real(**told)
        return {name: item.flip(0) if "lora_A" in name else item for name, item in found.items()}

    patch.setattr(transformer_impl, "collect_lora_params", wrong)


def prompts_trained(patch: pytest.MonkeyPatch) -> None:
    """The loss mask of an example has its question, too."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    real = MultiTurnSFTDataset.__getitem__

    def wrong(self: Any, item: int) -> Any:
        found = real(self, item)
        return {**found, "loss_mask": torch.ones_like(found["loss_mask"])}

    patch.setattr(MultiTurnSFTDataset, "__getitem__", wrong)


def end_untrained(patch: pytest.MonkeyPatch) -> None:
    """The last token of an example is out of the loss mask."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    real = MultiTurnSFTDataset.__getitem__

    def wrong(self: Any, item: int) -> Any:
        found = real(self, item)
        found["loss_mask"][-1] = 0
        return found

    patch.setattr(MultiTurnSFTDataset, "__getitem__", wrong)


def sft_loss(change: Callable[[dict[str, Any], Any], None]) -> Plant:
    """A bug in what verl's loss of fine-tuning reads."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from verl.workers.utils import losses

        real = losses.sft_loss

        def wrong(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            change(model_output, data)
            return real(config, model_output, data, dp_group)

        patch.setattr(losses, "sft_loss", wrong)

    return plant


def mask_not_shifted(model_output: dict[str, Any], data: Any) -> None:
    rolled = data["loss_mask"].values().roll(1)
    data["loss_mask"] = torch.nested.nested_tensor_from_jagged(rolled, data["loss_mask"].offsets())


def tokens_of_the_micro_batch(model_output: dict[str, Any], data: Any) -> None:
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, batch_num_tokens=int(data["loss_mask"].values().sum()))
