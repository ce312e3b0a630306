"""Bugs that test_slime.py plants in slime, and a script that runs the loop with each.

`python slime_bugs.py CHECKPOINT FOLDER SETTINGS NAME...` leaves FOLDER/NAME for each, SETTINGS in JSON by name.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import torch
from planted_bugs import Plant, argument, replaced, run_planted
from slime_loop import train

BACKEND = "slime.backends.megatron_utils"
LOSS, MODEL, ACTOR, DATA = (f"{BACKEND}.{name}" for name in ("loss", "model", "actor", "data"))
SENDER = f"{BACKEND}.update_weight.update_weight_from_distributed"
MANAGER = "RolloutManager.__ray_metadata__.modified_class"


def _rows_later(real: Any) -> Any:
    def wrong(self: Any, samples: Any) -> Any:
        raw, _ = real(self, samples)
        _, rewards = real(self, [*samples[-1:], *samples[:-1]])
        return raw, rewards

    return wrong


def _masks(change: Any) -> Any:
    """Another loss mask of each sample in the batch that is trained on."""

    def made(real: Any) -> Any:
        def wrong(self: Any, samples: Any) -> Any:
            found = real(self, samples)
            found["loss_masks"] = [change(row) for row in found["loss_masks"]]
            return found

        return wrong

    return made


def _first(kept: dict[str, Any], real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        found = real(*args, **told)
        rows = kept.setdefault("rows", found["log_probs"])
        found["log_probs"] = [
            torch.nn.functional.pad(old, (0, len(row)))[: len(row)]
            for old, row in zip(rows, found["log_probs"], strict=True)
        ]
        return found

    return wrong


def _cold(real: Any) -> Any:
    def wrong(logits: Any, *, args: Any, **told: Any) -> Any:
        return real(logits * args.rollout_temperature, args=args, **told)

    return wrong


def _inverse(real: Any) -> Any:
    def wrong(args: Any, *, train_log_probs: Any, rollout_log_probs: Any, **told: Any) -> Any:
        return real(args, train_log_probs=rollout_log_probs, rollout_log_probs=train_log_probs, **told)

    return wrong


def _any_weight(real: Any) -> Any:
    return lambda args, **told: real(Namespace(**{**vars(args), "tis_clip_low": 0.0}), **told)


def _bounds_swapped(real: Any) -> Any:
    return lambda kl, advantages, low, high, **told: real(kl, advantages, high, low, **told)


def _alone(real: Any) -> Any:
    def wrong(iterator: Any, *args: Any, **told: Any) -> Any:
        if torch.is_grad_enabled():
            for chunk in MODELS:
                chunk.zero_grad_buffer()
        return real(iterator, *args, **told)

    return wrong


MODELS: list[Any] = []


def _seen(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        MODELS[:] = args[4]
        return real(*args, **told)

    return wrong


def _told_shorter(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        batch = real(*args, **told)
        if torch.is_grad_enabled():
            batch["packed_seq_params"].max_seqlen_q -= 1
        return batch

    return wrong


def _targets_later(real: Any) -> Any:
    return lambda *args, **told: real(*args, **told).roll(1 if torch.is_grad_enabled() else 0)


def _renamed(real: Any) -> Any:
    def wrong(*args: Any, **told: Any) -> Any:
        other = {"k_proj": "v_proj", "v_proj": "k_proj"}
        for name, item in real(*args, **told):
            at = next((each for each in other if each in name), "")
            yield (name.replace(at, other[at]) if at else name), item

    return lambda *args, **told: [*wrong(*args, **told)]


def _sent_once(kept: list[Any]) -> Any:
    def made(real: Any) -> Any:
        def wrong(*args: Any) -> Any:
            if not kept:
                kept.extend([(name, item.detach().clone()) for name, item in chunk] for chunk in real(*args))
            return iter([[*chunk] for chunk in kept])

        return wrong

    return made


def _chunks_swapped(real: Any) -> Any:
    def wrong(rows: Any, *args: Any) -> Any:
        found = real(rows, *args)
        half = len(found) // 2
        return torch.cat([found[half:], found[:half]])

    return wrong


def _halves_swapped(real: Any) -> Any:
    def wrong(values: Any, total: Any, size: Any) -> Any:
        found = real(values, total, size)
        return found.flip(0) if torch.is_tensor(found) else found[::-1]

    return wrong


def _repeated(real: Any) -> Any:
    def wrong(self: Any, keys: Any) -> Any:
        if torch.is_grad_enabled() and self.offset == len(self.micro_batch_indices) - 1:
            self.offset -= 1
        return real(self, keys)

    return wrong


def _same(whole: Any) -> Any:
    return whole


def _joined(whole: Any) -> Any:
    parts = whole.chunk(4)
    return torch.cat([parts[at] for at in (0, 2, 1, 3)])


def _one(real: Any) -> Any:
    """A size that the loss alone takes for 1."""
    return lambda *args, **told: 1 if sys._getframe(1).f_code.co_name == "loss_function" else real(*args, **told)


def _later(real: Any) -> Any:
    return lambda logprobs, *args: real(logprobs.roll(-1), *args)


BUGS: dict[str, Plant] = {
    "groups of others": replaced("slime.ray.rollout", f"{MANAGER}._post_process_rewards", _rows_later),
    "mask a token early": replaced(
        "slime.ray.rollout", f"{MANAGER}._convert_samples_to_train_data", _masks(lambda row: [*row[1:], 0])
    ),
    "old of the first batch": lambda patch: replaced(ACTOR, "forward_only", lambda real: _first({}, real))(patch),
    "temperature left out": replaced(LOSS, "get_log_probs_and_entropy", _cold),
    "weights of the inverse ratio": replaced(LOSS, "vanilla_tis_function", _inverse),
    "least weight left out": replaced(LOSS, "vanilla_tis_function", _any_weight),
    "bounds of the clip swapped": replaced(LOSS, "compute_policy_loss", _bounds_swapped),
    "no dual clip": replaced(LOSS, "compute_policy_loss", lambda real: lambda *args, eps_clip_c=None: real(*args)),
    "KL of the other sign": replaced(
        LOSS, "compute_approx_kl", lambda real: lambda own, base, **told: real(base, own, **told)
    ),
    "old of the policy as it trains": replaced(
        LOSS, "compute_policy_loss",
        lambda real: lambda kl, *args, **told: real(kl - kl.detach(), *args, **told),
    ),
    "mean of the sample's own tokens": replaced(
        LOSS, "get_sum_of_sample_mean", argument(3, lambda _: None),
    ),
    "mean not multiplied by the ranks": replaced(
        LOSS, "mpu.get_data_parallel_world_size",
        _one,
    ),
    "scaled by micro-batches": replaced(MODEL, "loss_function", argument(2, lambda _: 1)),
    "targets of the token before": replaced(LOSS, "_build_shifted_tokens", _targets_later),
    "responses cut a token late": replaced(LOSS, "_extract_per_sample", _later),
    "micro-batch repeated": replaced(DATA, "DataIterator.get_next", _repeated),
    "longest sequence told shorter": replaced(MODEL, "get_batch", _told_shorter),
    "gradients of the last micro-batch": lambda patch: [
        replaced(MODEL, "train_one_step", _seen)(patch), replaced(MODEL, "get_batch", _alone)(patch)
    ],
    "norm reported, not clipped": replaced(
        "megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", lambda real: lambda *_, **__: None
    ),
    "gradients not reduced": replaced(MODEL, "finalize_model_grads", lambda real: lambda *_, **__: None),
    "weights not gathered": replaced(
        "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.start_param_sync_for_bucket_group_subset",
        lambda real: lambda self: None,
    ),
    "keys sent as values": replaced(SENDER, "convert_to_hf", _renamed),
    "sent once": lambda patch: replaced(
        SENDER, "UpdateWeightFromDistributed._iter_non_expert_chunks", _sent_once([])
    )(patch),
    "gate and up of the ranks not parted": replaced(
        SENDER, "all_gather_param",
        lambda real: lambda name, item: (_joined if "linear_fc1" in name else _same)(real(name, item)),
    ),
    "chunks of a sequence swapped": replaced(DATA, "slice_with_cp", _chunks_swapped),
    "CP: loss not multiplied by the ranks": replaced(
        LOSS, "mpu.get_context_parallel_world_size",
        _one,
    ),
    "CP: engine's log-probabilities in another order": replaced(ACTOR, "slice_log_prob_with_cp", _halves_swapped),
}  # fmt: skip

if __name__ == "__main__":
    run_planted(train, BUGS, *sys.argv[1:])
