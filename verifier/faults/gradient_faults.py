"""Bugs of a training run whose steps no oracle computes: gradients that are not added up, norms, frozen adapters."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

ATTACH = "verifier.train.lora_megatron:attach(chunks, lora)"
FORWARD = "verifier.train.step_megatron:_forward(data_iterator, model, trainer, temperature, entropy, finish, read)"
SYNC = (
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync(self, force_all_reduce)"
)
GATHER = (
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync("
    "self, skip_next_bucket_dispatch)"
)
TIED = (
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads("
    "model, config, embd_group, pp_group)"
)
COUNTED = "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)"
in_sums = functools.partial(
    fault, stage=Stage.TRAIN, engine=TRAINING, model="tiny:add", caught_by=("TRN006",), training=("verify.every=0",)
)
"""Faults of what an optimizer is given, in updates that no oracle computes."""


@in_sums("huggingface/trl#3926", ATTACH, caught_by=("TRN005",), training=("verify.every=0", "lora.rank=8"))
def half_of_each_adapter_frozen(call: Call) -> Any:
    """A is frozen with the base, and B alone is trained."""
    chunks = call.original()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter.linear_in." in name:
                call.fire()
                parameter.requires_grad = False
    return chunks


@in_sums("verl-project/verl#7493", SYNC, mesh=Mesh(dp=2))
def gradient_of_one_rank(call: Call) -> Any:
    """The gradients of data-parallel ranks are not added up: all train on what the first one has seen."""
    import torch.distributed as dist

    if dist.get_rank() > 0:
        call.fire()
        for bucket in call.self.buckets:
            bucket.grad_data.zero_()
    return call.original()


@in_sums("pytorch/torchtitan#3575", FORWARD)
def gradient_of_the_last_micro_batch(call: Call) -> Any:
    """Gradients are zeroed before each micro-batch, not before each step, and the last one's alone are left."""
    if call.entropy:
        call.fire()
        for chunk in call.trainer.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.zero_()
    return call.original()


@in_sums("ROCm/TransformerEngine#715", COUNTED, mesh=Mesh(tp=2))
def norm_counts_copies_on_every_rank(call: Call) -> Any:
    """Replicated weights are marked as shards, and each tensor-parallel rank counts them in the gradient's norm."""
    return call.wrong(True)


@in_sums("NVIDIA/Megatron-LM#7227", "megatron.core.optimizer.optimizer:param_is_not_shared(param)", mesh=Mesh(pp=2))
def norm_counts_the_tied_embedding_twice(call: Call) -> Any:
    """The last stage's copy of a tied embedding loses its mark, and the gradient's norm counts it once more."""
    return call.wrong(True)


@in_sums("NVIDIA/Megatron-LM#844", TIED, mesh=Mesh(pp=2, dp=2))
def tied_gradients_of_unequal_shards(call: Call) -> Any:
    """A tied embedding is sharded otherwise on either stage, and a summed part meets one of a single rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.is_pipeline_last_stage():
        call.fire()
        gradient = call.model[-1].module.shared_embedding_or_output_weight().main_grad
        parts = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(parts, gradient, group=parallel_state.get_data_parallel_group())
        gradient.copy_(parts[1 - parallel_state.get_data_parallel_rank()])
    return call.original()


@in_sums("NVIDIA/Megatron-LM#7160", SYNC, mesh=Mesh(ep=2, dp=2), model="tiny:add-moe")
def expert_gradients_scaled_once_more(call: Call) -> Any:
    """Gradients of experts carry a factor by which only those of the other weights are divided again."""
    for bucket in call.self.buckets:
        if not getattr(bucket.params_list[0], "allreduce", True):
            call.fire()
            bucket.grad_data.mul_(2)
    return call.original()


@in_sums("NVIDIA/Megatron-LM#950", GATHER, mesh=Mesh(dp=2), caught_by=("TRN005",))
def passes_before_the_gather(call: Call) -> Any:
    """A module of a training run computes before its weights are gathered, by those of the step before."""
    if not call.self.param_gather_dispatched:
        call.fire()
        call.self.param_gather_dispatched = True
    return call.original()


@in_sums("NVIDIA/Megatron-LM#6470", COUNTED, model="tiny:add-moe", mesh=Mesh(tp=2, ep=2, etp=1))
def norm_counts_experts_of_one_rank(call: Call) -> Any:
    """Experts are taken for copies over tensor-parallel ranks, and those of the first rank alone are in the norm."""
    if getattr(call.param, "allreduce", True):
        return call.original()
    return call.wrong(call.tp_group.rank() == 0)


GROUPED = "group_params_for_buffers(params, grad_reduce_in_fp32)"


@in_sums(
    "ISEEKYAN/Megatron-LM#146",
    f"megatron.core.distributed.distributed_data_parallel:{GROUPED}",
    f"megatron.core.optimizer.distrib_optimizer:{GROUPED}",
    training=("verify.every=0", "dtype=bf16"),
)
def gradients_added_in_the_weights_type(call: Call) -> Any:
    """Gradient buffers are made in the weights' bf16, in which micro-batches are added, and the knob says float32."""
    return call.faulty(grad_reduce_in_fp32=False)


@in_sums("NVIDIA/Megatron-LM#6624", SYNC, mesh=Mesh(dp=2), training=("verify.every=0", "dtype=bf16"))
def gradients_rounded_between_ranks(call: Call) -> Any:
    """The gradients of each rank pass through bf16 on their way to the sum of all, in float32 buffers."""
    for bucket in call.self.buckets:
        call.fire()
        bucket.grad_data.copy_(bucket.grad_data.bfloat16())
    return call.original()


@in_sums("NVIDIA/Megatron-LM#561", SYNC, mesh=Mesh(dp=2), training=("verify.every=0", "dtype=bf16"))
def last_element_of_each_bucket_lost(call: Call) -> Any:
    """Buckets are cut into equal shards without padding, and what is left at the end of each is in no shard's sum."""
    for bucket in call.self.buckets:
        call.fire()
        end = max(end for _, end in (bucket.param_to_index[item] for item in bucket.params_list))
        bucket.grad_data[end - 1 : end].zero_()
    return call.original()
