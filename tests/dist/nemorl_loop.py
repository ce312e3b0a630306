"""NeMo-RL's policy worker, losses and estimators on CPU cores, sampled by transformers, recorded by `verifier.probe`.

`python nemorl_loop.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of
NeMo-RL's loss, GRPO and policy configs, such as `ratio_clip_c=3`. In several processes each has the driver.
"""
# ruff: noqa: E402 - what NeMo-RL imports and nothing here calls is put in place first

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from foreign_process import Uncalled, join
from grpo_engines import TransformersEngine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifier import probe

stands = Uncalled("scipy", "soundfile", "matplotlib", "wandb", "mlflow", "swanlab")
import transformers.models.gemma3.modeling_gemma3  # noqa: F401 - transformers is another module from then on

with patch.object(sys.modules["transformers"], "__version__", "5.11.0"):  # a patch of tokenizers refuses later ones
    import nemo_rl.models.policy  # noqa: F401
from nemo_rl.algorithms import grpo, loss
from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig
from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
from nemo_rl.algorithms.loss import loss_functions
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel import train as passes
from nemo_rl.models.policy.workers import dtensor_policy_worker_v2 as worker_v2
from nemo_rl.utils.timer import Timer

stands.end()


PROMPTS, GROUP, MOST = 4, 4, 8
STEPS = 2
EXAMPLES = [(a, b) for a in (2, 7, 11, 15) for b in (3, 21, 110, 123)]
POLICY = {
    "train_global_batch_size": PROMPTS * GROUP, "train_micro_batch_size": 4, "logprob_batch_size": 8,
    "dynamic_batching": {"enabled": False}, "sequence_packing": {"enabled": False}, "lr": 1e-3, "weight_decay": 0.1,
    "max_grad_norm": 1.0, "temperature": 1.0, "logprob_chunk_size": None,
}  # fmt: skip
"""Of the policy, and of its optimizer."""
OURS = {"steps": STEPS, "sync_every": 1, "rewards": None}
LOSS = {"reference_policy_kl_penalty": 0.0}
"""Settings beside NeMo-RL's defaults."""


class Cores(TorchFunctionMode):
    """Tensors that are asked for on a GPU, on CPU cores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with another device."""
        if func is torch.Tensor.cuda:
            return args[0]
        told = {key: "cpu" if value == "cuda" and key == "device" else value for key, value in (kwargs or {}).items()}
        return func(*("cpu" if isinstance(item, str) and item == "cuda" else item for item in args), **told)


