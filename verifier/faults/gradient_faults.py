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
