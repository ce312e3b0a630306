"""Bugs of a training run's backward pass behind the loss: right values, and a gradient of another size."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

LOGPROB = (
    "verifier.train.step_megatron:vocab_parallel_logprob(logits_TV, labels_T, vocab_start, group, "
    "temperature, chunk_tokens, entropy)"
)
ATTACH = "verifier.train.lora_megatron:attach(chunks, lora)"
APART = ("megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false")
"""Knobs without which Megatron itself ends a run in which a parameter has no gradient."""
MICRO_BATCHES = 3
"""Micro-batches of each step of the trials."""
ROW: dict[str, Any] = {"stage": Stage.LOSS, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LSS007",)}


@fault("pytorch/torchtitan#3827", LOGPROB, mesh=Mesh(tp=2), **ROW)
def gradient_of_logits_summed_over_ranks(call: Call) -> Any:
    """Logits are gathered over tensor-parallel ranks, and their gradient, which all have whole, is summed over them."""
    logits_TV = call.logits_TV
    return call.faulty(logits_TV=2 * logits_TV - logits_TV.detach() if logits_TV.requires_grad else logits_TV)


@fault(
    "deepspeedai/DeepSpeed#8154", "megatron.core.pipeline_parallel.schedules:backward_step("
    "input_tensor, output_tensor, output_tensor_grad, config)", mesh=Mesh(pp=2), training=("dtype=bf16",), **ROW,
)  # fmt: skip
def gradient_scaled_at_every_stage(call: Call) -> Any:
    """Each pipeline stage divides by the number of micro-batches, also a gradient that the stage behind it divided."""
    import torch

    given = call.output_tensor_grad
    if not torch.is_tensor(given if not isinstance(given, list) else given[0]):
        return call.original()
    scaled = [each / MICRO_BATCHES for each in given] if isinstance(given, list) else given / MICRO_BATCHES
    return call.faulty(output_tensor_grad=scaled)


@fault(
    "NVIDIA/Megatron-LM#1464 (kin: there all gradients of attention were wrong)",
    "verifier.platform.cpu_attention:gather_from_sequence_parallel_region("
    "input_, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)",
    mesh=Mesh(cp=2), **ROW,
)  # fmt: skip
def gradient_of_keys_of_own_rows(call: Call) -> Any:
    """Under context parallelism keys and values get the gradient of their own rank's queries, and of no other's."""
    if call.input_.requires_grad:
        call.fire()
    return call.original(tensor_parallel_output_grad=False)


@fault(
    "modelscope/mcore-bridge#173 (kin: there over rows of the sequence)", ATTACH, mesh=Mesh(tp=2),
    training=("lora.rank=8", "fixes=bridge-5840"), **ROW,
)  # fmt: skip
def adapter_gradient_of_one_shard(call: Call) -> Any:
    """The gradient between the matrices of an adapter is not summed over ranks, which have other rows of B each."""
    chunks = call.original()
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.endswith(".adapter.linear_out"):
                call.fire()
                module.disable_grad_reduce, module.allreduce_dgrad = True, False
    return chunks


@fault(
    "jingyaogong/minimind#858 (kin: there with one expert a token)",
    "megatron.core.transformer.moe.router:TopKRouter.gating(self, input)",
    training=("dtype=bf16", *APART), **{**ROW, "model": "tiny:add-moe"},
)  # fmt: skip
def routers_without_gradient(call: Call) -> Any:
    """The weights of chosen experts are constants to the backward pass, and no loss of the tokens moves a router."""
    return call.wrong(call.original().detach())
