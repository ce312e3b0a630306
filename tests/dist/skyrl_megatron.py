"""SkyRL's trainer on its Megatron workers, on CPU cores over gloo, recorded by `verifier.probe`.

`python skyrl_megatron.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of
SkyRL's config, `trainer.policy.megatron_config.tensor_model_parallel_size=2` under `torchrun --nproc_per_node 2`.
"""
# ruff: noqa: E402 - Megatron is imported on the CPU tier

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import peft  # noqa: F401 - looks for Transformer Engine, which the CPU tier stands in for

from verifier.platform import import_megatron

import_megatron("cpu")
sys.modules.setdefault("megatron.energon", MagicMock())  # a loader of images that Megatron-Bridge's settings import
sys.modules.setdefault("megatron.core.dist_checkpointing.strategies.base", MagicMock())  # of megatron-core 0.18

import torch
import yaml
from megatron.core import parallel_state, tensor_parallel
from megatron_hooks import Follower, Parts
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper as wrapper
from skyrl.backends.skyrl_train.workers.megatron import megatron_worker
from skyrl_loop import CONFIG, FLOAT32, Loop, train

from verifier.mesh import Mesh

MEGATRON = "trainer.policy.megatron_config"
KERNELS = {
    "gradient_accumulation_fusion": False, "persist_layer_norm": False, "masked_softmax_fusion": False,
    "bias_dropout_fusion": False, "bias_activation_fusion": False, "deallocate_pipeline_outputs": False,
    "cross_entropy_loss_fusion": False, "apply_rope_fusion": True, "params_dtype": torch.float32,
}  # fmt: skip
"""Settings of the model: no kernels of a GPU, float32."""
DEFAULTS = {key: value for key, value in CONFIG.items() if value is not FLOAT32} | {
    "trainer.strategy": "megatron", "trainer.remove_microbatch_padding": True,
    f"{MEGATRON}.ddp_config.average_in_collective": False,
    f"{MEGATRON}.optimizer_config_kwargs": {"bf16": False, "params_dtype": "float32"},
}  # fmt: skip
"""Settings beside SkyRL's defaults; gloo has no mean."""


