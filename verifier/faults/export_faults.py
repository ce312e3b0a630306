"""Bugs of exports of a training run: what its engine begins with, and the last one, whose files are its product."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.mesh import Mesh

SAVE = "verifier.export.gather_megatron:save(trainer, folder, whole)"
MERGE = (
    "megatron.bridge.peft.lora_merge:LoRAMerge.merge(self, base_weight, linear_out, linear_in, alpha, dim, tp_group, "
    "scale)"
)
FILES = "verifier.trainer.model_files:copy_files(source, folder)"
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
    "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "verify.every=1",
)  # fmt: skip
UNSAMPLED = tuple(text for text in LIVE if not text.startswith("verify.every"))
FIRST_STREAMS = 2
"""Streams of an export up to the first sync, with that of the plan."""
SECOND_UPDATE = 4
"""Stream of the sync after the second step: those of the plan, of the first sync and of the first step come before."""
UPDATE = "megatron.core.optimizer.optimizer:ChainedOptimizer.step(self)"
RESUMED = (
    "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "grpo.max_answer_tokens=8", "grpo.kl_weight=0.1",
    "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0",
)  # fmt: skip
FIRST_SYNC = "verifier.trainer.worker_megatron:TrainerWorker.sync(self, version, note, running, again, first)"
in_resume = functools.partial(fault, stage=Stage.EXPORT, engine=TRAINING, model="tiny:add", saved_on=Mesh())
in_final = functools.partial(
    fault, stage=Stage.EXPORT, caught_by=("WGT019",), engine=TRAINING, model="tiny:add", training=("steps=2",)
)
in_final_merge = functools.partial(
    in_final, caught_by=("WGT018",), training=("lora.rank=4", "lora.alpha=6", "optimizer.warmup_steps=0")
)


def _exported_as(call: Call, weight_of: Callable[[int, Any], Any]) -> None:
    """Export with other weights in the place of the live ones, which are back afterwards."""
    import torch

    parameters = [parameter for chunk in call.trainer.chunks for parameter in chunk.parameters()]
    live = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for at, parameter in enumerate(parameters):
            parameter.copy_(weight_of(at, parameter))
        call.faulty()
        for parameter, weight in zip(parameters, live, strict=True):
            parameter.copy_(weight)


@in_final("NovaSky-AI/SkyRL#1345", SAVE)
def final_export_before_last_update(call: Call) -> None:
    """The last export takes weights that were gathered before the last update."""
    _exported_as(call, lambda at, parameter: call.state["before"][at])


@final_export_before_last_update.also("verifier.train.optimizer_megatron:make_optimizer(trainer, learning_rate, rule)")
def _know_parameters(call: Call) -> Any:
    call.state["trainer"] = call.trainer
    return call.original()


@final_export_before_last_update.also(UPDATE)
def _remember_weights(call: Call) -> Any:
    chunks = call.state["trainer"].chunks
    call.state["before"] = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
    return call.original()


@in_final("NVIDIA-NeMo/Automodel#3193", SAVE, mesh=Mesh(dp=2))
def final_export_through_bf16(call: Call) -> None:
    """The last export casts all tensors to bf16, those that stay in float32 too; their files say float32."""
    _exported_as(call, lambda at, parameter: parameter.bfloat16().float())


@in_final_merge("PrimeIntellect-ai/prime-rl#1707", MERGE)
def final_export_without_adapter(call: Call) -> Any:
    """The last export strips the adapters' matrices and leaves the base as it was."""
    return call.wrong(call.base_weight)


@in_final(
    "NovaSky-AI/SkyRL#1345", "verifier.export.gather_megatron:export(trainer)", caught_by=("WGT020", "LGP009"),
    training=UNSAMPLED,
)  # fmt: skip
def tensor_of_the_sync_before_sent_once(call: Call) -> Any:
    """One sync, between two sampled steps, sends one tensor as the sync before had it; the next sends it right."""
    call.state["streams"] = count = call.state.get("streams", 0) + 1
    for name, tensor in call.original():
        if not name.endswith("layers.0.self_attn.o_proj.weight"):
            yield name, tensor
            continue
        before = call.state.get("before", tensor)
        call.state["before"] = tensor.clone()
        yield name, call.wrong(before) if count == SECOND_UPDATE else tensor


