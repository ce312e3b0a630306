"""Bugs that test_skyrl.py and test_skyrl_megatron.py plant in SkyRL, and a script that runs a loop with each.

`python skyrl_bugs.py LOOP CHECKPOINT FOLDER SETTINGS NAME...` leaves FOLDER/NAME for each, SETTINGS in JSON by name.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

import pytest
import torch
from planted_bugs import Plant, replaced, run_planted

BACKEND = "skyrl.backends.skyrl_train"
PPO, WORKER, TRAINER = f"{BACKEND}.utils.ppo_utils", f"{BACKEND}.workers.worker", "skyrl.train.trainer"
FSDP, STRATEGY = f"{BACKEND}.workers.fsdp.fsdp_worker", f"{BACKEND}.distributed.fsdp_strategy"
WRAPPER = f"{BACKEND}.workers.megatron.megatron_model_wrapper"
MEGATRON = f"{BACKEND}.workers.megatron.megatron_worker"


def _groups(real: Any) -> Any:
    return lambda index, **told: real(index=[*index[-1:], *index[:-1]], **told)


def _legacy(real: Any) -> Any:
    return lambda loss_reduction, **told: real(loss_reduction="token_mean_legacy", **told)


def _stale(real: Any) -> Any:
    kept: list[Any] = []

    def wrong(*args: Any, **told: Any) -> Any:
        kept.append(real(*args, **told))
        width = kept[-1].shape[1]
        return torch.nn.functional.pad(kept[0], (width, 0))[:, -width:]

    return wrong


def _cold(real: Any) -> Any:
    return lambda *args, **told: real(*args, **{**told, "temperature": 1.0})


def _swapped(real: Any) -> Any:
    return lambda logprobs, base, **told: real(logprobs, 2 * logprobs - base, **told)


def _alone(real: Any) -> Any:
    def wrong(self: Any, loss: Any, model: Any, optimizer: Any, **told: Any) -> None:
        optimizer.zero_grad()
        real(self, loss, model, optimizer, **told)

    return wrong


def _dropped(real: Any) -> Any:
    def wrong(data: Any, **told: Any) -> Any:
        found = real(data, **told)
        if torch.is_grad_enabled():
            found._chunks = found._chunks[:-1]
        return found

    return wrong


def _inverse(real: Any) -> Any:
    return lambda old, engine, *args, **told: real(2 * engine - old, engine, *args, **told)


def _from_the_left(real: Any) -> Any:
    def wrong(pad: int, prompts: Any, responses: Any, *args: Any, **told: Any) -> Any:
        found = list(real(pad, prompts, responses, *args, **told))
        found[5] = torch.stack([row.roll(len(own)) for row, own in zip(found[5], responses, strict=True)])
        return tuple(found)

    return wrong


def _before(real: Any) -> Any:
    kept: list[Any] = []

    def wrong(*args: Any) -> Any:
        kept.append([*real(*args)])
        for chunk in kept[-1]:
            chunk.tensors = [tensor.clone() for tensor in chunk.tensors]
        yield from kept[max(len(kept) - 2, 0)]

    return wrong


def _ranks_forgotten(patch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module(WORKER).PolicyWorkerBase
    real = owner._forward_backward_micro

    def wrong(self: Any, *args: Any, **told: Any) -> Any:
        own, self.mesh_rank = self.mesh_rank, type(self.mesh_rank)(0, 0, 0, 0, 1, 1, 1)
        try:
            return real(self, *args, **told)
        finally:
            self.mesh_rank = own

    patch.setattr(owner, "_forward_backward_micro", wrong)


FSDP_BUGS: dict[str, Plant] = {
    "groups of others": replaced(PPO, "compute_advantages_and_returns", _groups),
    "mean of the micro-batches' means": replaced(TRAINER, "apply_loss_reduction_to_advantages_minibatch", _legacy),
    "old of the first batch": replaced(TRAINER, "RayPPOTrainer._execute_forward_pass", _stale),
    "temperature left out": replaced(FSDP, "HFModelWrapper.forward", _cold),
    "no dual clip": replaced(PPO, "torch.where", lambda real: lambda condition, *sides: sides[-1]),
    "KL of the other sign": replaced(WORKER, "compute_approx_kl", _swapped),
    "gradients of the last micro-batch": replaced(STRATEGY, "FSDPStrategy.backward", _alone),
    "micro-batch dropped": replaced(WORKER, "get_microbatch_iterator", _dropped),
    "weights of the inverse ratio": replaced(
        f"{BACKEND}.utils.off_policy_correction_utils", "compute_tis_ratio", _inverse
    ),
    "engine's log-probabilities from the left": replaced(
        TRAINER, "convert_prompts_responses_to_batch_tensors", _from_the_left
    ),
    "norm reported, not clipped": replaced(
        STRATEGY, "fsdp2_clip_grad_norm_", lambda real: lambda weights, **_: real(weights, max_norm=1e9)
    ),
    "sent before the last step": replaced(FSDP, "FSDPWeightExtractor.extract_weights", _before),
    "mean not multiplied by the ranks": _ranks_forgotten,
}  # fmt: skip


def _unscaled(real: Any) -> Any:
    def wrong(self: Any, micro_batches: Any, **told: Any) -> Any:
        return real(self, micro_batches=[{**item, "num_microbatches": 1} for item in micro_batches], **told)

    return wrong


def _told_shorter(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        rows, pack = real(*args, **told)
        if torch.is_grad_enabled():
            pack.max_seqlen_q -= 1
        return rows, pack

    return wrong


def _rolled(real: Any) -> Any:
    return lambda *args, **told: real(*args, **told).roll(1 if torch.is_grad_enabled() else 0, 1)


def _keys_for_values(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        held = dict(real(*args, **told))
        for name, tensor in held.items():
            yield name, held[name.replace("v_proj", "k_proj")] if "v_proj" in name else tensor

    return wrong


MEGATRON_BUGS: dict[str, Plant] = {
    "scaled by micro-batches": replaced(WRAPPER, "MegatronModelWrapper.forward_backward_mini_batch", _unscaled),
    "temperature left out": replaced(WRAPPER, "MegatronModelWrapper.forward", _cold),
    "longest sequence told shorter": replaced(WRAPPER, "preprocess_packed_seqs", _told_shorter),
    "targets of the token before": replaced(WRAPPER, "_build_packed_targets", _rolled),
    "KL of the other sign": replaced(WRAPPER, "compute_approx_kl", _swapped),
    "gradients never zeroed": replaced(
        "megatron.core.distributed", "DistributedDataParallel.zero_grad_buffer", lambda real: lambda self: None
    ),
    "norm reported, not clipped": replaced(
        "megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", lambda real: lambda *_, **__: None
    ),
    "keys sent as values": replaced("megatron.bridge", "AutoBridge.export_hf_weights", _keys_for_values),
    "sent before the last step": replaced(MEGATRON, "MegatronWeightExtractor.extract_weights", _before),
    "mean not multiplied by the ranks": replaced(
        WRAPPER, "mpu.get_data_parallel_world_size",
        lambda real: lambda *args, **told: 1 if sys._getframe(1).f_code.co_name == "loss_func" else real(*args, **told),
    ),
    "gradients not reduced": replaced(
        WRAPPER, "MegatronModelWrapper.run_pending_grad_sync", lambda real: lambda self: None
    ),
}  # fmt: skip


def main(loop: str, *told: str) -> None:
    """Run a loop once for each name, with its bug if it is one's."""
    module = importlib.import_module(loop)
    kind, bugs = (module.MegatronLoop, MEGATRON_BUGS) if loop == "skyrl_megatron" else (module.Loop, FSDP_BUGS)
    run_planted(partial(module.train, kind=kind), bugs, *told)


if __name__ == "__main__":
    main(*sys.argv[1:])
