"""slime's rollout manager and Megatron actor on CPU cores over gloo, recorded by `verifier.probe`.

`python slime_loop.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are slime's
arguments, `tensor-model-parallel-size=2` under `torchrun --nproc_per_node 2`; `yes` gives one that takes no value.
"""
# ruff: noqa: E402 - what slime imports and nothing here calls is put in place first

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import peft  # noqa: F401 - looks for Transformer Engine, which the CPU tier stands in for

from verifier.platform import import_megatron

import_megatron("cpu")
import numpy as np
import ray
import torch
from foreign_process import Uncalled, join
from grpo_engines import TransformersEngine
from megatron.core import num_microbatches_calculator
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.training.global_vars import destroy_global_vars
from transformers import AutoTokenizer

from verifier import probe

stands = Uncalled("sglang", "sglang_router", "torch_memory_saver", "wandb", "qwen_vl_utils", "pylatexenc")
torch._dynamo.config.disable = True
from slime.utils import accelerator, arguments
from slime.utils.accelerator.base import Accelerator


class Cores(Accelerator):
    """CPU cores, as slime takes a backend."""

    name = device_type = "cpu"
    communication_backend_name = "gloo"
    is_available = lambda self: True  # noqa: E731
    device = lambda self, index=None: torch.device("cpu")  # noqa: E731
    device_name = current_device = lambda self, index=None: "cpu"
    device_count = lambda self: 1  # noqa: E731
    set_device = synchronize = current_stream = lambda self, index=None: None
    empty_cache = lambda self: None  # noqa: E731
    mem_get_info = lambda self, device=None: (0, 0)  # noqa: E731
    memory_allocated = memory_reserved = lambda self, device=None: 0


accelerator.set_accelerator(Cores())
from slime.backends.megatron_utils import actor as actors
from slime.backends.megatron_utils import initialize, loss, model
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as senders
from slime.observability.timer import Timer
from slime.ray import rollout
from slime.utils.types import Sample

stands.end()
from megatron_hooks import Follower, Parts

from verifier.mesh import Mesh

PROMPTS, GROUP, MOST = 4, 4, 8
STEPS = 2
EXAMPLES = [(a, b) for a in (2, 7, 11, 15) for b in (3, 21, 110, 123)]
ARGUMENTS = {
    "swiglu": True, "group-query-attention": True, "use-rotary-position-embeddings": True, "qk-layernorm": True,
    "disable-bias-linear": True, "normalization": "RMSNorm", "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "no-gradient-accumulation-fusion": True, "no-persist-layer-norm": True, "no-masked-softmax-fusion": True,
    "no-bias-dropout-fusion": True, "no-bias-swiglu-fusion": True, "transformer-impl": "transformer_engine",
    "num-rollout": 10, "rollout-batch-size": PROMPTS, "n-samples-per-prompt": GROUP, "micro-batch-size": 4,
    "global-batch-size": PROMPTS * GROUP, "rollout-max-response-len": MOST, "debug-train-only": True,
    "spec": "slime_loop layers", "optimizer": "adam", "lr": 1e-3, "lr-decay-style": "constant", "weight-decay": 0.1,
    "adam-beta1": 0.9, "adam-beta2": 0.98, "make-vocab-size-divisible-by": 16, "clip-grad": 1.0, "seed": 1,
    "rollout-num-gpus": 1,
}  # fmt: skip
"""Arguments beside slime's defaults, as its scripts for Qwen3 give them: no kernels of a GPU, no engine of SGLang."""
OURS = {"steps": STEPS, "sync_every": 1, "removed": False, "split": False, "bf16": False}
"""Settings of the loop: `removed` leaves overlong samples out, `split` cuts a rollout in two samples."""
ESTIMATORS = {
    **{name: {"estimator": "grpo", "epsilon": 1e-6, "ddof": 1} for name in ("grpo", "gspo", "cispo")},
    "reinforce_plus_plus": {"estimator": "reinforce++", "ddof": 1},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce++_baseline", "ddof": 1},
}  # fmt: skip
"""slime's name of an estimator -> what the probe is told."""


def layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Layers of a model, as megatron-core makes them now; slime's own call has an argument of an older one."""
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)


