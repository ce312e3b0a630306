"""Log-probability and entropy from vocabulary-parallel logits, without a full-vocabulary copy in float32.

Shape suffixes: T rows, V columns of the vocabulary that this rank holds, C rows of one chunk.

One pass of the forward reads each chunk of logits once and keeps three numbers per row. The backward builds the
gradient chunk by chunk from them and from the logits, which are never modified. On a GPU a kernel does the same
(`verifier/train/logprob_triton.py`), whatever the chunk.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any

import torch

from verifier.errors import ContractError
from verifier.train.pack import IGNORE_LABEL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Elements of one float32 work array: 64 MiB of it, two in the forward, two in the backward."""
_NO_SHARE = -1e4
"""Nats below which a probability is 0, in float64 too; finite, so that any weight times it, times 0, is 0."""


def vocab_parallel_logprob(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each label, and the entropy of each row, under softmax(logits / temperature).

    Differentiable in the logits. Rows whose label is `IGNORE_LABEL` give 0 and get a zero gradient, whatever their
    logits hold, NaN included. The value of a row depends on that row alone.

    Args:
        logits_TV: [T, V] float, this rank's slice of the vocabulary; read only.
        labels_T: [T] int64, global token ids, or `IGNORE_LABEL`.
        vocab_start: global id of this rank's first column.
        vocab_size: size of the vocabulary without the columns that pad it for tensor parallelism; those are left out of
            the softmax. None when no column is padding.
        group: ranks that together hold the vocabulary; None when this one holds all of it.
        temperature: what the engine sampled with; above 0.
        chunk_tokens: rows per chunk; by default so that a work array has `CHUNK_ELEMENTS`, and T / 16 at the most.
        entropy: whether to compute the entropy too.

    Returns:
        [T] log-probabilities and [T] entropies (or None), nats, float32; float64 for float64 logits.

    Raises:
        ContractError: shapes disagree, the temperature is not a positive number, or a label lies outside of the
            vocabulary (names the first row).

    Source:
        Values and gradients as in Megatron-Core 0.19.2, core/tensor_parallel/cross_entropy.py (log-probability) and
        verl, utils/megatron/tensor_parallel.py `vocab_parallel_entropy`; the latter modified logits in place, which
        corrupted whatever read them next (verl #1672).
    """
    if logits_TV.ndim != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ContractError(
            f"logits have shape {list(logits_TV.shape)} and labels {list(labels_T.shape)}: expected [T, V] and [T]"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ContractError(f"temperature {temperature} is not a positive number")
    num_rows, num_columns = logits_TV.shape
    if vocab_size is not None:
        num_columns = min(max(vocab_size - vocab_start, 0), num_columns)
    if chunk_tokens is None:
        chunk_tokens = max(1, min(CHUNK_ELEMENTS // max(1, num_columns), -(-num_rows // 16)))
    logprob_T, entropy_T = _VocabParallelLogprob.apply(
        logits_TV, labels_T, vocab_start, num_columns, group, 1.0 / temperature, chunk_tokens, entropy
    )
    return logprob_T, (entropy_T if entropy else None)


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        labels_T: torch.Tensor,
        vocab_start: int,
        num_columns: int,
        group: ProcessGroup | None,
        scale: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ignored_T = labels_T == IGNORE_LABEL
        column_T = labels_T - vocab_start
        here_T = (column_T >= 0) & (column_T < num_columns) & ~ignored_T
        column_T = torch.where(here_T, column_T, 0)
        # Per row: top; sum of exp, sum of exp * shifted logit, shifted logit of the label, ranks that hold the label.
        if is_fused(logits_TV):
            top_T, sums_4T = _fused_sums(
                logits_TV, labels_T, here_T, vocab_start, num_columns, group, scale, with_entropy
            )
        else:
            top_T, sums_4T = _chunked_sums(
                logits_TV, column_T, here_T, ignored_T, num_columns, group, scale, chunk_tokens, with_entropy
            )
        sums_4T[3] = here_T
        _all_reduce(sums_4T, "SUM", group)
        _refuse_unknown_labels(labels_T, ignored_T, sums_4T[3])
        log_sum_T = sums_4T[0].log()
        logprob_T = (sums_4T[2] - log_sum_T).masked_fill_(ignored_T, 0)
        entropy_T = (log_sum_T - sums_4T[1] / sums_4T[0]).masked_fill_(ignored_T, 0) if with_entropy else sums_4T[1]
        ctx.save_for_backward(logits_TV, labels_T, ignored_T, here_T, column_T, top_T + log_sum_T, entropy_T)
        ctx.constants = (vocab_start, num_columns, scale, chunk_tokens)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(() if with_entropy else (entropy_T,)))
        return logprob_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprob_T: torch.Tensor | None, grad_entropy_T: torch.Tensor | None) -> tuple[Any, ...]:
        """A gradient that is None is of what the loss does not use; the entropy's then costs nothing."""
        logits_TV, labels_T, ignored_T, here_T, column_T, log_norm_T, entropy_T = ctx.saved_tensors
        vocab_start, num_columns, scale, chunk_tokens = ctx.constants
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(log_norm_T)
        if is_fused(logits_TV):
            from verifier.train.logprob_triton import logits_gradient

            grad_TV = logits_gradient(
                logits_TV, labels_T, log_norm_T, entropy_T, grad_logprob_T, grad_entropy_T,
                vocab_start=vocab_start, num_columns=num_columns, scale=scale,
            )  # fmt: skip
            return grad_TV, None, None, None, None, None, None, None
        num_rows, dtype = len(logits_TV), log_norm_T.dtype
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, num_columns:] = 0
        work = _WorkArrays(logits_TV, num_columns, chunk_tokens, dtype, number=2)
        for begin in range(0, num_rows, chunk_tokens):
            at = slice(begin, min(begin + chunk_tokens, num_rows))
            logprob_CV, grad_CV = work.rows(at)
            _scaled(logprob_CV, logits_TV[at, :num_columns], scale, ignored_T[at])
            logprob_CV.sub_(log_norm_T[at].unsqueeze(-1))
            torch.exp(logprob_CV, out=grad_CV)
            # d logprob / d logit = onehot - p;  d entropy / d logit = -p * (log p + entropy)
            factor_C1 = -grad_logprob_T[at].unsqueeze(-1)
            if grad_entropy_T is not None:
                logprob_CV.clamp_(min=_NO_SHARE).add_(entropy_T[at].unsqueeze(-1))
                logprob_CV.mul_(-grad_entropy_T[at].unsqueeze(-1)).add_(factor_C1)
                grad_CV.mul_(logprob_CV)
            else:
                grad_CV.mul_(factor_C1)
            if num_columns:
                at_label_C = torch.where(here_T[at], grad_logprob_T[at], 0).to(dtype)
                grad_CV.scatter_add_(-1, column_T[at].unsqueeze(-1), at_label_C.unsqueeze(-1))
            if scale != 1.0:
                grad_CV.mul_(scale)
            grad_CV[ignored_T[at]] = 0
            grad_TV[at, :num_columns] = grad_CV
        return grad_TV, None, None, None, None, None, None, None


def is_fused(logits_TV: torch.Tensor) -> bool:
    """Whether one kernel reads these logits, in place of torch operations chunk by chunk."""
    return (
        logits_TV.is_cuda
        and logits_TV.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits_TV.stride(-1) == 1
        and importlib.util.find_spec("triton") is not None
    )


def _fused_sums(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    here_T: torch.Tensor,
    vocab_start: int,
    num_columns: int,
    group: ProcessGroup | None,
    scale: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] greatest logit over all ranks, [4, T] sums of this rank's columns, by one kernel."""
    from verifier.train.logprob_triton import row_sums

    own_top_T, (total_T, weighted_T, label_T) = row_sums(
        logits_TV, labels_T, vocab_start=vocab_start, num_columns=num_columns, scale=scale, entropy=with_entropy
    )
    top_T = own_top_T.clone()
    _all_reduce(top_T, "MAX", group)
    # A rank whose columns are all padding has a top of -inf, and sums of 0.
    lower_T = torch.where(total_T == 0, 0, own_top_T - top_T)
    shrink_T = lower_T.exp()
    label_T = torch.where(here_T, label_T - top_T, 0)
    weighted_T = shrink_T * (weighted_T + total_T * lower_T)
    return top_T, torch.stack([shrink_T * total_T, weighted_T, label_T, label_T])


def _chunked_sums(
    logits_TV: torch.Tensor,
    column_T: torch.Tensor,
    here_T: torch.Tensor,
    ignored_T: torch.Tensor,
    num_columns: int,
    group: ProcessGroup | None,
    scale: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] greatest logit over all ranks, [4, T] sums of this rank's columns, by torch operations."""
    num_rows = len(logits_TV)
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    sums_4T = logits_TV.new_zeros((4, num_rows), dtype=dtype)
    top_T = logits_TV.new_full((num_rows,), -math.inf, dtype=dtype)
    work = _WorkArrays(logits_TV, num_columns, chunk_tokens, dtype, number=2)
    for begin in range(0, num_rows, chunk_tokens):
        at = slice(begin, min(begin + chunk_tokens, num_rows))
        shifted_CV, exp_CV = work.rows(at)
        _scaled(shifted_CV, logits_TV[at, :num_columns], scale, ignored_T[at])
        if num_columns:
            torch.amax(shifted_CV, dim=-1, out=top_T[at])
        _all_reduce(top_T[at], "MAX", group)
        shifted_CV.sub_(top_T[at].unsqueeze(-1))
        if num_columns:
            label_C = shifted_CV.gather(-1, column_T[at].unsqueeze(-1)).squeeze(-1)
            sums_4T[2, at] = torch.where(here_T[at], label_C, 0)
        torch.exp(shifted_CV, out=exp_CV)
        torch.sum(exp_CV, dim=-1, out=sums_4T[0, at])
        if with_entropy:
            # A column of -inf has probability 0 and contributes 0, not 0 * -inf.
            exp_CV.mul_(shifted_CV.clamp_(min=torch.finfo(dtype).min))
            torch.sum(exp_CV, dim=-1, out=sums_4T[1, at])
    return top_T, sums_4T


class _WorkArrays:
    """Arrays of one chunk, made once and used for every chunk."""

    def __init__(
        self, logits_TV: torch.Tensor, num_columns: int, chunk_tokens: int, dtype: torch.dtype, *, number: int
    ) -> None:
        chunk = min(chunk_tokens, len(logits_TV))
        self.arrays = [logits_TV.new_empty((chunk, num_columns), dtype=dtype) for _ in range(number)]

    def rows(self, at: slice) -> list[torch.Tensor]:
        return [array[: at.stop - at.start] for array in self.arrays]


def _scaled(out_CV: torch.Tensor, logits_CV: torch.Tensor, scale: float, ignored_C: torch.Tensor) -> None:
    out_CV.copy_(logits_CV)
    out_CV[ignored_C] = 0
    if scale != 1.0:
        out_CV.mul_(scale)


def _all_reduce(values: torch.Tensor, op: str, group: ProcessGroup | None) -> None:
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=group)


def _refuse_unknown_labels(labels_T: torch.Tensor, ignored_T: torch.Tensor, num_holders_T: torch.Tensor) -> None:
    wrong_T = (num_holders_T != 1) & ~ignored_T
    if wrong_T.any():
        row = int(wrong_T.int().argmax())
        raise ContractError(
            f"label {int(labels_T[row])} of row {row} is held by {int(num_holders_T[row])} ranks of the vocabulary, "
            "it must be held by one"
        )
