"""Log-probability and entropy from vocabulary-parallel logits, without a full-vocabulary copy in float32.

Shape suffixes: T rows, V columns of the vocabulary that this rank holds, C rows of one chunk.

The forward reads each chunk of logits once and keeps three numbers per row. The backward computes the gradient chunk by
chunk from them and the logits, which are never modified. On a GPU a kernel does the same without chunks
(`verifier/megatron/logprob_triton.py`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from verifier.errors import ContractError
from verifier.megatron.pack import IGNORE_LABEL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Number of elements of one float32 work array (64 MiB); forward and backward have two each."""
_NO_SHARE = -1e4
"""Log-probability, in nats, that counts as probability 0, in float64 too; finite, so its product with 0 is 0."""


def vocab_parallel_logprob(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    vocab_start: int = 0,
    group: ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probability of each label and the entropy of each row under softmax(logits / temperature).

    Differentiable in the logits. Rows with label `IGNORE_LABEL` have value 0 and gradient 0 for any logits, NaN
    included. The value of a row depends on that row alone.

    Args:
        logits_TV: [T, V] float, this rank's slice of the vocabulary; not modified.
        labels_T: [T] int64, global token ids, or `IGNORE_LABEL`.
        vocab_start: global id of this rank's first column.
        group: ranks that together have the vocabulary; None if this rank has all of it.
        temperature: divisor of the logits, above 0.
        chunk_tokens: number of rows of a chunk; by default at most T / 16 and `CHUNK_ELEMENTS` elements.
        entropy: whether to compute the entropy too.

    Returns:
        [T] log-probabilities and [T] entropies (or None), nats, float32; float64 for float64 logits.

    Raises:
        ContractError: shapes disagree, the temperature is not a positive number, or a label is outside of the
            vocabulary.

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
    if chunk_tokens is None:
        chunk_tokens = max(1, min(CHUNK_ELEMENTS // num_columns, -(-num_rows // 16)))
    options = _Options(vocab_start, group, 1.0 / temperature, chunk_tokens, entropy)
    logprob_T, entropy_T = _VocabParallelLogprob.apply(logits_TV, labels_T, options)
    return logprob_T, (entropy_T if entropy else None)


def is_greedy(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab_start: int = 0, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Tell which labels have the greatest logit of the vocabulary, so that greedy decoding gives them.

    Arguments are those of `vocab_parallel_logprob`. Returns [T] float32, 1 or 0; 0 where there is no label.
    """
    below_T = shortfall(logits_TV, labels_T, vocab_start, group)
    return ((below_T == 0) & (labels_T != IGNORE_LABEL)).float()


def shortfall(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab_start: int = 0, group: ProcessGroup | None = None
) -> torch.Tensor:
    """[T] float32, nats: each label's distance to the greatest logit, 0 where there is no label; see `is_greedy`."""
    logits_TV, column_T = logits_TV.detach().float(), labels_T - vocab_start
    top_T = logits_TV.amax(-1)
    _all_reduce(top_T, "MAX", group)
    here_T = (column_T >= 0) & (column_T < logits_TV.shape[-1])
    own_T = logits_TV.gather(1, column_T.clamp(0, logits_TV.shape[-1] - 1)[:, None])[:, 0]
    found_T = torch.where(here_T, top_T - own_T, 0.0)
    _all_reduce(found_T, "SUM", group)
    return found_T


@dataclass(frozen=True, slots=True)
class _Options:
    """Arguments of `vocab_parallel_logprob` besides logits and labels."""

    vocab_start: int
    group: ProcessGroup | None
    scale: float
    """Inverse temperature."""
    chunk_tokens: int
    entropy: bool


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ignored_T = labels_T == IGNORE_LABEL
        column_T = labels_T - options.vocab_start
        here_T = (column_T >= 0) & (column_T < logits_TV.shape[1]) & ~ignored_T
        column_T = torch.where(here_T, column_T, 0)
        # Per row: top; sum of exp, sum of exp * shifted logit, shifted logit of the label, ranks that hold the label.
        if is_fused(logits_TV):
            top_T, sums_4T = _fused_sums(logits_TV, labels_T, here_T, options)
        else:
            top_T, sums_4T = _chunked_sums(logits_TV, column_T, here_T, ignored_T, options)
        sums_4T[3] = here_T
        _all_reduce(sums_4T, "SUM", options.group)
        _refuse_unknown_labels(labels_T, ignored_T, sums_4T[3])
        log_sum_T = sums_4T[0].log()
        logprob_T = (sums_4T[2] - log_sum_T).masked_fill_(ignored_T, 0)
        entropy_T = (log_sum_T - sums_4T[1] / sums_4T[0]).masked_fill_(ignored_T, 0) if options.entropy else sums_4T[1]
        ctx.save_for_backward(logits_TV, labels_T, ignored_T, here_T, column_T, top_T + log_sum_T, entropy_T)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(() if options.entropy else (entropy_T,)))
        return logprob_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprob_T: torch.Tensor | None, grad_entropy_T: torch.Tensor | None) -> tuple[Any, ...]:
        """Compute the gradient; None stands for an output that the loss does not use, and costs nothing."""
        logits_TV, labels_T, ignored_T, here_T, column_T, log_norm_T, entropy_T = ctx.saved_tensors
        options: _Options = ctx.options
        scale = options.scale
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(log_norm_T)
        if is_fused(logits_TV):
            from verifier.megatron.logprob_triton import logits_gradient

            grad_TV = logits_gradient(
                logits_TV, labels_T, log_norm_T, entropy_T, grad_logprob_T, grad_entropy_T,
                vocab_start=options.vocab_start, scale=scale,
            )  # fmt: skip
            return grad_TV, None, None
        dtype = log_norm_T.dtype
        grad_TV = torch.empty_like(logits_TV)
        for at, (logprob_CV, grad_CV) in _chunks(logits_TV, options, dtype):
            _scaled(logprob_CV, logits_TV[at], scale, ignored_T[at])
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
            at_label_C = torch.where(here_T[at], grad_logprob_T[at], 0).to(dtype)
            grad_CV.scatter_add_(-1, column_T[at].unsqueeze(-1), at_label_C.unsqueeze(-1))
            if scale != 1.0:
                grad_CV.mul_(scale)
            grad_CV[ignored_T[at]] = 0
            grad_TV[at] = grad_CV
        return grad_TV, None, None


def is_fused(logits_TV: torch.Tensor) -> bool:
    """Return whether one kernel reads these logits instead of torch operations chunk by chunk."""
    return (
        logits_TV.is_cuda
        and logits_TV.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits_TV.stride(-1) == 1
        and importlib.util.find_spec("triton") is not None
    )


def _fused_sums(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, here_T: torch.Tensor, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest logits [T] over all ranks and the sums [4, T] of this rank's columns, by one kernel."""
    from verifier.megatron.logprob_triton import row_sums

    own_top_T, (total_T, weighted_T, label_T) = row_sums(
        logits_TV, labels_T, vocab_start=options.vocab_start, scale=options.scale, entropy=options.entropy
    )
    top_T = own_top_T.clone()
    _all_reduce(top_T, "MAX", options.group)
    lower_T = torch.where(total_T == 0, 0, own_top_T - top_T)  # a rank whose logits are all -inf has sums of 0
    shrink_T = lower_T.exp()
    label_T = torch.where(here_T, label_T - top_T, 0)
    weighted_T = shrink_T * (weighted_T + total_T * lower_T)
    return top_T, torch.stack([shrink_T * total_T, weighted_T, label_T, label_T])


def _chunked_sums(
    logits_TV: torch.Tensor,
    column_T: torch.Tensor,
    here_T: torch.Tensor,
    ignored_T: torch.Tensor,
    options: _Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest logits [T] over all ranks and the sums [4, T] of this rank's columns, by torch operations."""
    num_rows = len(logits_TV)
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    sums_4T = logits_TV.new_zeros((4, num_rows), dtype=dtype)
    top_T = logits_TV.new_full((num_rows,), -math.inf, dtype=dtype)
    for at, (shifted_CV, exp_CV) in _chunks(logits_TV, options, dtype):
        _scaled(shifted_CV, logits_TV[at], options.scale, ignored_T[at])
        torch.amax(shifted_CV, dim=-1, out=top_T[at])
        _all_reduce(top_T[at], "MAX", options.group)
        shifted_CV.sub_(top_T[at].unsqueeze(-1))
        label_C = shifted_CV.gather(-1, column_T[at].unsqueeze(-1)).squeeze(-1)
        sums_4T[2, at] = torch.where(here_T[at], label_C, 0)
        torch.exp(shifted_CV, out=exp_CV)
        torch.sum(exp_CV, dim=-1, out=sums_4T[0, at])
        if options.entropy:
            # A column of -inf has probability 0 and contributes 0, not 0 * -inf.
            exp_CV.mul_(shifted_CV.clamp_(min=torch.finfo(dtype).min))
            torch.sum(exp_CV, dim=-1, out=sums_4T[1, at])
    return top_T, sums_4T


def _chunks(
    logits_TV: torch.Tensor, options: _Options, dtype: torch.dtype
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield (rows, two work arrays [C, V]) of each chunk; the arrays' memory is that of the chunk before."""
    num_rows, size = len(logits_TV), min(options.chunk_tokens, len(logits_TV))
    arrays = [logits_TV.new_empty((size, logits_TV.shape[1]), dtype=dtype) for _ in range(2)]
    for begin in range(0, num_rows, options.chunk_tokens):
        at = slice(begin, min(begin + options.chunk_tokens, num_rows))
        yield at, [array[: at.stop - at.start] for array in arrays]


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
