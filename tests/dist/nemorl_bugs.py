"""Bugs that tests/dist/test_nemorl.py plants in NeMo-RL."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

Plant = Callable[[pytest.MonkeyPatch], None]


def replaced(module: str, name: str, made: Callable[[Any], Any]) -> Plant:
    """A bug in one function of NeMo-RL: `made` of the right one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        owner = importlib.import_module(module)
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        last = name.rsplit(".", 1)[-1]
        patch.setattr(owner, last, made(getattr(owner, last)))

    return plant


PASSES, WORKER = "nemo_rl.models.automodel.train", "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"
LOSSES, ESTIMATOR = "nemo_rl.algorithms.loss.loss_functions", "nemo_rl.algorithms.advantage_estimator"


def _labels(real: Any) -> Any:
    return lambda input_ids, **told: real(input_ids=input_ids.roll(1, 1), **told)


def _dropped(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        found, count = real(*args, **told)
        return (itertools.islice(found, count - 1), count - 1) if torch.is_grad_enabled() else (found, count)

    return wrong


def _stale(real: Any) -> Any:
    kept: list[Any] = []

    def wrong(self: Any, data: Any, **told: Any) -> Any:
        kept.append(real(self, data, **told))
        found = type(kept[-1])(kept[-1])
        size = found["logprobs"].shape
        found["logprobs"] = torch.nn.functional.pad(kept[0]["logprobs"], (0, size[1]))[:, : size[1]]
        return found

    return wrong


def _groups(real: Any) -> Any:
    return lambda self, prompt_ids, **told: real(self, prompt_ids=prompt_ids.roll(1, 0), **told)


def _local(real: Any) -> Any:
    def wrong(values: Any, mask: Any, dim: Any = None, global_normalization_factor: Any = None) -> Any:
        return real(values, mask, dim=dim)

    return wrong


def _unbounded(real: Any) -> Any:
    def wrong(self: Any, cfg: Any, **told: Any) -> None:
        real(self, cfg, **told)
        self.ratio_clip_c = None

    return wrong


def _swapped(real: Any) -> Any:
    def wrong(logprobs: Any, logprobs_reference: Any, **told: Any) -> Any:
        return real(logprobs=logprobs, logprobs_reference=2 * logprobs - logprobs_reference, **told)

    return wrong


def _alone(real: Any) -> Any:
    def wrong(model: Any, *args: Any, **told: Any) -> Any:
        model.zero_grad()
        return real(model, *args, **told)

    return wrong


def _inverse(real: Any) -> Any:
    def wrong(self: Any, next_token_logprobs: Any, data: Any, **told: Any) -> Any:
        other = {**data, "generation_logprobs": 2 * data["prev_logprobs"] - data["generation_logprobs"]}
        return real(self, next_token_logprobs=next_token_logprobs, data=other, **told)

    return wrong


def _before(real: Any) -> Any:
    kept: list[Any] = []

    def wrong(*args: Any) -> Any:
        kept.append([(name, item.clone()) for name, item in real(*args)])
        yield from kept[max(len(kept) - 2, 0)]

    return wrong


labels_rolled_back = replaced("nemo_rl.algorithms.loss.utils", "get_next_token_logprobs_from_logits", _labels)
micro_batch_dropped = replaced(WORKER, "get_microbatch_iterator", _dropped)
stale_old = replaced(WORKER, "DTensorPolicyWorkerV2Impl.get_logprobs", _stale)
temperature_left_out = replaced(PASSES, "apply_temperature_scaling", lambda real: lambda logits, _: logits)
groups_of_others = replaced(ESTIMATOR, "GRPOAdvantageEstimator.compute_advantage", _groups)
mean_of_means = replaced(LOSSES, "masked_mean", _local)
no_dual_clip = replaced(LOSSES, "ClippedPGLossFn.__init__", _unbounded)
penalty_of_the_other_sign = replaced(LOSSES, "calculate_kl", _swapped)
gradients_of_the_last = replaced(PASSES, "model_forward", _alone)
weights_of_the_inverse = replaced(LOSSES, "ClippedPGLossFn.__call__", _inverse)
not_clipped = replaced(WORKER, "scale_grads_and_clip_grad_norm", lambda real: lambda _, *a, **k: real(1e9, *a, **k))
sent_before_the_last_step = replaced(WORKER, "dtensor_params_generator", _before)
