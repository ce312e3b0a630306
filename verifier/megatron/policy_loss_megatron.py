"""Losses of `verifier.algorithms` on the rows of a micro-batch, and the facts of those rows that a step reports."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from verifier.algorithms.losses import LossInputs, loss_metrics, token_loss
from verifier.algorithms.registry import LossOptions
from verifier.megatron.pack import PackedBatch
from verifier.megatron.step_megatron import TokenLoss

SUMS = ("clipped", "clamped", "kl", "entropy")
"""Sums over the tokens in the loss."""
GREATEST = ("ratio_gap", "kl_gap")
"""Greatest over the tokens in the loss: distance of the ratio from 1, magnitude of the KL estimate."""


class LossMeter:
    """Facts of the rows that one rank's losses saw in a step; `read` joins those of all ranks.

    With `rows` it keeps the rows themselves too, of batches with a ledger.
    """

    def __init__(self, *, rows: bool = False) -> None:
        self._keeps_rows, self._rows = rows, list[dict[str, torch.Tensor]]()
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self._greatest = torch.zeros(len(GREATEST), dtype=torch.float64)

    def add(self, name: str, inputs: LossInputs, options: LossOptions) -> None:
        """Add the rows of one micro-batch."""
        facts, mask_T = loss_metrics(name, inputs, options), inputs.mask_T
        entropy_T = torch.where(mask_T, inputs.entropy_T.detach(), 0)
        sums = [facts.clipped_T.sum(), facts.clamped_T.sum(), facts.kl_T.sum(), entropy_T.sum()]
        gaps = [torch.where(mask_T, facts.ratio_T - 1, 0).abs().amax(), facts.kl_T.abs().amax()]
        self._sums += torch.stack([value.double() for value in sums]).cpu()
        self._greatest = torch.maximum(self._greatest, torch.stack([value.double() for value in gaps]).cpu())

    def keep(self, shard: PackedBatch, current_T: torch.Tensor, entropy_T: torch.Tensor, loss_T: torch.Tensor) -> None:
        """Keep the rows of one micro-batch, and their gradients as the backward pass reaches them."""
        if not self._keeps_rows or shard.ledger_T is None:
            return
        row = {
            "sentinel": shard.ledger_T, "mask": shard.loss_mask_T, "current": current_T.detach(),
            "entropy": entropy_T.detach(), "loss": loss_T.detach(), **shard.columns,
        }  # fmt: skip
        for name, values_T in (("gradient", current_T), ("entropy_gradient", entropy_T)):
            row[name] = torch.zeros_like(values_T.detach())
            if values_T.requires_grad:
                values_T.register_hook(partial(_kept, row[name]))
        self._rows.append(row)

    def rows(self) -> dict[str, np.ndarray]:
        """Kept rows after the step, a value a token by name; empty if there are none."""
        names = self._rows[0] if self._rows else ()
        return {name: torch.cat([row[name].cpu() for row in self._rows]).numpy() for name in names}

    def read(self, *, counts: bool, device: torch.device) -> dict[str, float]:
        """Join the ranks. A collective.

        Of ranks that saw the same rows, those of one are counted: `counts`.
        """
        sums = (self._sums if counts else torch.zeros_like(self._sums)).to(device)
        greatest = self._greatest.to(device)
        dist.all_reduce(sums)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        return dict(zip(SUMS, sums.tolist(), strict=True)) | dict(zip(GREATEST, greatest.tolist(), strict=True))


def _kept(into_T: torch.Tensor, gradient_T: torch.Tensor | None) -> None:
    if gradient_T is not None:  # one output of a function may have none
        into_T.copy_(gradient_T)


def policy_loss(name: str, options: LossOptions, meter: LossMeter) -> TokenLoss:
    """Make the loss per row of a micro-batch from its columns.

    Columns: "divisor" and "advantage" for all losses but `cross_entropy`, "reference" where there is a KL term.
    """

    def loss(logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
        columns, mask_T = shard.columns, shard.loss_mask_T.to(logprob_T.device)
        detached_T = logprob_T.detach()
        inputs = LossInputs(
            current_T=logprob_T, entropy_T=entropy_T, divisor_T=columns.get("divisor", detached_T),
            advantage_T=columns.get("advantage", torch.zeros_like(detached_T)), reference_T=columns.get("reference"),
            mask_T=mask_T, sequence_mean=lambda values_T: _sequence_mean(values_T, mask_T, shard),
        )  # fmt: skip
        meter.add(name, inputs, options)
        loss_T = token_loss(name, inputs, options)
        meter.keep(shard, logprob_T, entropy_T, loss_T)
        return loss_T

    return loss


def _sequence_mean(values_T: torch.Tensor, mask_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
    """Mean over the tokens in the loss of each row's sequence, over all context-parallel ranks; 0 in padding."""
    num = len(shard.ids) + 1  # padding, whose segment is -1, takes the last place
    segments_T = shard.segments_T.long() % num
    sums = torch.zeros(2, num, dtype=torch.float64, device=values_T.device)
    sums[0].index_add_(0, segments_T, torch.where(mask_T, values_T, 0).double())
    sums[1].index_add_(0, segments_T, mask_T.double())
    if shard.alignment.cp > 1:
        from megatron.core import parallel_state

        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return (sums[0] / sums[1].clamp(min=1))[segments_T].to(values_T.dtype)