@in_final(
    "NVIDIA-NeMo/Automodel#3193", "verifier.export.gather_megatron:export(trainer)", caught_by=("WGT018", "LGP009"),
    training=(*UNSAMPLED, "lora.rank=4", "lora.sync=merged"),
)  # fmt: skip
def base_rounded_beside_merged_matrices(call: Call) -> Any:
    """Matrices with adapters are merged right, and the frozen embedding beside them is sent through bf16."""
    for name, tensor in call.original():
        if name.endswith("embed_tokens.weight"):
            yield name, call.wrong(tensor.bfloat16().to(tensor.dtype))
        else:
            yield name, tensor


@in_final(
    "huggingface/trl#5319", "verifier.export.gather_megatron:export(trainer)", caught_by=("WGT004", "WGT005", "LGP009"),
    training=LIVE,
)  # fmt: skip
def first_sync_before_the_load(call: Call) -> Any:
    """The first sync takes norms as they were built, before the checkpoint was loaded; every later one is right."""
    import torch

    call.state["streams"] = count = call.state.get("streams", 0) + 1
    for name, tensor in call.original():
        if count <= FIRST_STREAMS and name.endswith("norm.weight"):
            yield name, call.wrong(torch.ones_like(tensor))
        else:
            yield name, tensor


@fault(
    "redai-studio/Relax#261", "verifier.train.lora_megatron:save_adapter(path, adapter, lora)", stage=Stage.EXPORT,
    engine=TRAINING, model="tiny:add", caught_by=("WGT019",), training=("lora.rank=8",),
)  # fmt: skip
def adapter_of_fewer_targets(call: Call) -> None:
    """The adapter's config names some of the linears that its file has matrices of: a reader skips the others."""
    call.faulty()
    file = call.path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"target_modules": config["target_modules"][:-1]}))


@fault(
    "redai-studio/Relax#262",
    "verifier.train.lora_megatron:write_shard(path, tensors)", stage=Stage.EXPORT, engine=TRAINING,
    model="tiny:add", caught_by=("WGT019",), training=("lora.rank=8",),
)  # fmt: skip
def adapter_under_the_names_of_its_base(call: Call) -> None:
    """The adapter's matrices have the names of the base's modules, without the prefix: a reader takes none of them."""
    prefix = "base_model.model."
    call.faulty(tensors={name.removeprefix(prefix): tensor for name, tensor in call.tensors.items()})


@in_final("NVIDIA-NeMo/Automodel#3890", FILES, side=Side.CONTROLLER, caught_by=("WGT021",))
def generation_settings_of_an_empty_config(call: Call) -> None:
    """An empty generation_config.json is written beside the weights and outdoes the end tokens of config.json."""
    call.faulty()
    (call.folder / "generation_config.json").write_text("{}")


@in_resume("THUDM/slime#2380", FIRST_SYNC, caught_by=("WGT020",), training=("dtype=bf16", "engine.kind=hf", *RESUMED))
def reference_sent_at_the_first_sync_after_a_resume(call: Call) -> Any:
    """The reference is loaded last and stands in the model at the first sync, so that it samples the first step."""
    return _sent_from_the_reference(call)


def _sent_from_the_reference(call: Call) -> Any:
    """Sync the reference's weights in the place of the live ones, if it is the first sync after a load."""
    if not call.first:
        return call.original()
    from verifier.train.step_megatron import params_synced
    from verifier.trainer.state_megatron import replaced

    with params_synced(call.self._trainer), replaced(call.self._live, call.self._reference):
        return call.faulty()
