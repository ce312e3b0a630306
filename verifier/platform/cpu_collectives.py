"""Gathers and scatters of rows that ranks have unequally many of, which NCCL does and gloo does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from verifier.platform.patch import Patch, current

MAPPINGS = "megatron.core.tensor_parallel.mappings"
GATHER, SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
Rows = Callable[..., torch.Tensor]
"""Function of megatron-core on rows, a group, the number of rows of each of its ranks, and use of a shared buffer."""


def mapping_patches() -> list[Patch]:
    """Return the patches of megatron-core, for use after it is imported.

    Source:
        megatron-core 0.19.2, megatron/core/tensor_parallel/mappings.py: with split sizes, `all_gather` and
        `reduce_scatter` on lists of tensors. Experts that are cut over tensor-parallel ranks gather each rank's tokens.
    """
    replaced = {GATHER: (_gathering, "output_split_sizes"), SCATTER: (_scattering, "input_split_sizes")}
    return [
        Patch(target, made(current(target)), takes=f"input_ group {sizes} use_global_buffer")
        for target, (made, sizes) in ((f"{MAPPINGS}:{name}", item) for name, item in replaced.items())
    ]


def _gathering(original: Rows) -> Rows:
    def gathered(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of all ranks, in their order."""
        if output_split_sizes is None or len(set(output_split_sizes)) < 2:
            return original(input_, group, output_split_sizes, use_global_buffer)
        whole = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        for rank, part in enumerate(whole.split(list(output_split_sizes))):
            if rank == group.rank():
                part.copy_(input_)
            dist.broadcast(part, group=group, group_src=rank)
        return whole

    return gathered


def _scattering(original: Rows) -> Rows:
    def scattered(
        input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's rows of the sum over all ranks."""
        if input_split_sizes is None or len(set(input_split_sizes)) < 2:
            return original(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole.split(list(input_split_sizes))[group.rank()].clone()

    return scattered
