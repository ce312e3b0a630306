"""Bugs of a training run's backward pass behind the loss: right values, and a gradient of another size."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

LOGPROB = (
    "verifier.train.step_megatron:vocab_parallel_logprob(logits_TV, labels_T, vocab_start, vocab_size, group, "
    "temperature, chunk_tokens, entropy)"
)
MICRO_BATCHES = 3
"""Micro-batches of each step of the trials."""
ROW: dict[str, Any] = {"stage": Stage.LOSS, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LSS007",)}


@fault("pytorch/torchtitan#3827", LOGPROB, mesh=Mesh(tp=2), **ROW)
def gradient_of_logits_summed_over_ranks(call: Call) -> Any:
    """Logits are gathered over tensor-parallel ranks, and their gradient, which all have whole, is summed over them."""
    logits_TV = call.logits_TV
    return call.faulty(logits_TV=2 * logits_TV - logits_TV.detach() if logits_TV.requires_grad else logits_TV)


@fault("linkedin/Liger-Kernel#1298", LOGPROB, training=("algorithm=grpo",), **ROW)
def gradient_of_the_first_token_for_all(call: Call) -> Any:
    """The gradients of all tokens are scaled by what the loss gave for the first one."""
    import torch

    class OfTheFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logprob_T: torch.Tensor) -> torch.Tensor:
            return logprob_T.clone()

        @staticmethod
        def backward(ctx: Any, gradient_T: torch.Tensor) -> torch.Tensor:
            in_loss = gradient_T != 0
            return torch.where(in_loss, gradient_T[in_loss][:1].sum(), 0)

    logprob_T, entropy_T = call.original()
    return call.wrong((OfTheFirst.apply(logprob_T), entropy_T)) if logprob_T.requires_grad else (logprob_T, entropy_T)


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
