"""verl's training worker on its Megatron engine, on CPU cores over gloo, recorded by `verifier.probe`.

`python verl_megatron.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of
verl's config, `actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2` under `torchrun --nproc_per_node 2`.
"""
# ruff: noqa: E402 - Megatron is imported on the CPU tier

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import peft  # noqa: F401 - looks for Transformer Engine, which the CPU tier stands in for

from verifier.platform import import_megatron

import_megatron("cpu")
sys.modules.setdefault("megatron.energon", MagicMock())  # a loader of images that Megatron-Bridge's settings import

import torch
import verl_loop  # noqa: F401 - sets verl's platform
from megatron.core import tensor_parallel
from megatron_hooks import Follower, Parts
from omegaconf import OmegaConf
from verl.models.mcore import model_forward
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron import transformer_impl
from verl_loop import ACTOR, COMMON, PROMPTS, Loop, losses, train

from verifier.mesh import Mesh

MEGATRON = f"{ACTOR}.megatron"
CONFIG = COMMON | {
    f"{ACTOR}.optim.total_training_steps": 10, f"{MEGATRON}.dtype": "float32",
    f"{MEGATRON}.override_transformer_config": {
        "gradient_accumulation_fusion": False, "persist_layer_norm": False, "masked_softmax_fusion": False,
        "bias_dropout_fusion": False, "bias_activation_fusion": False, "deallocate_pipeline_outputs": False,
        "cross_entropy_loss_fusion": False, "apply_rope_fusion": True,
    },
}  # fmt: skip
"""Settings beside verl's defaults: no kernels of a GPU."""


def seeded(seed: int) -> None:
    """Seed Megatron's random state, which verl seeds for accelerators alone."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


transformer_impl.set_random_seed = seeded
VALIDATED = McoreEngineConfig.__post_init__


def validated(config: McoreEngineConfig) -> None:
    """verl's validation, which refuses float32, though its engine has it."""
    dtype = config.dtype
    object.__setattr__(config, "dtype", "bfloat16")
    VALIDATED(config)
    object.__setattr__(config, "dtype", dtype)


McoreEngineConfig.__post_init__ = validated


class MegatronLoop(Loop):
    """The same loop on verl's Megatron engine."""

    file, defaults, scores = "_generated_ppo_megatron_trainer.yaml", CONFIG, "_lm_head_logits_processor"

    def watch(self, record: Any) -> None:
        """Hooks on the worker, the engine and the losses."""
        given, engine = self.engine.engine_config, self.engine
        mesh = Mesh(
            tp=given.tensor_model_parallel_size, pp=given.pipeline_model_parallel_size,
            dp=engine.get_data_parallel_size(),
        )  # fmt: skip
        self.parts = Parts(
            Path(engine.model_config.local_path), mesh, distributed_optimizer=given.use_distributed_optimizer
        )  # fmt: skip
        self.given: dict[str, Any] = {}
        for module in engine.module:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        super().watch(record if engine.is_mp_src_rank_with_outputs() else Follower(record))
        record.megatron_config(engine.tf_config, engine.module)

    def watch_optimizer(self) -> None:
        """Hooks on the optimizer."""
        optim, engine = self.actor.optim, self.engine
        self.real_grads, engine.optimizer.prepare_grads = engine.optimizer.prepare_grads, self.prepare_grads
        if (watched := self.parts.adam(engine.module, engine.optimizer)) is None:
            return
        self.record.optimizer(
            *watched, clip_grad=optim.clip_grad, asked={"betas": tuple(optim.betas)}, schedule=optim.lr_decay_style,
            learning_rate=optim.lr, weight_decay=optim.weight_decay, warmup_steps=max(optim.lr_warmup_steps, 0),
            total_steps=optim.total_training_steps, least_learning_rate=optim.min_lr,
            updates_per_rate=PROMPTS // self.actor.ppo_mini_batch_size * self.actor.ppo_epochs,
            parts=engine.engine_config.use_distributed_optimizer,
        )  # fmt: skip

    def prepare_grads(self) -> bool:
        """Megatron's copy of gradients for the optimizer, before they are clipped."""
        found = self.real_grads()
        self.record.gradients(self.step, self.parts.gradients(self.engine.module))
        return found

    def optimizer_step(self) -> float:
        """verl's step, whose gradients `prepare_grads` records."""
        return self.real["optimizer_step"]()

    def held(self, engine: Any) -> list[tuple[str, Any]]:
        """Tensors of an engine, joined of all ranks' by the checkpoint's names, apart from Megatron-Bridge."""
        return self.parts.held(engine.module)

    def enter(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        """What the model gets of a micro-batch."""
        self.given = given

    def _lm_head_logits_processor(self, logits: Any, label: Any, temperature: Any, **told: Any) -> Any:
        """What the model got, and the token that each of its places is to predict."""
        if torch.is_grad_enabled():
            batch, pack = told["batch"], self.given["packed_seq_params"]
            real = torch.zeros_like(label)
            sizes = batch["input_ids"].offsets().diff().tolist()
            for begin, size in zip(pack.cu_seqlens_q_padded.tolist(), sizes, strict=False):
                real[0, begin : begin + size] = 1
            self.record.micro_batch(
                self.step, [self.ids[int(row)] for row in batch["row"]], self.given["input_ids"],
                attention_mask=real, labels=label, loss_mask=self.places(pack, batch, label.shape),
                cu_seqlens=pack.cu_seqlens_q_padded, arguments={
                    name: value for name, value in vars(pack).items() if value is not None
                },
            )  # fmt: skip
        return self.real["_lm_head_logits_processor"](logits, label, temperature, **told)

    def places(self, pack: Any, batch: Any, shape: Any) -> torch.Tensor:
        """Which places of a pack predict a token in the loss, by verl's own cuts of its outputs."""
        mask, flat = batch["response_mask"], torch.arange(shape[1])[None]
        nested = model_forward.postprocess_thd_engine(flat, pack, batch["input_ids"], len(mask))
        mask = mask.to_padded_tensor(0) if mask.is_nested else mask
        found = losses.no_padding_2_padding(nested, batch)[mask.bool()]
        return torch.zeros(shape[1], dtype=torch.bool).index_fill(0, found, True).view(shape)


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    settings = {key: OmegaConf.create(f"v: {it}").v for key, it in given.items()}
    train(Path(sys.argv[1]), Path(sys.argv[2]), MegatronLoop, **settings)
