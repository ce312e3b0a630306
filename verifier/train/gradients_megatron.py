"""Whole gradients of a rank's parameters, between the backward pass and the optimizer's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifier.errors import ContractError
from verifier.model.provider_megatron import TrainerModel

if TYPE_CHECKING:
    import torch


def whole_gradients(trainer: TrainerModel) -> list[dict[str, torch.Tensor]]:
    """Copy the reduced gradients; those of a distributed optimizer are gathered from its shards. A collective.

    Call it after the backward pass and before the optimizer's step.

    Returns:
        Local parameter name, without wrappers -> float32 tensor of the parameter's shape, for each model chunk.

    Raises:
        ContractError: the trainer was built for forward passes only.

    Source:
        megatron-core 0.19.2, core/distributed/param_and_grad_buffer.py: a bucket's gradient is reduce-scattered over
        the buffer's data-parallel group in equal consecutive shards (`shard_buffer`), rank by rank.
    """
    if trainer.data_parallel is None:
        raise ContractError("this trainer was built for forward passes only: build it with `data_parallel`")
    return [_of_chunk(chunk, sharded=trainer.data_parallel.distributed_optimizer) for chunk in trainer.chunks]


def _of_chunk(chunk: torch.nn.Module, *, sharded: bool) -> dict[str, torch.Tensor]:
    import torch
    import torch.distributed as dist

    names = {parameter: name.replace("module.", "") for name, parameter in chunk.named_parameters()}
    found = {}
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        whole = buffer.grad_data
        if sharded and buffer.data_parallel_world_size > 1:
            whole = torch.empty_like(buffer.grad_data)
            rank = dist.get_rank(buffer.data_parallel_group)
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // buffer.data_parallel_world_size
                mine = bucket.grad_data[rank * size : (rank + 1) * size]
                gathered = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                dist.all_gather_into_tensor(gathered, mine, group=buffer.data_parallel_group)
        for parameter, (begin, end, _) in buffer.param_index_map.items():
            found[names[parameter]] = whole[begin:end].view(parameter.shape).clone()
    return found
