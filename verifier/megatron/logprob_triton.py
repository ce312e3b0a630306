"""Row sums and gradient of a log-softmax on a GPU; each pass reads the logits once.

Torch operations would read the logits some fifteen times in float32: a quarter of a training step for a vocabulary of
150,000. Shape suffixes: T rows, V columns of the vocabulary that this rank holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verifier.megatron.pack import IGNORE_LABEL

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _row_sums_kernel(
    logits_ptr, labels_ptr, top_ptr, sums_ptr, row_stride, num_rows, num_columns, vocab_start, scale,
    IGNORE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    top = 0.0
    total = 1.0
    weighted = 0.0
    at_label = 0.0
    if label != IGNORE:
        row_ptr = logits_ptr + row * row_stride
        top = -float("inf")
        total = 0.0
        for begin in range(0, num_columns, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = tl.load(row_ptr + at, mask=at < num_columns, other=-float("inf")).to(tl.float32) * scale
            new_top = tl.maximum(top, tl.max(value, 0))
            # Columns of -inf alone have no top to shift by; they contribute 0.
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            part = tl.exp(value - base)
            shrink = tl.exp(top - base)
            if ENTROPY:
                moved = tl.where(total > 0, total * (top - base), 0.0)
                weighted = shrink * (weighted + moved) + tl.sum(part * tl.where(part > 0, value - base, 0.0), 0)
            total = shrink * total + tl.sum(part, 0)
            top = new_top
        column = label - vocab_start
        if (column >= 0) & (column < num_columns):
            at_label = tl.load(row_ptr + column).to(tl.float32) * scale
    tl.store(top_ptr + row, top)
    tl.store(sums_ptr + row, total)
    tl.store(sums_ptr + num_rows + row, weighted)
    tl.store(sums_ptr + 2 * num_rows + row, at_label)


@triton.jit
def _gradient_kernel(
    logits_ptr, grad_ptr, labels_ptr, log_norm_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr,
    row_stride, num_columns, vocab_start, scale,
    IGNORE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    out_ptr = grad_ptr + row * num_columns
    if label == IGNORE:
        for begin in range(0, num_columns, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(out_ptr + at, tl.zeros((BLOCK,), grad_ptr.dtype.element_ty), mask=at < num_columns)
    else:
        row_ptr = logits_ptr + row * row_stride
        log_norm = tl.load(log_norm_ptr + row)
        grad_logprob = tl.load(grad_logprob_ptr + row)
        column = label - vocab_start
        for begin in range(0, num_columns, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < num_columns
            value = tl.load(row_ptr + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
            logprob = value - log_norm
            probability = tl.exp(logprob)
            # d logprob / d logit = onehot - p;  d entropy / d logit = -p * (log p + entropy)
            slope = tl.where(inside & (at == column), grad_logprob, 0.0) - grad_logprob * probability
            if ENTROPY:
                grad_entropy = tl.load(grad_entropy_ptr + row)
                spread = tl.where(probability > 0, logprob + tl.load(entropy_ptr + row), 0.0)
                slope -= grad_entropy * probability * spread
            tl.store(out_ptr + at, (slope * scale).to(grad_ptr.dtype.element_ty), mask=inside)


def row_sums(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    vocab_start: int,
    scale: float,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce each row's local columns for a log-softmax of logits * `scale`.

    Args:
        logits_TV: [T, V] bfloat16, float16 or float32; rows are contiguous.
        labels_T: [T] int64, global token ids or `IGNORE_LABEL`.
        vocab_start: global id of the first column.
        scale: inverse temperature.
        entropy: whether to compute the sum for the entropy, 0 otherwise.

    Returns:
        [T] float32, greatest logit of each row; [3, T] float32, sum of exp(logit - greatest), the same sum weighted by
        (logit - greatest), and the label's logit or 0 if another rank has it. A row without a label is not read and has
        0 and the sums 1, 0, 0.
    """
    num_rows = len(logits_TV)
    top_T = torch.empty(num_rows, dtype=torch.float32, device=logits_TV.device)
    sums_3T = torch.empty((3, num_rows), dtype=torch.float32, device=logits_TV.device)
    if num_rows:
        with torch.cuda.device_of(logits_TV):
            _row_sums_kernel[(num_rows,)](
                logits_TV, labels_T.contiguous(), top_T, sums_3T, logits_TV.stride(0), num_rows,
                logits_TV.shape[1], vocab_start, scale, IGNORE=IGNORE_LABEL, ENTROPY=entropy, BLOCK=_BLOCK,
                num_warps=_WARPS,
            )  # fmt: skip
    return top_T, sums_3T


def logits_gradient(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    log_norm_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logprob_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
    *,
    vocab_start: int,
    scale: float,
) -> torch.Tensor:
    """Compute the gradient in the logits from those in log-probability and entropy.

    Args:
        logits_TV: see `row_sums`.
        labels_T: see `row_sums`.
        log_norm_T: [T] float32, logarithm of each row's sum of exp(scaled logit) over all ranks.
        entropy_T: [T] float32, nats.
        grad_logprob_T: [T] float32.
        grad_entropy_T: [T] float32; None if the loss does not use the entropy.
        vocab_start: see `row_sums`.
        scale: see `row_sums`.

    Returns:
        [T, V] in the logits' dtype; 0 in rows without a label.
    """
    grad_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)
    if grad_TV.numel():
        with torch.cuda.device_of(logits_TV):
            _gradient_kernel[(len(logits_TV),)](
                logits_TV, grad_TV, labels_T.contiguous(), log_norm_T, entropy_T.contiguous(),
                grad_logprob_T.contiguous(),
                entropy_T if grad_entropy_T is None else grad_entropy_T.contiguous(),  # not read if None
                logits_TV.stride(0), logits_TV.shape[1], vocab_start, scale,
                IGNORE=IGNORE_LABEL, ENTROPY=grad_entropy_T is not None, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return grad_TV