class Loop:
    """A step of `grpo_train` by NeMo-RL's own functions, with what `verifier.probe` is handed."""

    def __init__(self, checkpoint: Path, trace: Path, settings: dict[str, Any]) -> None:
        groups = [POLICY, OURS, LOSS]
        self.policy, self.ours, asked = ({**own, **{k: v for k, v in settings.items() if k in own}} for own in groups)
        asked |= {key: item for key, item in settings.items() if key in loss.ClippedPGLossConfig.model_fields}
        self.asked = loss.ClippedPGLossConfig(**asked)
        given = {key: item for key, item in settings.items() if key in grpo.GRPOConfig.model_fields}
        told = {key: item for key, item in settings.items() if key in AdvEstimatorConfig.model_fields}
        known = {*self.policy, *self.ours, *asked, *given, *told}
        assert {*settings} <= known, {*settings} - known
        self.estimator = AdvEstimatorConfig(**told)
        sizes = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": GROUP}
        defaults = {"overlong_filtering": False, "seq_logprob_error_threshold": None, "use_dynamic_sampling": False}
        clips = {"advantage_clip_low": None, "advantage_clip_high": None, "dynamic_sampling_max_gen_batches": 8}
        self.grpo = SimpleNamespace(**{**sizes, **defaults, **clips, **given}, adv_estimator=self.estimator)
        self.config = SimpleNamespace(grpo=self.grpo, loss_fn=self.asked)
        self.loss_fn = loss.ClippedPGLossFn(self.asked)
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.worker = self.made(checkpoint)
        self.sampler = TransformersEngine(checkpoint, trace, rank=self.rank)
        self.trace, self.step, self.sampled_by, self.batches = trace, 0, 0, 0

    def made(self, checkpoint: Path) -> Any:
        """NeMo-RL's worker after its `__init__`, which asks for Ray and a GPU."""
        worker = object.__new__(worker_v2.DTensorPolicyWorkerV2Impl)
        names = ("dp", "cp", "tp")
        mesh = init_device_mesh("cpu", (self.world, 1, 1), mesh_dim_names=names)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        if self.world > 1:
            fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.policy["lr"], weight_decay=self.policy["weight_decay"], foreach=False
        )
        worker.__dict__ |= {
            "cfg": {**self.policy, "dtensor_cfg": {}}, "model": model, "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda epoch: 1),
            "device_mesh": mesh, "moe_mesh": None, "tokenizer": self.tokenizer, "dtype": torch.float32,
            "rank": self.rank,
            "sampling_params": TrainingSamplingParams(top_k=None, top_p=1.0, temperature=self.policy["temperature"]),
            "enable_seq_packing": False, "max_grad_norm": self.policy["max_grad_norm"], "autocast_enabled": False,
            "_is_reward_model": False, "allow_flash_attn_args": False, "timer": Timer(),
            "reference_model_state_dict": {name: item.clone() for name, item in model.state_dict().items()},
        }  # fmt: skip
        for name, size in zip(names, (self.world, 1, 1), strict=True):
            worker.__dict__ |= {f"{name}_mesh": mesh[name], f"{name}_size": size}
        return worker

    # What the probe watches.

    def watch(self, record: Any) -> None:
        """Hooks on the worker's optimizer and on its passes."""
        self.record, worker, policy = record, self.worker, self.policy
        record.optimizer(
            worker.optimizer, worker.model.named_parameters(), clip_grad=policy["max_grad_norm"] or 0.0,
            asked={"lr": policy["lr"], "weight_decay": policy["weight_decay"]}, scheduler=worker.scheduler,
            schedule="constant", learning_rate=policy["lr"], weight_decay=policy["weight_decay"],
            updates_per_rate=PROMPTS * GROUP // policy["train_global_batch_size"],
        )  # fmt: skip
        record.weights_held(self.live(), 0, after="load")

    def live(self) -> list[tuple[str, Any]]:
        """Weights as the worker holds them."""
        return list(self.worker.model.state_dict().items())

    def sent(self) -> Any:
        """Weights as the worker sends them."""
        return worker_v2.dtensor_params_generator(self.worker.model, torch.float32)

    def send(self) -> None:
        """Send the weights."""
        if self.batches % self.ours["sync_every"] == 0:
            self.sampler.sync(self.record.sending(self.sent(), self.step, live=self.live()), self.step, self.trace)
            self.sampled_by = self.step
        self.batches += 1

    def process_global_batch(self, real: Any, data: Any, *args: Any, **told: Any) -> Any:
        """The batch of an optimizer step, as the worker takes it."""
        found = real(data, *args, **told)
        self.step += 1
        self.count = found["global_valid_toks"]
        self.record_rollouts(found["batch"])
        return found

    def record_rollouts(self, data: Any) -> None:
        """A batch, and what its loss is to be."""
        step, record, own = self.step, self.record, [self.rows[int(row)] for row in data["row"]]
        self.ids = {int(row): f"{step}/{int(row)}" for row in data["row"]}
        kept = data["token_mask"] * data["sample_mask"][:, None]

        def cut(key: str) -> list[torch.Tensor]:
            ends = data["input_lengths"].tolist()
            return [row[end - len(it["response"]) : end] for row, end, it in zip(data[key], ends, own, strict=True)]

        data["kept"] = kept
        dropped = [not float(item) for item in data["sample_mask"]]
        record.rollouts(
            step, prompts=[it["prompt"] for it in own], responses=[it["response"] for it in own], loss_mask=cut("kept"),
            engine_logprobs=[it["logprobs"] for it in own], versions=self.sampled_by,
            rewards=[it["reward"] for it in own], groups=[it["group"] for it in own], ids=list(self.ids.values()),
            end_token=self.tokenizer.eos_token_id, max_response_tokens=MOST,
            finish_reasons=[it["reason"] for it in own], temperature=self.policy["temperature"],
        )  # fmt: skip
        reference = cut("reference_policy_logprobs") if self.asked.reference_policy_kl_penalty else None
        if reference is not None:
            record.reference_weights(step, self.worker.reference_model_state_dict)
        record.trainer_logprobs(step, cut("prev_logprobs"), reference=reference, version=self.scored_by)
        told: dict[str, Any] = {"estimator": self.named()} if self.named() else {}
        kind = self.asked.truncated_importance_sampling_type
        if self.asked.use_importance_sampling_correction:
            data["factor"] = (data["prev_logprobs"] - data["generation_logprobs"]).exp()
            if kind == "tis":
                most = self.asked.truncated_importance_sampling_ratio
                told["weight_cap"] = most
                data["factor"] = data["factor"].clamp(max=most)
            elif kind:
                level = "token" if kind == "icepop" else "geometric"
                low, high = (
                    self.asked.truncated_importance_sampling_ratio_min,
                    self.asked.truncated_importance_sampling_ratio,
                )
                told["masks"] = [(level, low, high)]
                ratio, inside = data["factor"], data["token_mask"]
                if kind != "icepop":
                    ratio = ((ratio.log() * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)).exp()
                data["factor"] = data["factor"] * ((low <= ratio) & (ratio <= high))
            told |= {"weights": cut("factor"), "weight_level": "token"}
            del data["factor"]
        groups = zip(self.whole["row"].tolist(), self.whole["advantages"], self.whole["token_mask"], strict=True)
        told["others"] = [
            (self.rows[row]["group"], self.rows[row]["reward"], float(values[mask.bool()][0]), int(mask.sum()))
            for row, values, mask in groups if row not in self.ids
        ]  # fmt: skip
        if any(dropped):
            told["reasons"] = ["overlong" if it else "" for it in dropped]
        del data["kept"]
        record.advantages(
            step, cut("advantages"), dtype="float32", max_staleness=step - 1 - self.sampled_by, **told,
            **({"epsilon": 1e-6, "ddof": 1} if self.estimator.name == "grpo" else {"epsilon": 0.0, "ddof": 0}),
        )  # fmt: skip
        record.loss(step, **self.objective())

    def named(self) -> str:
        """The probe's name of the estimator."""
        own = self.estimator
        if own.name != "grpo":
            return "reinforce++_baseline" if own.minus_baseline else "reinforce++"
        if own.use_leave_one_out_baseline:
            return "grpo_others" if own.normalize_rewards else "rloo"
        return "grpo" if own.normalize_rewards else "dr_grpo"

    def objective(self) -> dict[str, Any]:
        """The loss that NeMo-RL documents."""
        asked = self.asked
        name = "reinforce" if asked.disable_ppo_ratio else "cispo" if asked.use_cispo else "clipped"
        name = "gspo" if asked.sequence_level_importance_ratios else name
        told: dict[str, Any] = {"name": name, "clip_low": asked.ratio_clip_min, "clip_high": asked.ratio_clip_max}
        if asked.ratio_clip_c is not None:
            told["dual_clip"] = asked.ratio_clip_c
        told["aggregation"] = "token_mean" if asked.token_level_loss else "sequence_mean"
        if asked.reference_policy_kl_penalty:
            told |= {
                "kl_weight": asked.reference_policy_kl_penalty, "kl_kind": asked.reference_policy_kl_type,
                "kl_limit": asked.kl_output_clamp_value, "kl_ratio": "own",
            }  # fmt: skip
        return told

    def forward(self, real: Any, model: Any, inputs: Any, *args: Any, **told: Any) -> Any:
        """What the model gets of a micro-batch."""
        if torch.is_grad_enabled():
            data = self.micro
            places = torch.arange(inputs.input_ids.shape[1])[None] < data["input_lengths"][:, None]
            mask = (data["token_mask"] * data["sample_mask"][:, None]).roll(-1, 1)
            mask[:, -1] = 0
            ids = [self.ids[int(row)] for row in data["row"]]
            self.record.micro_batch(
                self.step, ids, inputs.input_ids, attention_mask=places, loss_mask=mask,
                position_ids=inputs.position_ids,
            )  # fmt: skip
        return real(model, inputs, *args, **told)

    def loss(self, real: Any, own: Any, next_token_logprobs: Any, data: Any, **told: Any) -> Any:
        """NeMo-RL's loss of a micro-batch, with each token's before the mean."""
        terms, mean, asked = [], loss_functions.masked_mean, self.asked

        def masked_mean(values: Any, mask: Any, **given: Any) -> Any:
            if values.requires_grad and values.dim() == 2:
                terms.append(values)
            return mean(values, mask, **given)

        with patch.object(loss_functions, "masked_mean", masked_mean):
            found = real(own, next_token_logprobs=next_token_logprobs, data=data, **told)
        sides = [1.0, *([1.0] if asked.reference_policy_kl_penalty else [])]
        pairs = [(1.0, terms[-1]), *([(1.0, terms[0])] if len(sides) > 1 else [])]
        self.record.token_losses(
            self.step, next_token_logprobs, pairs, ids=[self.ids[int(row)] for row in data["row"]],
            mask=(data["token_mask"] * data["sample_mask"][:, None])[:, 1:], old=data["prev_logprobs"][:, 1:],
            reference=data["reference_policy_logprobs"][:, 1:] if len(sides) > 1 else None,
        )  # fmt: skip
        return found

    def clip(self, real: Any, *args: Any, **told: Any) -> Any:
        """NeMo-RL's clip, after which the optimizer steps."""
        named = [(name, item.grad) for name, item in self.worker.model.named_parameters()]
        self.record.gradients(self.step, named)
        self.norm = real(*args, **told)
        return self.norm

    def stepped(self, losses: list[float]) -> None:
        """The end of an optimizer step."""
        self.record.step(self.step, loss=sum(losses), num_tokens=int(self.count), grad_norm=float(self.norm))
        self.record.weights_held(self.live(), self.step, after="step")
        if self.batches % self.ours["sync_every"] or self.step - self.scored_by < self.per_batch:
            self.record.weights_exported(self.sent(), self.step, live=self.live())

    # NeMo-RL's driver.

    def sampled(self, step: int) -> Any:
        """A batch as rollouts leave it."""
        asked = [EXAMPLES[(step * PROMPTS + at) % len(EXAMPLES)] for at in range(PROMPTS)]
        prompts = [self.tokenizer.encode(f"{a}+{b}=") for a, b in asked for _ in range(GROUP)]
        self.rows = [{} for _ in prompts]
        for size in {len(row) for row in prompts}:
            places = [at for at, row in enumerate(prompts) if len(row) == size]
            ends, seeds = [self.tokenizer.eos_token_id], [1000 * step + at for at in places]
            told = [prompts[at] for at in places], ends, seeds, MOST, self.policy["temperature"]
            for at, own in zip(places, self.sampler.generate(*told), strict=True):
                text, gold = self.tokenizer.decode(own["tokens"]), str(sum(asked[at // GROUP]))
                reward = round(4 * len({*text} & {*gold}) / len(gold)) / 4
                reward = self.ours["rewards"][at % GROUP] if self.ours["rewards"] else reward
                self.rows[at] = {
                    "prompt": prompts[at], "response": own["tokens"], "logprobs": own["logprobs"],
                    "reason": own["reason"], "reward": float(torch.tensor(reward)),
                    "group": f"{step}/{at // GROUP}",
                }  # fmt: skip
        logs = [
            [
                {"role": "user", "content": "", "token_ids": torch.tensor(own["prompt"])},
                {
                    "role": "assistant", "content": "", "token_ids": torch.tensor(own["response"]),
                    "generation_logprobs": torch.tensor(own["logprobs"]),
                },
            ]
            for own in self.rows
        ]  # fmt: skip
        return BatchedDataDict(
            message_log=logs, total_reward=torch.tensor([own["reward"] for own in self.rows]),
            loss_multiplier=torch.ones(len(logs)), length=torch.tensor([len(own["prompt"]) for own in self.rows]),
            truncated=torch.tensor([own["reason"] == "length" for own in self.rows]), row=torch.arange(len(logs)),
        )  # fmt: skip

    def scored(self, data: Any, reference: bool = False) -> torch.Tensor:
        """Log-probabilities by all workers, as the driver shards the batch."""
        own = data.shard_by_batch_size(self.world, batch_size=None)[self.rank]
        made = self.worker.get_reference_policy_logprobs(data=own) if reference else self.worker.get_logprobs(own)
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, made["reference_logprobs" if reference else "logprobs"])
        return torch.cat(parts)

    def train_step(self, number: int) -> None:
        """What `grpo_train` does in a step."""
        self.scored_by = self.step
        batch = self.sampled(number)
        rewards = batch["total_reward"]
        prompts, _ = batched_message_log_to_flat_message(
            grpo.extract_initial_prompt_messages(batch["message_log"], batch["length"]),
            pad_value_dict={"token_ids": self.tokenizer.pad_token_id},
        )
        if self.grpo.overlong_filtering:
            batch["loss_multiplier"][batch["truncated"]] = 0
        grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
        flat, lengths = batched_message_log_to_flat_message(
            batch["message_log"], pad_value_dict={"token_ids": self.tokenizer.pad_token_id},
            make_sequence_length_divisible_by=4,
        )  # fmt: skip
        data = BatchedDataDict(
            input_ids=flat["token_ids"], input_lengths=lengths, generation_logprobs=flat["generation_logprobs"],
            token_mask=flat["token_loss_mask"], sample_mask=batch["loss_multiplier"], row=batch["row"],
        )  # fmt: skip
        asked = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths", "token_mask", "sample_mask")})
        data["prev_logprobs"] = self.scored(asked)
        needs = self.asked.reference_policy_kl_penalty
        data["reference_policy_logprobs"] = (
            self.scored(asked, True) if needs else torch.zeros_like(data["prev_logprobs"])
        )
        grpo.compute_and_apply_seq_logprob_error_masking(data, rewards, self.grpo.seq_logprob_error_threshold)
        mask = data["token_mask"] * data["sample_mask"][:, None]
        data["advantages"] = grpo._clip_grpo_advantages(
            grpo._create_advantage_estimator(self.config).compute_advantage(
                prompt_ids=prompts["token_ids"], rewards=rewards, mask=mask, repeated_batch=batch,
                logprobs_policy=data["prev_logprobs"], logprobs_reference=data["reference_policy_logprobs"],
            ), self.grpo,
        )  # fmt: skip
        self.whole, size = data, self.policy["train_global_batch_size"]
        self.per_batch = PROMPTS * GROUP // size
        self.train(data.shard_by_batch_size(self.world, batch_size=size)[self.rank])
        self.send()

    def train(self, data: Any) -> None:
        """The worker's `train`, watched."""
        whole_batch, forward = worker_v2.process_global_batch, passes.model_forward
        clip, both = worker_v2.scale_grads_and_clip_grad_norm, worker_v2.automodel_forward_backward
        apply, post = loss.ClippedPGLossFn.__call__, passes.forward_with_post_processing_fn
        loop = self

        def one(*args: Any, **told: Any) -> Any:
            loop.micro = told["processed_mb"].data_dict
            return post(*args, **told)

        def passed(*args: Any, **told: Any) -> Any:
            found = both(*args, **told)
            loop.losses = [float(item) for item, _ in found]
            return found

        hook = self.worker.optimizer.register_step_post_hook(lambda *_: self.ended())
        with (
            patch.object(
                worker_v2, "process_global_batch", lambda *a, **k: self.process_global_batch(whole_batch, *a, **k)
            ),
            patch.object(worker_v2, "automodel_forward_backward", passed),
            patch.object(worker_v2, "scale_grads_and_clip_grad_norm", lambda *a, **k: self.clip(clip, *a, **k)),
            patch.object(passes, "model_forward", lambda *a, **k: self.forward(forward, *a, **k)),
            patch.object(passes, "forward_with_post_processing_fn", one),
            patch.object(loss.ClippedPGLossFn, "__call__", lambda own, **k: self.loss(apply, own, **k)),
        ):
            self.worker.train(data, self.loss_fn)
        hook.remove()

    def ended(self) -> None:
        """After the optimizer's step."""
        total = torch.tensor(self.losses).sum()
        torch.distributed.all_reduce(total)
        self.stepped([float(total)])


def train(checkpoint: Path, trace: Path, **settings: Any) -> None:
    """Train for some steps."""
    join()
    copied = worker_v2.get_cpu_state_dict
    with (
        probe.open(trace, model=checkpoint, dtype="float32", engine="hf", keep_every=1) as record,
        patch.object(worker_v2, "get_cpu_state_dict", lambda state, pin_memory: copied(state)),
        patch.multiple(torch.cuda, get_device_name=lambda: "cpu", synchronize=lambda: None),
        Cores(),
    ):
        torch.distributed.barrier()
        loop = Loop(checkpoint, trace, settings)
        loop.watch(record)
        loop.send()
        for number in range(loop.ours["steps"]):
            loop.train_step(number)
        loop.sampler.close()


if __name__ == "__main__":
    import yaml

    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{key: yaml.safe_load(item) for key, item in given.items()})
