"""SkyRL's trainer, FSDP workers, losses and estimators on CPU cores, recorded by `verifier.probe`.

`python skyrl_loop.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of
SkyRL's config, such as `trainer.algorithm.policy_loss_type=gspo`; in several processes each has the driver.
"""
# ruff: noqa: E402 - what SkyRL imports and nothing here calls is put in place first

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import peft  # noqa: F401 - looks for flash-attention, which stands empty from here on
import ray
import torch
import yaml
from foreign_process import join
from grpo_engines import TransformersEngine
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - the first as peft

from verifier import probe
from verifier.probe.sharded import whole

STANDS = {"flash_attn": ModuleType("flash_attn"), "flash_attn.bert_padding": MagicMock()}
"""Functions that remove padding, which flash-attention alone can attend to."""
sys.modules.update(STANDS)
from skyrl.backends.skyrl_train.distributed import dispatch, fsdp_utils
from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as correction
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.workers import worker as workers
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.backends.skyrl_train.workers.worker_utils import BaseBatchIterator
from skyrl.train import trainer as trainers
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.utils import apply_overlong_filtering

for stand in STANDS:
    del sys.modules[stand]

PROMPTS, GROUP, MOST = 4, 4, 8
ALGORITHM, OPTIMIZER = "trainer.algorithm", "trainer.policy.optimizer_config"
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
CONFIG = {
    f"{OPTIMIZER}.lr": 1e-3, f"{OPTIMIZER}.weight_decay": 0.1, "trainer.bf16": False, "trainer.flash_attn": False,
    "trainer.remove_microbatch_padding": False, "trainer.gradient_checkpointing": False,
    "trainer.policy.fsdp_config.mixed_precision": FLOAT32, "trainer.ref.fsdp_config.mixed_precision": FLOAT32,
    "trainer.train_batch_size": PROMPTS, "trainer.policy_mini_batch_size": PROMPTS, "trainer.logger": "console",
    "trainer.micro_train_batch_size_per_gpu": 4, "trainer.micro_forward_batch_size_per_gpu": 8,
    "trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False,
    "trainer.algorithm.use_kl_loss": False, "generator.n_samples_per_prompt": GROUP,
    "generator.inference_engine.model_dtype": "float32",
}  # fmt: skip
"""Settings beside SkyRL's defaults; `steps` and `sync_every`, batches that one sync serves, are those of the loop."""
STEPS = 2
EXAMPLES = [(a, b) for a in (2, 7, 11, 15) for b in (3, 21, 110, 123)]
LOSSES = {"regular": "clipped", "dual_clip": "clipped"}
"""SkyRL's name of a loss -> the probe's."""
ESTIMATORS = {
    "grpo": {"estimator": "grpo", "epsilon": 1e-6, "ddof": 1}, "rloo": {"estimator": "rloo"},
    "reinforce++": {"estimator": "reinforce++", "ddof": 1},
}  # fmt: skip
"""SkyRL's name of an estimator -> what the probe is told."""


class Cores(TorchFunctionMode):
    """Tensors that are asked for on a GPU, on CPU cores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with another device."""
        if func is torch.Tensor.cuda:
            return args[0]
        told = {key: "cpu" if value == "cuda" and key == "device" else value for key, value in (kwargs or {}).items()}
        return func(*args, **told)


@contextlib.contextmanager
def on_cores() -> Iterator[None]:
    """What SkyRL asks of GPUs and of Ray, by CPU cores and within this process."""
    made = torch.distributed.device_mesh.init_device_mesh

    def mesh(_: str, *args: Any, **told: Any) -> Any:
        return made("cpu", *args, **told)

    def gathered(found: Any) -> Any:
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, found[torch.distributed.get_rank()])
        return parts

    with (
        patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), set_device=lambda _: None),
        patch.object(torch.distributed.device_mesh, "init_device_mesh", mesh),
        patch.object(fsdp_utils, "init_device_mesh", mesh),
        patch.multiple(ray, put=lambda item: item, get=gathered),
        Cores(),
    ):
        yield


class Group:
    """What SkyRL's dispatch takes for its actors: this process's worker, and by torch.distributed the others'."""

    async_run_ray_method = workers.PPORayActorGroup.async_run_ray_method
    get_dp_size = workers.PPORayActorGroup.get_dp_size

    def __init__(self, worker: Any) -> None:
        self.worker, every = worker, [worker.mesh_rank] * worker.mesh_rank.world_size
        torch.distributed.all_gather_object(every, worker.mesh_rank)
        own = torch.distributed.get_rank()
        self.actor_infos = [
            dispatch.ActorInfo(handle=Handle(worker, rank == own), rank=place) for rank, place in enumerate(every)
        ]