class MegatronLoop(Loop):
    """The same loop on SkyRL's Megatron workers."""

    kinds = (megatron_worker.MegatronPolicyWorkerBase, megatron_worker.MegatronRefWorkerBase)
    defaults = DEFAULTS
    home = wrapper

    def watch(self, record: Any) -> None:
        """Hooks on the worker, the model, the strategy and the trainer."""
        given, worker = self.own.policy.megatron_config, self.worker
        mesh = Mesh(
            tp=given.tensor_model_parallel_size, pp=given.pipeline_model_parallel_size, dp=worker.mesh_rank.dp_size
        )
        self.parts = Parts(Path(self.own.policy.model.path), mesh)
        super().watch(record if worker.mesh_rank.is_collection_dp_rank() else Follower(record))
        record.megatron_config(wrapper.get_model_config(worker.actor_module[0]), worker.actor_module)

    def hook(self) -> dict[str, Any]:
        """Hooks on the worker's passes."""
        model = self.worker.model
        real, model.policy_loss_fn = model.policy_loss_fn, self.policy_loss
        for module in self.worker.actor_module:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        told = self.config.generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB
        self.extractor = self.worker.weight_extractor = megatron_worker.MegatronWeightExtractor(
            self.worker.bridge, self.worker.actor_module, True, told, torch.float32
        )
        return {"policy_loss_fn": real}

    def watch_optimizer(self) -> None:
        """Hooks on the optimizer."""
        optim, own = self.own.policy.optimizer_config, self.worker.optimizer
        self.real_grads, own.prepare_grads = own.prepare_grads, self.prepare_grads
        if (watched := self.parts.adam(self.worker.actor_module, own)) is None:
            return
        self.record.optimizer(
            *watched, clip_grad=optim.max_grad_norm, asked={"betas": tuple(optim.adam_betas)}, schedule="constant",
            learning_rate=optim.lr, weight_decay=optim.weight_decay, warmup_steps=optim.num_warmup_steps,
            total_steps=10, parts=True,
        )  # fmt: skip

    def prepare_grads(self) -> bool:
        """Megatron's copy of gradients for the optimizer, before they are clipped."""
        found = self.real_grads()
        self.record.gradients(self.step, self.parts.gradients(self.worker.actor_module))
        return found

    def optimizer_step(self, *args: Any, **told: Any) -> Any:
        """SkyRL's step, whose gradients `prepare_grads` records."""
        norm = self.real["optimizer_step"](*args, **told)
        self.stepped(norm)
        return norm

    def live(self) -> list[tuple[str, Any]]:
        """Weights, joined of all ranks' by the checkpoint's names, apart from Megatron-Bridge."""
        return self.held(self.worker)

    def held(self, worker: Any) -> list[tuple[str, Any]]:
        """Weights of a worker."""
        return self.parts.held(worker.actor_module)

    def entered(self, experience: Any, batch: Any) -> Any:
        """A micro-batch as the worker makes it, all of them before the first pass."""
        self.micros.append(batch)
        return experience(batch)

    def enter(self, _: Any, args: Any, given: dict[str, Any]) -> None:
        """What the model gets of a micro-batch, and the token that each of its places is to predict."""
        if not torch.is_grad_enabled():
            return
        self.micro = self.micros.pop(0)
        tokens, real, pack = args[0], self.micro["attention_mask"].sum(-1).tolist(), given["packed_seq_params"]
        width = self.micro["loss_mask"].shape[1]
        begins = [at * tokens.shape[1] for at in range(len(tokens))] if pack is None else pack.cu_seqlens_q_padded
        mask, kept = torch.zeros(tokens.numel()), torch.zeros(tokens.numel())
        for begin, size, row in zip(list(begins), real, self.micro["loss_mask"], strict=False):
            kept[begin : begin + size] = 1
            most = min(width, size - 1)
            mask[begin + size - most - 1 : begin + size - 1] = row[width - most :]
        told: dict[str, Any] = {"position_ids": args[1]} if pack is None else {
            "cu_seqlens": pack.cu_seqlens_q_padded,
            "arguments": {name: value for name, value in vars(pack).items() if value is not None},
        }  # fmt: skip
        self.record.micro_batch(
            self.step, self.names(), tokens, attention_mask=kept.view(tokens.shape),
            loss_mask=mask.view(tokens.shape), **told,
        )  # fmt: skip

    def forward_backward(self, data: Any, **told: Any) -> Any:
        """Passes of SkyRL's worker; all that a micro-batch's loss is of is known where it is compared with samples'."""
        self.micros: list[Any] = []
        real = wrapper.compute_minibatch_rollout_logprob_diff_metrics

        def compared(*args: Any) -> Any:
            self.record_losses(self.names())
            return real(*args)

        with patch.object(wrapper, "compute_minibatch_rollout_logprob_diff_metrics", compared):
            return super().forward_backward(data, **told)


def seeded(strategy: Any, seed: int) -> None:
    """Seed Megatron's random state, which SkyRL seeds for accelerators alone."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def once(**sizes: Any) -> None:
    """Groups of Megatron, which a process's policy and reference share here: SkyRL gives each a process."""
    if not parallel_state.model_parallel_is_initialized():
        INITIALIZED(**sizes)


INITIALIZED = parallel_state.initialize_model_parallel
parallel_state.initialize_model_parallel = once
megatron_worker.MegatronStrategy.set_seed = seeded
megatron_worker.patch_fa2_head_dim_allowlist = lambda: None
CONFIGURED = megatron_worker.MegatronWorker.init_configs


def configured(worker: Any, *args: Any, **told: Any) -> None:
    """SkyRL's settings of a model, without kernels of a GPU."""
    finalize = megatron_worker.AutoBridge.to_megatron_provider

    def provider(bridge: Any, *given: Any, **more: Any) -> Any:
        made = finalize(bridge, *given, **more)
        real = made.finalize

        def ended() -> None:
            for name, value in KERNELS.items():
                setattr(made, name, value)
            real()

        made.finalize = ended
        return made

    with patch.object(megatron_worker.AutoBridge, "to_megatron_provider", provider):
        CONFIGURED(worker, *args, **told)


megatron_worker.MegatronWorker.init_configs = configured

if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), MegatronLoop, **{k: yaml.safe_load(item) for k, item in given.items()})
