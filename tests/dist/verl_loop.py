"""verl's training worker, engine and losses on CPU cores, sampled by transformers, recorded by `verifier.probe`.

`python verl_loop.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of verl's
config, such as `actor_rollout_ref.actor.ppo_epochs=2`. In several processes every one has verl's driver, on all rows.
"""
# ruff: noqa: E402 - verl asks for its platform as it is imported

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VERL_ENGINE_DEVICE": "cuda"}  # verl registers its engines for accelerators alone

import numpy as np
import torch
import verl
from foreign_process import join
from grpo_engines import TransformersEngine
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.plugin.platform import platform_manager


class Memory:
    """What verl asks of `torch.cuda`: memory, of which there is none."""

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """Free and whole, in bytes."""
        return 0, 0

    def get_device_name(self, *_: Any) -> str:
        """Name by which verl knows how fast a device is."""
        return "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0


class Cores:
    """CPU cores as a platform of verl, which has none of them."""

    device_name, vendor_name, device_module = "cpu", "cpu", Memory()

    def current_device(self) -> torch.device:
        """Where tensors go."""
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: ""


platform_manager.set_platform(Cores())

from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils import losses

from verifier import probe
from verifier.probe.recorder import plain
from verifier.probe.sharded import whole

LOGPROBS = transformer_impl.logprobs_from_logits
transformer_impl.logprobs_from_logits = lambda logits, **told: LOGPROBS(logits.float(), **told)
"""As on GPUs, where flash-attention's kernel, and autocast's log_softmax, give float32."""
PROMPTS, GROUP, MOST = 4, 4, 8
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMON = {
    f"{ACTOR}.optim.lr": 1e-3, f"{ACTOR}.optim.weight_decay": 0.1, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ACTOR}.ppo_mini_batch_size": PROMPTS, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.name": "hf",
    f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{ROLLOUT}.n": GROUP, f"{ROLLOUT}.free_cache_engine": False,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "data.max_prompt_length": 12, "data.max_response_length": MOST, "algorithm.adv_estimator": "grpo",
}  # fmt: skip
CONFIG = COMMON | {
    "actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"}, f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    f"{ACTOR}.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.mixed_precision": f"${{{ACTOR}.fsdp_config.mixed_precision}}",
}  # fmt: skip
"""Settings beside verl's defaults; `steps` and `sync_every`, batches that one sync serves, are those of the loop."""
STEPS = 2
REJECTIONS = {"seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "greatest", "token": "token"}
"""verl's level of rejection -> the probe's."""
EXAMPLES = [(a, b) for a in (2, 7, 11, 15) for b in (3, 21, 110, 123)]
LOSSES = {"vanilla": "clipped", "gpg": "reinforce", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
"""verl's name of a loss -> the probe's."""
ESTIMATORS = {
    "grpo": {"estimator": "grpo", "epsilon": 1e-6, "ddof": 1}, "rloo": {"estimator": "rloo"},
    "reinforce_plus_plus": {"estimator": "reinforce++", "ddof": 1},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce++_baseline", "ddof": 1},
}  # fmt: skip
"""verl's name of an estimator -> what the probe is told."""


def config_of(file: str, checkpoint: Path, settings: Mapping[str, Any]) -> Any:
    """verl's config."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / file)
    for key, value in {"actor_rollout_ref.model.path": str(checkpoint), **settings}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


class Group:
    """What verl's driver takes for its group of workers: this process's, and by torch.distributed the others'."""

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self.worker, self.engine = worker, worker.actor.engine
        self.world_size = torch.distributed.get_world_size()
        self._dispatch_info: dict[str, list[int]] = {}

    def _query_dispatch_info(self, role: str) -> list[int]:
        return list(range(self.engine.get_data_parallel_size()))

    def _part(self, data: Any) -> Any:
        size = self.engine.get_data_parallel_size()
        return tu.chunk_tensordict(data, size)[self.engine.get_data_parallel_rank()]

    def _known(self, data: Any) -> list[Any]:
        parts = [None] * self.world_size
        torch.distributed.all_gather_object(parts, data)
        return [part for part in parts if part is not None]  # of the ranks of one model one answers

    def _all(self, data: Any) -> Any:
        known = self._known(data)
        return tu.concat_tensordict(known) if len(known) > 1 else known[0]

    def compute_log_prob(self, data: Any) -> Any:
        return self._all(self.worker.compute_log_prob(self._part(data)))

    def compute_ref_log_prob(self, data: Any) -> Any:
        return self._all(self.worker.compute_ref_log_prob(self._part(data)))

    def update_actor(self, data: Any) -> Any:
        return self._known(self.worker.update_actor(self._part(data)))[0]


def with_adapter(base: Mapping[str, Any], adapter: Mapping[str, Any], scaling: float) -> dict[str, torch.Tensor]:
    """Weights with an adapter in them."""
    merged = {name: whole(item).clone() for name, item in base.items()}
    sides = {plain(name): item for name, item in adapter.items()}
    for name, inward in sides.items():
        if name.endswith(".lora_A.weight"):
            outward = sides[name.replace(".lora_A.", ".lora_B.")]
            merged[name.replace(".lora_A.", ".")] += (outward @ inward) * scaling
    return merged


class Rollout:
    """Engine of verl's worker: transformers."""

    sleep_level = 2

    def __init__(self, engine: TransformersEngine, sync: Any) -> None:
        self.engine, self.sync = engine, sync
        self.base = {name: item.clone() for name, item in engine.model.state_dict().items()}

    async def update_weights(
        self, weights: Any, peft_config: Any = None, base_sync_done: bool = True, **_: Any
    ) -> None:  # fmt: skip
        """Take weights, as verl sends them: merged, or the base once and the adapter each time."""
        if peft_config is None:
            self.sync(weights)
        elif not base_sync_done:
            self.base = {name.replace(".base_layer", ""): tensor for name, tensor in weights}
        else:
            self.sync(self.base, dict(weights), peft_config["lora_alpha"] / peft_config["r"])


class Loop:
    """verl's step by its own functions, with what `verifier.probe` is handed."""

    file, defaults, scores = "_generated_ppo_trainer.yaml", CONFIG, "prepare_model_inputs"
    """verl's config, settings beside it, and the method of the engine that makes the model's inputs."""

    def __init__(self, checkpoint: Path, trace: Path, settings: Mapping[str, Any]) -> None:
        self.sync_every = settings.get("sync_every", 1)
        settings = {key: value for key, value in settings.items() if key != "sync_every"}
        self.config = config_of(self.file, checkpoint, {**self.defaults, **settings})
        self.actor, self.actor_lora = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.model
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        needs_reference = self.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward
        role = "actor_rollout_ref" if needs_reference else "actor_rollout"
        self.worker = ActorRolloutRefWorker(self.config.actor_rollout_ref, role)
        with (
            patch("verl.workers.engine_workers.get_rollout_class", lambda *_: lambda **_: None),
            patch.object(transformer_impl, "CPUOffloadPolicy", lambda **_: None),  # which pins memory of a GPU
        ):
            self.worker.init_model()
        self.trainer = object.__new__(RayPPOTrainer)
        self.trainer.config, self.trainer.use_reference_policy = self.config, needs_reference
        self.trainer.ref_in_actor = False
        self.trainer.actor_rollout_wg = self.trainer.ref_policy_wg = Group(self.worker)
        if self.config.algorithm.use_kl_in_reward:
            self.trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(self.config.algorithm.kl_ctrl)
        self.engine = self.worker.actor.engine
        self.sampler = TransformersEngine(checkpoint, trace, rank=self.rank)
        self.worker.rollout = Rollout(self.sampler, self.sync)
        self.trace, self.step, self.sampled_by, self.scored_by, self.batches = trace, 0, 0, 0, 0
        self.micro: dict[str, Any] = {}

    # What the probe watches.

    def watch(self, record: Any) -> None:
        """Hooks on the worker, the engine and the losses."""
        self.record, engine = record, self.engine
        self.watch_optimizer()
        self.real = {name: getattr(engine, name) for name in ("optimizer_step", self.scores)}
        for name in self.real:
            setattr(engine, name, getattr(self, name))
        self.real["train_batch"] = self.worker.actor.train_batch
        self.worker.actor.train_batch = self.train_batch
        loss = self.worker.actor.loss_fn
        self.worker.actor.set_loss_fn(lambda model_output, data, **told: self.loss(loss, model_output, data, told))
        record.weights_held(self.live(), 0, after="load")

    def watch_optimizer(self) -> None:
        """Hooks on the optimizer."""
        record, engine, optim = self.record, self.engine, self.actor.optim
        trained = [(name, value) for name, value in engine.module.named_parameters() if value.requires_grad]
        record.optimizer(
            engine.optimizer, trained, clip_grad=optim.clip_grad,
            asked={"betas": tuple(optim.betas), "weight_decay": optim.weight_decay}, scheduler=engine.lr_scheduler,
            schedule=optim.lr_scheduler_type, learning_rate=optim.lr, weight_decay=optim.weight_decay,
            warmup_steps=max(optim.lr_warmup_steps, 0), total_steps=max(optim.total_training_steps, 0),
            least_learning_rate=(optim.min_lr_ratio or 0.0) * optim.lr,
            updates_per_rate=PROMPTS // self.actor.ppo_mini_batch_size * self.actor.ppo_epochs,
        )  # fmt: skip

    def sync(self, weights: Any, adapter: Mapping[str, Any] | None = None, scaling: float = 1.0) -> None:
        """Weights that go to the sampler, which adds an adapter to them."""
        if adapter is not None:
            weights = with_adapter(weights, adapter, scaling)
            own = self.actor_lora
            self.record.adapter_exported(
                adapter, self.step, live=self.adapter(), scaling=scaling, live_scaling=own.lora_alpha / own.lora_rank
            )
        self.sampler.sync(self.record.sending(weights, self.step, live=self.live()), self.step, self.trace)
        if adapter is not None:
            self.sampler.record.engine_views(self.step, {plain(name): item for name, item in adapter.items()})
        self.sampled_by = self.step

    def live(self) -> list[tuple[str, Any]]:
        """Weights as the engine holds them, with an adapter in them."""
        held = {plain(name): item for name, item in self.held(self.engine)}
        base = {name: item for name, item in held.items() if ".lora_" not in name}
        adapter = self.adapter()
        own = self.actor_lora
        return list((with_adapter(base, adapter, own.lora_alpha / own.lora_rank) if adapter else base).items())

    def adapter(self) -> dict[str, torch.Tensor]:
        """Matrices of the adapter as the engine holds them."""
        return {plain(name): whole(item) for name, item in self.held(self.engine) if ".lora_" in name}

    def held(self, engine: Any) -> list[tuple[str, Any]]:
        """Tensors of one of verl's engines."""
        return list(engine.module.state_dict().items())

    def train_batch(self, data: Any) -> Any:
        """One optimizer step of verl's worker, on this process's part of a mini-batch."""
        self.step += 1
        self.record_rollouts(data)
        found = self.real["train_batch"](data)
        if found is not None:
            metrics = tu.get(found, "metrics")
            self.record.step(
                self.step, loss=metrics["loss"], num_tokens=self.num_tokens, grad_norm=metrics["grad_norm"]
            )  # fmt: skip
        if not self.actor_lora.lora_rank:
            self.record.weights_held(self.live(), self.step, after="step")
        if not self.is_last_of_batch() or self.batches % self.sync_every:
            sent = self.live() if self.actor_lora.lora_rank else self.engine.get_per_tensor_param()[0]
            self.record.weights_exported(sent, self.step, live=self.live())
            if adapter := self.adapter():
                scaling = self.actor_lora.lora_alpha / self.actor_lora.lora_rank
                told = {"live": adapter, "scaling": scaling, "live_scaling": scaling}
                self.record.adapter_exported(adapter, self.step, **told)
        return found

    def record_rollouts(self, data: Any) -> None:
        """The mini-batch, as it comes to the engine."""
        step, record = self.step, self.record
        self.rows = [int(row) for row in data["row"]]
        rows = [self.batch_rows[row] for row in self.rows]
        self.ids = {row: f"{step}/{row}" for row in self.rows}
        if self.worker.ref is not None:
            record.reference_weights(step, self.held(self.worker.ref.engine))
        masks = [row[: len(own["response"])] for row, own in zip(data["response_mask"], rows, strict=True)]
        record.rollouts(
            step,
            prompts=[own["prompt"] for own in rows],
            responses=[own["response"] for own in rows],
            loss_mask=masks,
            engine_logprobs=[own["logprobs"] for own in rows],
            versions=self.sampled_by,
            rewards=[own["reward"] for own in rows],
            groups=[own["group"] for own in rows],
            ids=list(self.ids.values()),
            end_token=self.tokenizer.eos_token_id,
            max_response_tokens=MOST,
            finish_reasons=[own["reason"] for own in rows],
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        cut = {
            key: [row[: len(own["response"])] for row, own in zip(data[key], rows, strict=True)]
            for key in ("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights", "rejected")
            if key in data
        }
        record.trainer_logprobs(step, cut["old_log_probs"], reference=cut.get("ref_log_prob"), version=self.scored_by)
        algorithm = self.config.algorithm
        told = dict(ESTIMATORS.get(algorithm.adv_estimator, {}))
        if told.get("estimator") == "grpo" and not algorithm.norm_adv_by_std_in_grpo:
            told["estimator"] = "dr_grpo"
        whole = self.batch.batch
        sizes = whole["response_mask"].sum(-1).tolist()
        net = whole["token_level_rewards"].sum(-1).tolist()
        ends = whole["advantages"].gather(1, whole["response_mask"].argmax(-1, keepdim=True))[:, 0].tolist()
        told["others"] = [
            (self.batch_rows[row]["group"], net[at], ends[at], sizes[at])
            for at, row in enumerate(whole["row"].tolist())
            if row not in self.ids
        ]
        correction = algorithm.get("rollout_correction", None)
        if "rejected" in cut:
            told |= {"rejected": cut["rejected"], "masks": self.masks(correction)}
        if "rollout_is_weights" in cut:
            told |= {"weights": cut["rollout_is_weights"], "weight_level": correction.rollout_is}
            told["weight_cap"] = correction.rollout_is_threshold
        if algorithm.use_kl_in_reward:
            told |= {"penalties": [self.penalties[row] for row in self.rows], "kl_kind": "k1"}
            told["kl_weight"] = self.kl_weight
        record.advantages(
            step, cut["advantages"], dtype="float32", max_staleness=step - 1 - self.sampled_by, **told
        )  # fmt: skip
        record.loss(step, **self.objective())

    def masks(self, correction: Any) -> list[tuple[str, float, float]]:
        """Rules by which verl's rollout correction rejects tokens: KL estimates of the engine, nats."""
        options, bounds = correction.rollout_rs.split(","), str(correction.rollout_rs_threshold).split(",")
        found = []
        for option, own in zip(options, bounds * (len(options) if len(bounds) == 1 else 1), strict=True):
            level, kind = option.rsplit("_", 1)
            low, high = (*([] if "_" in own else [1 / float(own)]), *map(float, own.split("_")))
            limits = (math.log(low), math.log(high)) if kind == "k1" else (0.0, high)
            found.append((f"{REJECTIONS[level]}_{kind}", *limits))
        return found

    def objective(self) -> dict[str, Any]:
        """The loss that verl documents."""
        actor, size = self.actor, self.actor.ppo_mini_batch_size * GROUP
        means = {
            "token-mean": {"aggregation": "token_mean"},
            "token-sum": {"aggregation": "token_mean", "divisor": 1},
            "seq-mean-token-sum": {"aggregation": "token_mean", "divisor": size},
            "seq-mean-token-sum-norm": {"aggregation": "token_mean", "divisor": size * MOST},
            "seq-mean-token-mean": {"aggregation": "sequence_mean", "divisor": size},
        }
        name = actor.policy_loss.loss_mode
        clip = {"clip_low": actor.clip_ratio_low, "clip_high": actor.clip_ratio_high}
        if name == "vanilla":
            clip["dual_clip"] = actor.clip_ratio_c
        mean = means[actor.loss_agg_mode]
        if name == "sapo":  # which has this mean alone
            clip, mean = {"steepness": (actor.tau_pos, actor.tau_neg)}, means["seq-mean-token-mean"]
        kind = actor.kl_loss_type.replace("low_var_kl", "k3")
        kl = {"kl_weight": actor.kl_loss_coef, "kl_kind": kind, "kl_limit": 10.0 if "k3" in kind else None}
        return {
            "name": LOSSES.get(name, name), **clip, **mean, "entropy_weight": actor.entropy_coeff,
            **(kl if actor.use_kl_loss else {}),
        }  # fmt: skip

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """What the model gets of a micro-batch."""
        inputs, told = self.real["prepare_model_inputs"](micro_batch)
        if torch.is_grad_enabled():
            ids = [self.ids[int(row)] for row in micro_batch["row"]]
            given = {"position_ids": inputs["position_ids"], "loss_mask": self.places(inputs, micro_batch)}
            if inputs["attention_mask"] is None:
                given["cu_seqlens"] = micro_batch["input_ids"].offsets()
                given["labels"] = told["input_ids_rmpad_rolled"]
            else:
                given["attention_mask"] = inputs["attention_mask"]
            self.record.micro_batch(self.step, ids, inputs["input_ids"], **given)
        return inputs, told

    def places(self, inputs: Any, micro_batch: Any) -> torch.Tensor:
        """Which places of the model's inputs predict a token in the loss, by verl's own cut of its outputs."""
        given, ends = inputs["input_ids"], micro_batch["input_ids"].offsets()
        flat = torch.arange(given.numel()).view(given.shape)
        real = inputs["attention_mask"]
        kept = flat[real.bool()] if real is not None else flat[0, : ends[-1]]
        nested = torch.nested.nested_tensor_from_jagged(kept, ends)
        mask = micro_batch["response_mask"]
        mask = mask.to_padded_tensor(0) if mask.is_nested else mask
        found = losses.no_padding_2_padding(nested, micro_batch)[mask.bool()]
        return torch.zeros(given.numel(), dtype=torch.bool).index_fill(0, found, True).view(given.shape)

    def loss(self, real: Any, model_output: Any, data: Any, told: Any) -> Any:
        """verl's loss of a micro-batch, with each token's before the mean."""
        terms: list[torch.Tensor] = []
        seen: dict[str, Any] = {}
        name, actor = self.actor.policy_loss.loss_mode, self.actor
        policy, mean, divergence = core_algos.POLICY_LOSS_REGISTRY[name], losses.agg_loss, losses.kl_penalty

        def agg_loss(loss_mat: Any, **given: Any) -> Any:
            terms.append(loss_mat)
            return mean(loss_mat=loss_mat, **given)

        def watched(**given: Any) -> Any:
            seen.update(given)
            return policy(**given)

        def kl_penalty(ref_logprob: Any, **given: Any) -> Any:
            seen["reference"] = ref_logprob
            return divergence(ref_logprob=ref_logprob, **given)

        with (
            patch.object(core_algos, "agg_loss", agg_loss),
            patch.multiple(losses, agg_loss=agg_loss, kl_penalty=kl_penalty),
            patch.dict(core_algos.POLICY_LOSS_REGISTRY, {name: watched}),
        ):
            loss, metrics = real(model_output=model_output, data=data, **told)
        self.num_tokens = data["batch_num_tokens"]
        given_weights = seen.get("rollout_is_weights")
        factors = [1.0, *([-actor.entropy_coeff] if actor.entropy_coeff else [])]
        factors += [actor.kl_loss_coef] if actor.use_kl_loss else []
        if len(terms) == len(factors):
            self.record.token_losses(
                self.step,
                seen["log_prob"],
                list(zip(factors, terms, strict=True)),
                ids=[self.ids[int(row)] for row in data["row"]],
                mask=seen["response_mask"],
                entropies=terms[1] if actor.entropy_coeff else None,
                old=seen["old_log_prob"],
                advantages=seen["advantages"] * (1.0 if given_weights is None else given_weights),
                reference=seen.get("reference"),
            )
        return loss, metrics

    def optimizer_step(self) -> float:
        """verl's clip and step."""
        self.record.gradients(self.step, self.gradients())
        return self.real["optimizer_step"]()

    def gradients(self) -> list[tuple[str, Any]]:
        """Gradients that the optimizer is to get."""
        return [(name, own.grad) for name, own in self.engine.module.named_parameters() if own.requires_grad]

    def is_last_of_batch(self) -> bool:
        """The step is the last that trains on the batch."""
        size = self.actor.ppo_mini_batch_size * GROUP
        return (self.step - self.scored_by) == len(self.batch) // size * self.actor.ppo_epochs

    # verl's driver.

    def sampled(self, step: int) -> DataProto:
        """Answers as verl's agent loop pads them: prompts to the left, answers to the right."""
        asked = [EXAMPLES[(step * PROMPTS + at) % len(EXAMPLES)] for at in range(PROMPTS)]
        prompts = [self.tokenizer.encode(f"{a}+{b}=") for a, b in asked for _ in range(GROUP)]
        rows: list[dict[str, Any]] = [{} for _ in prompts]
        for size in {len(row) for row in prompts}:
            places = [at for at, row in enumerate(prompts) if len(row) == size]
            seeds = [1000 * step + at for at in places]
            for at, own in zip(places, self.sampled_answers([prompts[at] for at in places], seeds), strict=True):
                text, gold = self.tokenizer.decode(own["tokens"]), str(sum(asked[at // GROUP]))
                reward = len({*text} & {*gold}) / len(gold)
                rows[at] = {
                    "prompt": prompts[at], "response": own["tokens"], "logprobs": own["logprobs"],
                    "reason": own["reason"], "reward": reward, "group": f"{step}/{at // GROUP}",
                }  # fmt: skip
        self.batch_rows = rows
        pad, most = self.tokenizer.pad_token_id, self.config.data.max_prompt_length
        left = torch.tensor([[pad] * (most - len(own["prompt"])) + own["prompt"] for own in rows])
        right = torch.tensor([own["response"] + [pad] * (MOST - len(own["response"])) for own in rows])
        mask = torch.tensor([[1] * len(own["response"]) + [0] * (MOST - len(own["response"])) for own in rows])
        real = torch.tensor([[0] * (most - len(own["prompt"])) + [1] * len(own["prompt"]) for own in rows])
        real = torch.cat([real, mask], 1)
        scores = torch.zeros(mask.shape)
        for at, own in enumerate(rows):
            scores[at, len(own["response"]) - 1] = own["reward"]
        nats = torch.tensor([own["logprobs"] + [0.0] * (MOST - len(own["logprobs"])) for own in rows])
        tensors = {
            "prompts": left, "responses": right, "input_ids": torch.cat([left, right], 1), "attention_mask": real,
            "position_ids": (real.cumsum(-1) - 1).clamp(min=0), "response_mask": mask, "rm_scores": scores,
            "rollout_log_probs": nats, "row": torch.arange(len(rows)),
        }  # fmt: skip
        uid = np.array([own["group"] for own in rows], dtype=object)
        batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def sampled_answers(self, prompts: list[list[int]], seeds: list[int]) -> list[dict[str, Any]]:
        """Answers to prompts of one length."""
        heat = self.config.actor_rollout_ref.rollout.temperature
        return self.sampler.generate(prompts, [self.tokenizer.eos_token_id], seeds, MOST, heat)

    def train_step(self, number: int) -> None:
        """What `RayPPOTrainer.fit` does in a step."""
        trainer, algorithm = self.trainer, self.config.algorithm
        self.scored_by = self.step
        batch = self.sampled(number)
        if self.config.trainer.balance_batch:
            trainer._balance_batch(batch, metrics={})
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        batch.meta_info["images_seqlens"] = []
        correction = algorithm.get("rollout_correction", None)
        bypass = correction is not None and correction.get("bypass_mode", False)
        if bypass:
            apply_bypass_mode(batch, correction, self.actor.policy_loss)
        else:
            old, _ = trainer._compute_old_log_prob(batch)
            old.batch.pop("entropys")
            batch = batch.union(old)
        if trainer.use_reference_policy:
            batch = batch.union(trainer._compute_ref_log_prob(batch))
        batch.batch["token_level_scores"] = batch.batch["rm_scores"]
        if algorithm.use_kl_in_reward:
            self.kl_weight = trainer.kl_ctrl_in_reward.value
            real = core_algos.kl_penalty

            def kl_penalty(*args: Any, **told: Any) -> torch.Tensor:
                self.divergence = real(*args, **told)
                return self.divergence

            with patch.object(core_algos, "kl_penalty", kl_penalty):
                batch, _ = ray_trainer.apply_kl_penalty(batch, trainer.kl_ctrl_in_reward, algorithm.kl_penalty)
            taken = self.kl_weight * (self.divergence * batch.batch["response_mask"]).sum(-1)
            self.penalties = dict(zip(batch.batch["row"].tolist(), taken.tolist(), strict=True))
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if correction is not None and not bypass:
            sampled = batch.batch["response_mask"].clone()
            batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
            if correction.get("rollout_rs", None):
                batch.batch["rejected"] = sampled - batch.batch["response_mask"]
        batch = ray_trainer.compute_advantage(
            batch, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, GROUP,
            algorithm.norm_adv_by_std_in_grpo, algorithm,
        )  # fmt: skip
        self.batch = batch
        trainer._update_actor(batch)
        self.send()

    def send(self) -> None:
        """Send the weights by verl's worker."""
        if self.batches % self.sync_every == 0:
            asyncio.run(self.worker.update_weights(self.step))
        self.batches += 1


def train(checkpoint: Path, trace: Path, kind: type[Loop] = Loop, **settings: Any) -> None:
    """Train for some steps; settings of verl's config beside those of `kind`."""
    steps, dtype = settings.pop("steps", STEPS), settings.pop("dtype", "float32")
    join()
    with probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as record:
        torch.distributed.barrier()
        loop = kind(checkpoint, trace, settings)
        loop.watch(record)
        loop.send()
        for number in range(steps):
            loop.train_step(number)
        loop.sampler.close()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{key: OmegaConf.create(f"v: {it}").v for key, it in given.items()})