class Handle:
    """A worker, whose methods are called at once if it is this process's."""

    def __init__(self, worker: Any, is_own: bool) -> None:
        self.worker, self.is_own = worker, is_own

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.worker, name)
        return SimpleNamespace(remote=lambda *args, **told: method(*args, **told) if self.is_own else None)


def made(kind: Any, config: Any, checkpoint: Path) -> Any:
    """A worker of SkyRL."""
    told = {"world_size": torch.distributed.get_world_size(), "rank": torch.distributed.get_rank(), "local_rank": 0}
    where = {"master_addr": os.environ["MASTER_ADDR"], "master_port": os.environ["MASTER_PORT"]}
    worker = kind(cfg=config.trainer, **told, **where, sequence_parallel_size=1)
    worker.init_worker_process_group()
    return worker


class Loop:
    """SkyRL's step by its own functions, with what `verifier.probe` is handed."""

    kinds = (fsdp_worker.FSDPPolicyWorkerBase, fsdp_worker.FSDPRefWorkerBase)
    defaults: Mapping[str, Any] = CONFIG
    home: Any = workers
    """Module of the terms of the loss."""

    def __init__(self, checkpoint: Path, trace: Path, settings: Mapping[str, Any]) -> None:
        self.sync_every = settings.get("sync_every", 1)
        given = {key: value for key, value in settings.items() if key != "sync_every"}
        self.config = SkyRLTrainConfig.from_cli_overrides(
            {**self.defaults, "trainer.policy.model.path": str(checkpoint), **given}
        )
        self.own, self.algorithm = self.config.trainer, self.config.trainer.algorithm
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        policy, reference = self.kinds
        self.worker = made(policy, self.config, checkpoint)
        self.worker.init_model(str(checkpoint), num_training_steps=settings.get("total", 10))
        self.worker._set_pad_token_id(self.tokenizer.pad_token_id)
        self.reference = None
        if self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward:
            self.reference = made(reference, self.config, checkpoint)
            self.reference.init_model(str(checkpoint))
        self.trainer = object.__new__(trainers.RayPPOTrainer)
        group = Group(self.worker), None, self.reference and Group(self.reference)
        self.trainer.__dict__ |= {
            "cfg": self.config, "tokenizer": self.tokenizer, "all_metrics": {}, "all_timings": {}, "global_step": 0,
            "dispatch": WorkerDispatch(self.config, *group), "critic_model": None, "ref_model": group[2],
            "reward_kl_controller": None, "policy_model": group[0],
        }  # fmt: skip
        self.sampler = TransformersEngine(checkpoint, trace, rank=self.rank)
        self.trace, self.step, self.sampled_by, self.scored_by, self.batches = trace, 0, 0, 0, 0

    # What the probe watches.

    def module(self) -> Any:
        """The model that is trained."""
        return self.worker.model.model

    def live(self) -> list[tuple[str, Any]]:
        """Weights as the worker holds them."""
        return self.held(self.worker)

    def held(self, worker: Any) -> list[tuple[str, Any]]:
        """Weights of a worker."""
        return list(worker.model.model.state_dict().items())

    def watch(self, record: Any) -> None:
        """Hooks on the worker, the model, the strategy and the trainer."""
        self.record, worker, trainer = record, self.worker, self.trainer
        self.watch_optimizer()
        self.real = self.hook() | {
            "forward_backward": worker.forward_backward, "optimizer_step": worker.strategy.optimizer_step,
            "normalize": trainer._normalize_advantages,
        }  # fmt: skip
        worker.forward_backward, worker.strategy.optimizer_step = self.forward_backward, self.optimizer_step
        trainer._normalize_advantages = self.normalize
        worker._weight_transfer_sender = SimpleNamespace(handles_prefix_cache_reset=True, send_chunks=self.send_chunks)
        record.weights_held(self.live(), 0, after="load")

    def hook(self) -> dict[str, Any]:
        """Hooks on the worker's passes."""
        worker = self.worker
        real = {"policy_loss_fn": worker.policy_loss_fn, "backward": worker.strategy.backward}
        worker.policy_loss_fn, worker.strategy.backward = self.policy_loss, self.backward
        self.module().register_forward_pre_hook(self.enter, with_kwargs=True)
        self.extractor = worker.weight_extractor = fsdp_worker.FSDPWeightExtractor(self.module())
        return real

    def watch_optimizer(self) -> None:
        """Hooks on the optimizer."""
        optim = self.own.policy.optimizer_config
        self.record.optimizer(
            self.worker.optimizer, list(self.module().named_parameters()), clip_grad=optim.max_grad_norm,
            asked={"betas": tuple(optim.adam_betas), "weight_decay": optim.weight_decay},
            scheduler=self.worker.scheduler, schedule=optim.scheduler.removesuffix("_with_warmup"),
            learning_rate=optim.lr, weight_decay=optim.weight_decay, warmup_steps=optim.num_warmup_steps,
            total_steps=10,
        )  # fmt: skip

    async def send_chunks(self, chunks: Any, weight_metadata: Mapping[str, Any], **_: Any) -> None:
        """What stands for SkyRL's sender: a process that samples."""
        pairs = (pair for chunk in chunks for pair in zip(chunk.names, chunk.tensors, strict=True))
        sent = self.record.sending(pairs, self.step, live=self.live(), told=weight_metadata)
        self.sampler.sync(sent, self.step, self.trace)
        self.sampled_by = self.step

    def send(self) -> None:
        """Send the weights by SkyRL's worker."""
        if self.batches % self.sync_every == 0:
            asyncio.run(self.worker.broadcast_to_inference_engines(None, self.config.generator.inference_engine))
        self.batches += 1

    def normalize(self, data: Any, *args: Any, **told: Any) -> Any:
        """The mean that SkyRL multiplies into advantages."""
        real, scales = trainers.apply_loss_reduction_to_advantages_minibatch, []
        data["raw"] = data["advantages"].clone()

        def reduced(advantages: torch.Tensor, **given: Any) -> torch.Tensor:
            scales.append(real(advantages=torch.ones_like(advantages), **given))
            return real(advantages=advantages, **given)

        with patch.object(trainers, "apply_loss_reduction_to_advantages_minibatch", reduced):
            found = self.real["normalize"](data, *args, **told)
        found["scale"] = torch.cat(scales)
        self.batch = found
        return found

    def forward_backward(self, data: Any, **told: Any) -> Any:
        """Passes of SkyRL's worker, on this process's part of a mini-batch."""
        self.step += 1
        self.record_rollouts(data)
        experience, kl, mean = BaseBatchIterator.batch_to_experience, self.home.compute_approx_kl, self.home.masked_mean

        def divergence(*args: Any, **given: Any) -> Any:
            self.terms["kl"] = kl(*args, **given)
            return self.terms["kl"]

        def averaged(tensor: Any, mask: Any, dim: Any = None) -> Any:
            if dim is None:
                self.terms["entropy"] = tensor
            return mean(tensor, mask, dim)

        with (
            patch.object(BaseBatchIterator, "batch_to_experience", lambda *given: self.entered(experience, given[-1])),
            patch.multiple(self.home, compute_approx_kl=divergence, masked_mean=averaged),
        ):
            found = self.real["forward_backward"](data, **told)
        self.loss = found.metrics["final_loss"]
        return found

    def entered(self, experience: Any, batch: Any) -> Any:
        """A micro-batch as the worker makes it."""
        self.micro = batch
        return experience(batch)

    def record_rollouts(self, data: Any) -> None:
        """The mini-batch, as it comes to the worker."""
        step, record, off = self.step, self.record, self.algorithm.off_policy_correction
        numbers = data["row"].tolist()
        own = [self.rows[row] for row in numbers]
        self.ids = {row: f"{step}/{row}" for row in numbers}

        def cut(values: Any) -> list[Any]:
            return [row[len(row) - len(it["response"]) :] for row, it in zip(values, own, strict=True)]

        if self.reference is not None:
            record.reference_weights(step, self.held(self.reference))
        record.rollouts(
            step, prompts=[it["prompt"] for it in own], responses=[it["response"] for it in own],
            loss_mask=cut(data["loss_mask"]), engine_logprobs=[it["logprobs"] for it in own], versions=self.sampled_by,
            rewards=[it["reward"] for it in own], groups=[it["group"] for it in own], ids=list(self.ids.values()),
            end_token=self.tokenizer.eos_token_id, max_response_tokens=MOST,
            finish_reasons=[it["reason"] for it in own], temperature=self.algorithm.temperature,
        )  # fmt: skip
        reference = None if self.reference is None else cut(data["base_action_log_probs"])
        record.trainer_logprobs(step, cut(data["action_log_probs"]), reference=reference, version=self.scored_by)
        told: dict[str, Any] = dict(ESTIMATORS.get(self.algorithm.advantage_estimator, {}))
        if told.get("estimator") == "grpo" and not self.algorithm.grpo_norm_by_std:
            told["estimator"] = "dr_grpo"
        if correction.off_policy_correction_enabled(off):
            told |= self.corrected(data, cut)
        if self.algorithm.use_kl_in_reward:
            told |= {"penalties": [self.penalties[row] for row in numbers], "kl_weight": self.algorithm.kl_loss_coef}
            told["kl_kind"] = self.algorithm.kl_estimator_type
        if any(it["dropped"] for it in own):
            told["reasons"] = [it["dropped"] for it in own]
        batch = zip(self.batch["row"].tolist(), self.batch["raw"], self.batch["loss_mask"], strict=True)
        told["others"] = [
            (it["group"], it["reward"] - self.penalties.get(row, 0.0), float(raw[-1]), int(mask.sum()))
            for row, raw, mask in batch if row not in self.ids for it in [self.rows[row]]
        ]  # fmt: skip
        record.advantages(
            step, cut(data["raw"]), dtype="float32", max_staleness=step - 1 - self.sampled_by, **told
        )  # fmt: skip
        counts = torch.stack([data["loss_mask"].sum(), torch.tensor(float(len(data)))])
        torch.distributed.all_reduce(counts)
        self.num_tokens, self.size = map(int, counts)
        record.loss(step, **self.objective(data, own))

    def corrected(self, data: Any, cut: Any) -> dict[str, Any]:
        """Importance weights and masks of the mini-batch, by SkyRL."""
        off = self.algorithm.off_policy_correction
        mask = data["loss_mask"]
        ratio, _, kept = correction.compute_off_policy_correction(
            data["action_log_probs"], data["rollout_logprobs"], mask, off
        )
        masks = []
        if off.sequence_mask_metric == "geometric":
            masks.append(("geometric", off.geo_mask_low, off.geo_mask_high))
        elif off.sequence_mask_metric:
            masks.append(("sequence", off.product_mask_low, off.product_mask_high))
        if off.token_mask_is_threshold_low is not None:
            masks.append(("token", off.token_mask_is_threshold_low, off.token_mask_is_threshold_high))
        told: dict[str, Any] = {"masks": masks}
        if off.tis_ratio_type:
            told |= {"weight_level": off.tis_ratio_type, "weight_cap": getattr(
                off, f"{off.tis_ratio_type}_tis_ratio_clip_high"
            )}  # fmt: skip
        data["factor"] = (torch.ones_like(mask) if ratio is None else ratio * torch.ones_like(mask)) * kept
        return {**told, "weights": cut(data["factor"])}

    def objective(self, data: Any, own: list[dict[str, Any]]) -> dict[str, Any]:
        """The loss that SkyRL documents."""
        asked, counts = self.algorithm, data["loss_mask"].sum(-1)
        name = asked.policy_loss_type
        told: dict[str, Any] = {
            "name": LOSSES.get(name, name), "clip_low": asked.eps_clip_low, "clip_high": asked.eps_clip_high
        }  # fmt: skip
        if name == "cispo":
            told |= {"clip_low": asked.cispo.cispo_eps_clip_low, "clip_high": asked.cispo.cispo_eps_clip_high}
        elif name == "dual_clip":
            told["dual_clip"] = asked.clip_ratio_c
        elif name == "sapo":
            told["steepness"] = (asked.sapo.tau_pos, asked.sapo.tau_neg)
        groups, micro = [it["group"] for it in own], self.own.micro_train_batch_size_per_gpu
        prompts = self.size // GROUP
        sizes = list(zip(groups, counts.tolist(), strict=True))
        by_prompt = {group: max(sum(size for own, size in sizes if own == group), 1) for group in groups}
        mean, weights = {
            "token_mean": ({"aggregation": "token_mean"}, [1 / self.num_tokens] * len(own)),
            "sequence_mean": (
                {"aggregation": "sequence_mean", "divisor": self.size},
                [1 / self.size / max(size, 1) for _, size in sizes],
            ),
            "seq_mean_token_sum_norm": (
                {"aggregation": "token_mean", "divisor": self.size * (asked.max_seq_len or 1)},
                [1 / self.size / (asked.max_seq_len or 1)] * len(own),
            ),
            "prompt_mean": (
                {"aggregation": "prompt_mean", "divisor": prompts},
                [1 / prompts / by_prompt[group] for group in groups],
            ),
            "token_mean_legacy": ({
                "aggregation": "prompt_mean", "divisor": self.size // micro,
                "parts": [f"{self.rank}/{at // micro}" for at in range(len(own))],
            }, [0.0] * len(own)),
        }[asked.loss_reduction]  # fmt: skip
        self.shares: dict[str, torch.Tensor] = {}
        if asked.use_kl_loss:  # a mean over sequences, whatever the loss's is
            told |= {"kl_weight": asked.kl_loss_coef, "kl_kind": asked.kl_estimator_type}
            told["kl_limit"] = 10.0 if asked.kl_estimator_type == "k3" else None
            self.shares["kl"] = 1 / self.size / counts.clamp(min=1) / torch.tensor(weights)
        if asked.use_entropy_loss:  # a mean over the tokens of a micro-batch, by its rows
            told["entropy_weight"] = asked.entropy_loss_coef
            parts = [part.sum().clamp(min=1) / len(part) for part in counts.split(micro) for _ in part]
            self.shares["entropy"] = 1 / self.size / torch.stack(parts) / torch.tensor(weights)
        return {**told, **mean, "shares": {key: row.tolist() for key, row in self.shares.items()}}

    def enter(self, _: Any, args: Any, given: dict[str, Any]) -> None:
        """What the model gets of a micro-batch."""
        if torch.is_grad_enabled():
            mask = torch.zeros(args[0].shape)
            mask[:, -self.micro["loss_mask"].shape[1] - 1 : -1] = self.micro["loss_mask"]
            self.record.micro_batch(
                self.step, self.names(), args[0], attention_mask=given["attention_mask"], loss_mask=mask,
                position_ids=given["position_ids"],
            )  # fmt: skip

    def names(self) -> list[str]:
        """Rollouts of a micro-batch; none of one that is padding."""
        rows = self.micro.get("row")
        return [] if rows is None else [self.ids[int(row)] for row in rows]

    def policy_loss(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, *, loss_mask: Any, **told: Any
    ) -> Any:  # fmt: skip
        """SkyRL's policy loss, with each token's before the sum."""
        self.terms = {"logprobs": log_probs, "old": old_log_probs, "advantages": advantages}
        real = ppo_utils.reduce_loss

        def reduce_loss(loss: Any, loss_mask: Any) -> Any:
            self.terms["loss"] = loss * (loss_mask > 0)
            return real(self.terms["loss"], mask)

        mask = loss_mask
        with patch.object(ppo_utils, "reduce_loss", reduce_loss):
            return self.real["policy_loss_fn"](log_probs, old_log_probs, advantages, loss_mask=loss_mask, **told)

    def backward(self, loss: Any, *args: Any, **told: Any) -> None:
        """The backward pass of a micro-batch."""
        names = self.names()
        if names:
            self.record_losses(names)
        self.real["backward"](loss, *args, **told)

    def record_losses(self, names: list[str]) -> None:
        """Each token's loss of a micro-batch, before the backward pass."""
        micro, terms, asked = self.micro, self.terms, self.algorithm
        places = [list(self.ids.values()).index(name) for name in names]
        shares = {key: row[places][:, None] for key, row in self.shares.items()}
        pairs = [(1 / micro["scale"], terms["loss"])]
        if "kl" in shares:
            pairs.append((asked.kl_loss_coef * shares["kl"], terms["kl"]))
        if "entropy" in shares:
            pairs.append((-asked.entropy_loss_coef * shares["entropy"], terms["entropy"]))
        self.record.token_losses(
            self.step, terms["logprobs"], pairs, ids=names, mask=micro["loss_mask"], old=terms["old"],
            entropies=terms["entropy"] if "entropy" in shares else None,
            advantages=terms["advantages"] / micro["scale"] * micro.get("factor", 1.0),
            reference=micro["base_action_log_probs"] if "kl" in shares else None,
        )  # fmt: skip

    def optimizer_step(self, *args: Any, **told: Any) -> Any:
        """SkyRL's clip and step."""
        self.record.gradients(self.step, [(name, item.grad) for name, item in self.module().named_parameters()])
        norm = self.real["optimizer_step"](*args, **told)
        self.stepped(norm)
        return norm

    def stepped(self, norm: Any) -> None:
        """The end of an optimizer step."""
        self.record.step(self.step, loss=self.loss, num_tokens=self.num_tokens, grad_norm=float(whole(norm)))
        self.record.weights_held(self.live(), self.step, after="step")
        if self.batches % self.sync_every or self.step - self.scored_by < self.per_batch:
            self.record.weights_exported(self.exported(), self.step, live=self.live())

    def exported(self) -> Iterator[tuple[str, Any]]:
        """Weights as the worker extracts them."""
        for chunk in self.extractor.extract_weights(torch.float32):
            yield from zip(chunk.names, chunk.tensors, strict=True)

    # SkyRL's driver.

    def sampled(self, step: int) -> tuple[dict[str, Any], list[str]]:
        """What SkyRL's generators return."""
        asked = [EXAMPLES[(step * PROMPTS + at) % len(EXAMPLES)] for at in range(PROMPTS)]
        prompts = [self.tokenizer.encode(f"{a}+{b}=") for a, b in asked for _ in range(GROUP)]
        self.rows: list[dict[str, Any]] = [{} for _ in prompts]
        for size in {len(row) for row in prompts}:
            places = [at for at, row in enumerate(prompts) if len(row) == size]
            ends, seeds = [self.tokenizer.eos_token_id], [1000 * step + at for at in places]
            told = [prompts[at] for at in places], ends, seeds, MOST, self.algorithm.temperature
            for at, own in zip(places, self.sampler.generate(*told), strict=True):
                text, gold = self.tokenizer.decode(own["tokens"]), str(sum(asked[at // GROUP]))
                self.rows[at] = {
                    "prompt": prompts[at], "response": own["tokens"], "logprobs": own["logprobs"], "dropped": "",
                    "reason": own["reason"], "reward": float(torch.tensor(len({*text} & {*gold}) / len(gold))),
                    "group": f"{step}/{at // GROUP}",
                }  # fmt: skip
        masks = [[1] * len(own["response"]) for own in self.rows]
        reasons = [own["reason"] for own in self.rows]
        if self.config.generator.apply_overlong_filtering:
            masks = apply_overlong_filtering(masks, reasons)
            for own in self.rows:
                own["dropped"] = "overlong" if own["reason"] == "length" else ""
        told = {
            "prompt_token_ids": [own["prompt"] for own in self.rows], "loss_masks": masks, "stop_reasons": reasons,
            "response_ids": [own["response"] for own in self.rows], "rewards": [own["reward"] for own in self.rows],
            "rollout_logprobs": [own["logprobs"] for own in self.rows], "rollout_metrics": None,
        }  # fmt: skip
        return told, [own["group"] for own in self.rows]

    def train_step(self, number: int) -> None:
        """What `RayPPOTrainer.train` does in a step."""
        trainer, self.scored_by = self.trainer, self.step
        trainer.global_step = number + 1
        output, uids = trainer.postprocess_generator_output(*self.sampled(number))
        if self.algorithm.zero_variance_filter:
            for own, mask in zip(self.rows, output["loss_masks"], strict=True):
                own["dropped"] = own["dropped"] or ("" if any(mask) else "zero_variance")
        data = trainer.convert_to_training_input(output, uids)
        data["row"] = torch.arange(len(data))
        data = trainer.fwd_logprobs_values_reward(data)
        self.penalties: dict[int, float] = {}
        if self.algorithm.use_kl_in_reward:
            before = data["rewards"].double().sum(-1)
            data = trainer.apply_reward_kl_penalty(data)
            self.penalties = dict(enumerate((before - data["rewards"].double().sum(-1)).tolist()))
        data = trainer.compute_advantages_and_returns(data)
        data.pop("rewards")
        self.per_batch = PROMPTS // self.own.policy_mini_batch_size * self.own.update_epochs_per_batch
        trainer.train_critic_and_policy(data)
        self.send()


def train(checkpoint: Path, trace: Path, kind: type[Loop] = Loop, **settings: Any) -> None:
    """Train for some steps; settings of SkyRL's config beside `CONFIG`."""
    steps, dtype = settings.pop("steps", STEPS), settings.pop("dtype", "float32")
    join()
    with probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as record, on_cores():
        torch.distributed.barrier()
        loop = kind(checkpoint, trace, settings)
        loop.watch(record)
        loop.send()
        for number in range(steps):
            loop.train_step(number)
        loop.sampler.close()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{key: yaml.safe_load(item) for key, item in given.items()})