def parsed(checkpoint: Path, settings: Mapping[str, Any]) -> Any:
    """slime's arguments, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    of_model = {
        "num-layers": config["num_hidden_layers"], "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"], "num-attention-heads": config["num_attention_heads"],
        "num-query-groups": config["num_key_value_heads"], "kv-channels": config["head_dim"],
        "vocab-size": config["vocab_size"], "norm-epsilon": config["rms_norm_eps"],
        "rotary-base": int(config["rope_theta"]), "hf-checkpoint": checkpoint, "load": checkpoint,
        "ref-load": checkpoint, "untie-embeddings-and-output-weights": not config["tie_word_embeddings"],
        "actor-num-gpus-per-node": os.environ["WORLD_SIZE"], "num-gpus-per-node": os.environ["WORLD_SIZE"],
    }  # fmt: skip
    given = {**ARGUMENTS, **of_model, **settings}
    line = [part for key, value in given.items() if value is not False for part in (f"--{key}", *(
        [] if value is True else str(value).split()
    ))]  # fmt: skip
    with (
        patch.object(sys, "argv", ["train.py", *line]),
        patch("megatron.training.arguments.get_device_arch_version", lambda: 9),
    ):
        args = arguments.parse_args()
    args.debug_train_only = False
    return args


class Loop:
    """slime's step by its own functions, with what `verifier.probe` is handed."""

    def __init__(self, checkpoint: Path, trace: Path, settings: Mapping[str, Any]) -> None:
        self.ours = {key: settings.get(key, value) for key, value in OURS.items()}
        self.args = args = parsed(checkpoint, {key: item for key, item in settings.items() if key not in OURS})
        args.bf16, args.params_dtype = self.ours["bf16"], torch.bfloat16 if self.ours["bf16"] else torch.float32
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.actor = object.__new__(actors.MegatronTrainRayActor)
        self.actor._rank = self.rank
        self.has_reference = args.use_kl_loss or args.kl_coef != 0
        self.actor.init(args, "actor", with_ref=self.has_reference)
        if self.has_reference:
            self.actor._switch_model("actor")
        self.manager = object.__new__(rollout.RolloutManager.__ray_metadata__.modified_class)
        self.manager.__dict__ |= {
            "args": args, "custom_reward_post_process_func": None, "custom_convert_samples_to_train_data_func": None,
            "train_parallel_config": self.actor.train_parallel_config,
        }  # fmt: skip
        engines = [MagicMock()], MagicMock()
        self.actor.weight_updater.connect_rollout_engines(*engines)
        self.actor.rollout_manager = MagicMock()
        self.actor.rollout_manager.get_updatable_engines_and_lock.remote.return_value = *engines, 0, None, None, None
        mesh = Mesh(tp=args.tensor_model_parallel_size, cp=args.context_parallel_size, dp=self.data_size)
        self.parts = Parts(checkpoint, mesh)
        self.sampler = TransformersEngine(checkpoint, trace) if self.rank == 0 else None
        self.trace, self.step, self.sampled_by, self.scored_by, self.batches = trace, 0, 0, 0, 0

    @property
    def data_size(self) -> int:
        """Number of ranks with other samples."""
        return int(mpu.get_data_parallel_world_size(with_context_parallel=False))

    # What the probe watches.

    def watch(self, record: Any) -> None:
        """Hooks on the model and the optimizer."""
        is_first = mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0
        self.record, args, optimizer = record if is_first else Follower(record), self.args, self.actor.optimizer
        self.real_grads, optimizer.prepare_grads = optimizer.prepare_grads, self.prepare_grads
        if (watched := self.parts.adam(self.actor.model, optimizer)) is not None:
            steps = args.lr_decay_iters
            self.record.optimizer(
                *watched, clip_grad=args.clip_grad, asked={"betas": (args.adam_beta1, args.adam_beta2)},
                schedule=args.lr_decay_style, learning_rate=args.lr, weight_decay=args.weight_decay,
                warmup_steps=args.lr_warmup_iters, total_steps=steps, least_learning_rate=args.min_lr,
                vectors_decay=False, parts=True, divisor=1.0 if args.calculate_per_token_loss else None,
            )  # fmt: skip
        for module in self.actor.model:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        record.weights_held(self.parts.held(self.actor.model), 0, after="load")

    def send(self) -> None:
        """Send the weights by slime's actor, whose engine is a process that samples."""
        if self.batches % self.ours["sync_every"] == 0:
            self.chunks: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
            self.actor.update_weights()
            self.exported(is_sent=True)
            self.sampled_by = self.step
        self.batches += 1

    def exported(self, *, is_sent: bool) -> None:
        """Record what was sent, or what would be."""
        live = self.parts.held(self.actor.model)
        if not is_sent:
            self.chunks = []
            self.actor.weight_updater._send_weights(MagicMock())
        named = [pair for _, pairs in self.chunks for pair in pairs]
        if self.rank:
            return
        if not is_sent:
            self.record.weights_exported(named, self.step, live=live)
            return
        told = {key: [item for own, _ in self.chunks for item in own[key]] for key in ("names", "dtypes", "shapes")}
        told["dtype_names"] = [str(item).removeprefix("torch.") for item in told.pop("dtypes")]
        self.sampler.sync(self.record.sending(iter(named), self.step, live=live, told=told), self.step, self.trace)

    def broadcast(self, group_name: str, group: Any, version: int, engines: Any, named: Any, **_: Any) -> list[Any]:
        """What slime tells its engines, and the tensors that it broadcasts."""
        told = {
            "names": [name for name, _ in named], "dtypes": [item.dtype for _, item in named],
            "shapes": [item.shape for _, item in named],
        }  # fmt: skip
        self.chunks.append((told, [(name, item.detach().clone()) for name, item in named]))
        return []

    def train(self, real: Any, *args: Any, **told: Any) -> Any:
        """slime's optimizer steps on one batch; what its estimator made of all ranks' samples."""
        data = args[4][0].rollout_data
        own = {
            place: float(self.whole(data["advantages"][at], data, at)[0]) for at, place in enumerate(data["partition"])
        }  # fmt: skip
        every: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(every, own)
        self.advantages = {place: value for part in every for place, value in part.items()}
        self.per_batch = len(args[5])
        return real(*args, **told)

    def whole(self, values: torch.Tensor, data: Any, at: int) -> torch.Tensor:
        """Values of a whole response of a rank's part of it."""
        return all_gather_with_cp(values, data["total_lengths"][at], data["response_lengths"][at])

    def train_one_step(
        self, real: Any, args: Any, rollout_id: int, step_id: int, iterators: Any, *more: Any, **told: Any
    ) -> Any:
        """An optimizer step of slime."""
        self.step += 1
        self.iterator, count, self.size = iterators[0], more[3], more[4]
        parts = self.iterator.micro_batch_indices[self.iterator.offset : self.iterator.offset + count]
        self.places, self.data = [at for part in parts for at in part], self.iterator.rollout_data
        self.taken: dict[str, dict[str, torch.Tensor]] = {"old": {}, "weights": {}}
        self.record_rollouts()
        found = real(args, rollout_id, step_id, iterators, *more, **told)
        self.record.step(self.step, loss=found[0]["loss"], num_tokens=self.num_tokens, grad_norm=float(found[1]))
        self.record.weights_held(self.parts.held(self.actor.model), self.step, after="step")
        if self.batches % self.ours["sync_every"] or self.step - self.scored_by < self.per_batch:
            self.exported(is_sent=False)
        return found

    def cut(self, key: str) -> list[torch.Tensor]:
        """Values of the responses of a step."""
        return [self.whole(self.data[key][at], self.data, at) for at in self.places]

    def record_rollouts(self) -> None:
        """The samples of a step on this rank."""
        data, step = self.data, self.step
        self.own = [self.rows[data["partition"][at]] for at in self.places]
        self.ids = [f"{step}/{data['partition'][at]}" for at in self.places]
        masks, lengths = (
            [data["loss_masks"][at] for at in self.places],
            [data["response_lengths"][at] for at in self.places],
        )
        counts = torch.stack([torch.tensor(float(sum(int(mask.sum()) for mask in masks)))])
        torch.distributed.all_reduce(counts, group=mpu.get_data_parallel_group_gloo())
        self.num_tokens = int(counts)
        if self.has_reference:
            self.record.reference_weights(step, [
                pair for name, item in self.actor.weights_backuper.get("ref").items()
                for pair in convert_to_hf(self.args, self.actor.weight_updater.model_name, name, item, None)
            ])  # fmt: skip
        self.record.rollouts(
            step, prompts=[data["tokens"][at][:-size] for at, size in zip(self.places, lengths, strict=True)],
            responses=[data["tokens"][at][-size:] for at, size in zip(self.places, lengths, strict=True)],
            loss_mask=masks, engine_logprobs=self.cut("rollout_log_probs"), versions=self.sampled_by,
            rewards=[it["reward"] for it in self.own], groups=[it["group"] for it in self.own], ids=self.ids,
            end_token=self.tokenizer.eos_token_id, max_response_tokens=MOST,
            finish_reasons=[it["reason"] for it in self.own], temperature=self.args.rollout_temperature,
        )  # fmt: skip

    def record_advantages(self) -> None:
        """What the loss of a step is of, once its passes have been made: slime may take what they score for "old"."""
        is_scored = bool(self.data.get("log_probs"))
        old = self.cut("log_probs") if is_scored else [self.taken["old"][name] for name in self.ids]
        reference = self.cut("ref_log_probs") if self.has_reference else None
        self.record.trainer_logprobs(
            self.step, old, reference=reference, version=self.scored_by if is_scored else None
        )  # fmt: skip
        told: dict[str, Any] = dict(ESTIMATORS[self.args.advantage_estimator])
        if told["estimator"] == "grpo" and not self.args.grpo_std_normalization:
            told = {"estimator": "dr_grpo"}
        if self.args.kl_coef:  # of each token, which no estimator of the probe has
            told = {}
        trained = {self.data["partition"][at] for at in self.places}
        told["others"] = [
            (it["group"], it["reward"], self.advantages[place], it["tokens"])
            for place, it in enumerate(self.rows) if place not in trained
        ]  # fmt: skip
        if self.args.use_rollout_logprobs:
            told["ratio_over"] = "engine"
        if self.args.use_tis:
            told |= {"weights": [self.taken["weights"][name] for name in self.ids], "weight_level": "token"}
            if self.args.custom_tis_function_path:
                told["masks"] = [("token", self.args.tis_clip_low, self.args.tis_clip)]
            else:
                told |= {"weight_floor": self.args.tis_clip_low, "weight_cap": self.args.tis_clip}
        if any(it["dropped"] for it in self.own):
            told["reasons"] = [it["dropped"] for it in self.own]
        self.record.advantages(
            self.step, self.cut("advantages"), dtype="float32", max_staleness=self.step - 1 - self.sampled_by, **told
        )  # fmt: skip
        self.record.loss(self.step, **self.objective())

    def objective(self) -> dict[str, Any]:
        """The loss that slime documents."""
        args = self.args
        name = args.advantage_estimator if args.advantage_estimator in ("gspo", "cispo") else "clipped"
        told: dict[str, Any] = {"name": name, "clip_low": args.eps_clip, "clip_high": args.eps_clip_high}
        if args.eps_clip_c is not None:
            told["dual_clip"] = args.eps_clip_c
        if args.use_kl_loss:
            told |= {"kl_weight": args.kl_loss_coef, "kl_kind": args.kl_loss_type.replace("low_var_kl", "k3")}
            told |= {"kl_limit": 10.0 if args.kl_loss_type == "low_var_kl" else None, "kl_ratio": args.use_unbiased_kl}
        told["entropy_weight"] = args.entropy_coef
        if args.calculate_per_token_loss:
            return {**told, "aggregation": "token_mean"}
        if self.ours["split"]:
            return {
                **told,
                "aggregation": "prompt_mean",
                "parts": [it["rollout"] for it in self.own],
                "divisor": self.size,
            }
        return {**told, "aggregation": "sequence_mean", "divisor": self.size}

    def micro(self) -> list[int]:
        """Samples of the micro-batch that the model has."""
        return list(self.iterator.micro_batch_indices[self.iterator.offset - 1])

    def name(self, at: int) -> str:
        """Id of a sample."""
        return f"{self.step}/{self.data['partition'][at]}"

    def enter(self, _: Any, args: Any, given: dict[str, Any]) -> None:
        """What the model gets of a micro-batch."""
        if torch.is_grad_enabled() and self.parts.mesh.cp == 1:
            pack = given["packed_seq_params"]
            self.record.micro_batch(
                self.step, [self.name(at) for at in self.micro()], given["input_ids"], loss_mask=given["loss_mask"],
                cu_seqlens=pack.cu_seqlens_q,
                arguments={name: value for name, value in vars(pack).items() if value is not None},
            )  # fmt: skip

    def scores(self, real: Any, *args: Any, **told: Any) -> Any:
        """slime's log-probabilities of a micro-batch, as parts of one tensor."""
        empty, found = real(*args, **told)
        self.terms = []
        if torch.is_grad_enabled():
            for key, rows in found.items():
                self.terms.append(torch.cat(rows))
                found[key] = [*self.terms[-1].split([len(row) for row in rows])]
            self.take("old", found["log_probs"])
        return empty, found

    def take(self, key: str, rows: Iterable[torch.Tensor]) -> None:
        """Keep values of a micro-batch, by the ids of its samples."""
        for at, row in zip(self.micro(), rows, strict=True):
            self.taken[key][self.name(at)] = self.whole(row.detach(), self.data, at)

    def weights(self, real: Any, args: Any, *, pg_loss: torch.Tensor, **told: Any) -> Any:
        """slime's importance weights of a micro-batch."""
        factor, *_ = real(args, pg_loss=torch.ones_like(pg_loss), **told)
        self.take("weights", factor.split([len(row) for row in told["rollout_log_probs"]]))
        return real(args, pg_loss=pg_loss, **told)

    def reducer(self, real: Any, lengths: Any, sizes: Any, *args: Any) -> Any:
        """slime's mean over the tokens of a micro-batch."""
        reduced = real(lengths, sizes, *args)

        def mean(values: torch.Tensor) -> torch.Tensor:
            self.terms.append(values)
            return reduced(values)

        return mean

    def policy_loss(self, real: Any, args: Any, batch: Any, logits: Any, *more: Any) -> Any:
        """slime's loss of a micro-batch, with each token's before the sum."""
        found = real(args, batch, logits, *more)
        if self.parts.mesh.cp > 1:
            return found
        logprobs, entropies, policy, _, _, entropy, *rest = self.terms
        pairs = [(1.0, policy)]
        if args.use_kl_loss:
            pairs.append((args.kl_loss_coef, rest[0]))
        if args.entropy_coef:
            pairs.append((-args.entropy_coef, entropy))
        old = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
        scale = float(self.num_tokens) if args.calculate_per_token_loss else 1.0
        self.record.token_losses(
            self.step, logprobs, pairs, ids=[self.name(at) for at in self.micro()],
            mask=torch.cat(batch["loss_masks"]), scale=scale,
            entropies=entropies if args.entropy_coef else None,
            old=torch.cat(batch[old]) if batch.get(old) else logprobs.detach(),
            reference=torch.cat(batch["ref_log_probs"]) if args.use_kl_loss else None,
        )  # fmt: skip
        return found

    def prepare_grads(self) -> bool:
        """Megatron's copy of gradients for the optimizer, before they are clipped."""
        found = self.real_grads()
        self.record_advantages()
        self.record.gradients(self.step, self.parts.gradients(self.actor.model))
        return bool(found)

    # slime's driver.

    def samples(self, step: int) -> list[Sample]:
        """What slime's rollout function returns."""
        asked = [EXAMPLES[(step * PROMPTS + at) % len(EXAMPLES)] for at in range(PROMPTS)]
        prompts = [self.tokenizer.encode(f"{a}+{b}=") for a, b in asked for _ in range(GROUP)]
        rows: list[dict[str, Any]] = [{} for _ in prompts]
        if self.sampler is not None:
            for size in {len(row) for row in prompts}:
                places = [at for at, row in enumerate(prompts) if len(row) == size]
                ends, seeds = [self.tokenizer.eos_token_id], [1000 * step + at for at in places]
                told = [prompts[at] for at in places], ends, seeds, MOST, self.args.rollout_temperature
                for at, own in zip(places, self.sampler.generate(*told), strict=True):
                    text, gold = self.tokenizer.decode(own["tokens"]), str(sum(asked[at // GROUP]))
                    is_long = self.ours["removed"] and own["reason"] == "length"
                    rows[at] = {
                        "prompt": prompts[at], **own, "dropped": "overlong" if is_long else "",
                        "rollout": at // 2 if self.ours["split"] else at,
                        "reward": float(torch.tensor(len({*text} & {*gold}) / len(gold))),
                        "group": f"{step}/{at // GROUP}", "tokens": 0 if is_long else len(own["tokens"]),
                        "response": own["tokens"],
                    }  # fmt: skip
        torch.distributed.broadcast_object_list(rows)
        self.rows = rows
        return [
            Sample(
                group_index=at // GROUP, index=at, tokens=row["prompt"] + row["response"],
                response_length=len(row["response"]), reward=row["reward"], rollout_log_probs=row["logprobs"],
                remove_sample=bool(row["dropped"]), rollout_id=row["rollout"], metadata={},
                status=Sample.Status.TRUNCATED if row["reason"] == "length" else Sample.Status.COMPLETED,
            )
            for at, row in enumerate(rows)
        ]  # fmt: skip

    def train_step(self, number: int) -> None:
        """What slime's `train.py` does with a rollout."""
        self.scored_by = self.step
        data = self.manager._convert_samples_to_train_data(self.samples(number))
        self.actor.train(number, self.manager._split_train_data_by_dp(data))
        self.send()

    def hooks(self) -> Iterator[Any]:
        """Patches of slime's modules while the loop runs."""
        for owner, name, hook in (
            (actors, "train", self.train), (model, "train_one_step", self.train_one_step),
            (loss, "get_log_probs_and_entropy", self.scores), (loss, "get_sum_of_sample_mean", self.reducer),
            (loss, "policy_loss_function", self.policy_loss), (loss, "vanilla_tis_function", self.weights),
            (loss, "icepop_function", self.weights),
        ):  # fmt: skip
            real = getattr(owner, name)
            yield patch.object(owner, name, lambda *args, hook=hook, real=real, **told: hook(real, *args, **told))
        yield patch.object(senders, "update_weights_from_distributed", self.broadcast)


@contextlib.contextmanager
def on_cores() -> Iterator[None]:
    """What slime asks of Ray, of NCCL and of GPUs, within this process."""
    empty, joined = torch.empty_like, torch.distributed.init_process_group

    def empty_like(*args: Any, pin_memory: bool = False, **told: Any) -> torch.Tensor:
        return empty(*args, **told)

    def once(*args: Any, **told: Any) -> None:
        if not torch.distributed.is_initialized():
            joined("gloo")

    with (
        patch.multiple(ray, put=lambda item: item, get=lambda item: item),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.distributed, "init_process_group", once),
        patch.object(senders, "connect_rollout_engines_from_distributed", lambda *_, **__: None),
        patch.object(actors, "monkey_patch_torch_dist", lambda: None),
        patch.object(actors, "register_default_process_group", lambda **_: None),
        patch.object(actors, "init_tracking", lambda *_, **__: None),
        patch.object(initialize, "np", SimpleNamespace(__version__="1.26.4", random=np.random)),  # it refuses 2
    ):
        yield


def train(checkpoint: Path, trace: Path, **settings: Any) -> None:
    """Train for some steps; settings of slime beside `ARGUMENTS`, and `OURS`."""
    join()
    dtype = "bfloat16" if settings.get("bf16") else "float32"
    with (
        probe.open(trace, model=checkpoint, dtype=dtype, sends=dtype, engine="hf", keep_every=1) as record,
        on_cores(),
        contextlib.ExitStack() as stack,
    ):
        torch.distributed.barrier()
        loop = Loop(checkpoint, trace, settings)
        for hook in loop.hooks():
            stack.enter_context(hook)
        loop.watch(record)
        loop.send()
        for number in range(loop.ours["steps"]):
            loop.train_step(number)
        if loop.sampler is not None:
            loop.sampler.close()
    mpu.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_global_vars()
    Timer().start_time.clear()
    gc.collect()  # many loops may run in one process


if __name__ == "__main__":
    import yaml

    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{key: yaml.safe_load(item) for key, item in given.items()})
