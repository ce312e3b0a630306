"""Forward passes and optimiser steps on ranks, through Megatron's pipeline schedules.

Shape suffixes as in `verifier.megatron.pack`: T rows of one context-parallel shard, V this rank's part of the
vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verifier.data.rollout import Rollout
from verifier.errors import ContractError, UsageError
from verifier.megatron import fsdp_megatron
from verifier.megatron.microbatch import MicroBatches, split_by_count, split_by_tokens
from verifier.megatron.pack import Columns, PackedBatch, pack, shard_cp
from verifier.megatron.token_layout import Alignment
from verifier.megatron.vocab_logprob import vocab_parallel_logprob
from verifier.mesh import Coordinate
from verifier.model.provider_megatron import TrainerModel

OnShards = Callable[[list[PackedBatch]], Callable[[], None] | None]
"""Viewer of a rank's micro-batches, called before they are used; it changes nothing. It may return a function for the
rest of its work, without collectives, which is called when the device has its work."""
OnRows = Callable[[PackedBatch, torch.Tensor], None]
"""Viewer of the log-probabilities of a micro-batch's rows, on the device, as a pass that scores makes them."""
TokenLoss = Callable[[torch.Tensor, torch.Tensor, PackedBatch], torch.Tensor]
"""(logprob_T, entropy_T, shard) -> [T] loss per row; rows outside of the loss mask are dropped afterwards."""

ReadLogits = Callable[[torch.Tensor, torch.Tensor, int, Any], torch.Tensor]
"""(logits_TV, labels_T, global id of the first column, tensor-parallel group or None) -> [T] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one optimiser step, or of its passes alone; equal on every rank."""

    loss: float
    """Mean loss over all tokens in the loss mask, before the step; nats for the cross-entropy."""
    num_tokens: int
    """Number of tokens in the loss mask."""
    grad_norm: float = 0.0
    """L2 norm of the gradient over all parameters, before clipping; 0 of passes alone."""
    further_loss: float = 0.0
    """Mean cross-entropy of the tokens that a layer for a further token (MTP) is trained on, nats."""
    num_further: int = 0
    """Number of those tokens; 0 where the loss of such a layer is off."""


def cross_entropy(logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
    """Return the negative log-probability of each label, nats."""
    return -logprob_T


def score(
    trainer: TrainerModel,
    rollouts: Sequence[Rollout],
    *,
    micro_batch_size: int = 4,
    temperature: float = 1.0,
    on_shards: OnShards | None = None,
    on_rows: OnRows | None = None,
    max_tokens: int | None = None,
    read: ReadLogits | None = None,
) -> list[torch.Tensor]:
    """Score given tokens without gradients. A collective.

    Args:
        trainer: the model.
        rollouts: the same on every rank; divided over data-parallel ranks here.
        micro_batch_size: greatest number of rollouts of a packed micro-batch.
        temperature: divisor of the logits.
        on_shards: see `OnShards`.
        on_rows: see `OnRows`; not called where `read` is given.
        max_tokens: greatest number of rows of a micro-batch, padding included; None splits by `micro_batch_size`.
        read: another number to read from each row of logits, such as `vocab_logprob.is_greedy`.

    Returns:
        One float32 tensor [len - 1] per rollout, on every rank's host: entry t is the log-probability of token t + 1
        given all earlier tokens, nats.
    """
    split = split_over_ranks(trainer, rollouts, micro_batch_size, max_tokens)
    batches, shards = _micro_batches(trainer, rollouts, split, ledger=bool(on_shards or on_rows))
    finish = partial(_detached, on_rows=on_rows)
    forward = partial(_forward, trainer=trainer, temperature=temperature, entropy=False, finish=finish, read=read)
    with _seen(shards, on_shards), torch.no_grad(), _mode(trainer, training=False):
        scored = _run(trainer, forward, shards, forward_only=True, collect_non_loss_data=True)
    sizes = [len(rollout) - 1 for rollout in rollouts]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    # Each entry has one owner: the rank of the last stage with that row, of tensor rank 0. All others add zeros.
    total = torch.zeros(sum(sizes), dtype=torch.float32, device=device_of(trainer))
    if scored and _coordinate(trainer).tp == 0:
        for members, shard, logprob_T in zip(batches, shards, scored, strict=True):
            kept = shard.labels_T >= 0
            rows = starts[members][shard.segments_T[kept].long()] + shard.positions_T[kept]
            total[rows.to(total.device)] = logprob_T[kept.to(logprob_T.device)]
    dist.all_reduce(total)
    return list(total.cpu().split(sizes))


def train_step(
    trainer: TrainerModel,
    optimizer: Any,
    rollouts: Sequence[Rollout],
    *,
    loss: TokenLoss = cross_entropy,
    learning_rate: float | None = None,
    scheduler: Any = None,
    micro_batch_size: int = 4,
    temperature: float = 1.0,
    on_shards: OnShards | None = None,
    on_gradients: Callable[[], None] | None = None,
    max_tokens: int | None = None,
    columns: Columns | None = None,
    scheduler_step: int | None = None,
) -> StepResult:
    """One forward and backward pass over all rollouts, then one optimiser step. A collective.

    Args:
        trainer: built with `data_parallel`.
        optimizer: from `optimizer_megatron.make_optimizer`.
        rollouts: the same on every rank.
        loss: loss per token; the step's loss is its mean over all tokens in the loss mask, over all ranks.
        learning_rate: learning rate of this step; None keeps the optimiser's.
        scheduler: from `optimizer_megatron.make_scheduler`; sets the rates of the next step, by rollouts so far.
        micro_batch_size: greatest number of rollouts of a packed micro-batch.
        temperature: divisor of the logits.
        on_shards: see `OnShards`.
        on_gradients: called on every rank after gradients are reduced and before any parameter changes.
        max_tokens: greatest number of rows of a micro-batch, padding included; None splits by `micro_batch_size`.
        columns: see `backward`.
        scheduler_step: amount that the scheduler counts; None counts rollouts.

    Raises:
        UsageError: no token of any rollout is in the loss mask.
        ContractError: the optimiser skipped the step.
    """
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    optimizer.zero_grad()
    result = backward(
        trainer, rollouts, loss=loss, micro_batch_size=micro_batch_size, temperature=temperature, on_shards=on_shards,
        max_tokens=max_tokens, columns=columns,
    )  # fmt: skip
    if on_gradients is not None:
        on_gradients()
    done, grad_norm, _ = optimizer.step()
    if not done:
        raise ContractError("the optimiser skipped the step: a gradient is not finite")
    if scheduler is not None:
        scheduler.step(len(rollouts) if scheduler_step is None else scheduler_step)
    return replace(result, grad_norm=float(grad_norm))


def backward(
    trainer: TrainerModel,
    rollouts: Sequence[Rollout],
    *,
    loss: TokenLoss = cross_entropy,
    micro_batch_size: int = 4,
    temperature: float = 1.0,
    on_shards: OnShards | None = None,
    max_tokens: int | None = None,
    columns: Columns | None = None,
) -> StepResult:
    """Compute the gradients of the mean token loss, reduced, in the model's gradient buffers. A collective.

    Arguments are those of `train_step`. One of the columns, inputs of the loss per token (`PackedBatch.columns`), may
    be named "weight": it multiplies the loss of its token, so a step of weights w * num_tokens has the loss
    sum(w * loss).

    Raises:
        UsageError: no token of any rollout is in the loss mask.
    """
    if not any(rollout.mask.any() for rollout in rollouts):
        raise UsageError("no token of any rollout is in the loss mask: there is nothing to train on")
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    split = split_over_ranks(trainer, rollouts, micro_batch_size, max_tokens)
    _, shards = _micro_batches(trainer, rollouts, split, ledger=on_shards is not None, columns=columns)
    finish = partial(_sums, loss=loss, further=bool(trainer.provider.mtp_loss_scaling_factor))
    tokens, further = (sum(int(rollout.mask[begin:].sum()) for rollout in rollouts) for begin in (1, 2))
    forward = partial(
        _forward, trainer=trainer, temperature=temperature, entropy=True, finish=finish,
        further=tokens / max(further, 1),
    )  # fmt: skip
    with _seen(shards, on_shards), _mode(trainer, training=True):
        parts = _run(trainer, forward, shards, forward_only=False)
    total = torch.zeros(4, dtype=torch.float64, device=device_of(trainer))
    if parts and _coordinate(trainer).tp == 0:
        total += torch.stack(parts).sum(0)
    dist.all_reduce(total)
    loss, count, further, of_further = total.tolist()
    return StepResult(
        loss=loss / count, num_tokens=int(count), further_loss=further / max(of_further, 1), num_further=int(of_further)
    )


@contextlib.contextmanager
def recomputed(trainer: TrainerModel, *, on: bool) -> Iterator[None]:
    """If `on`, keep only the input of every second layer in training steps and recompute the other activations.

    Source:
        megatron-core 0.19.2, core/transformer/transformer_block.py, `TransformerBlock.forward`, and
        core/models/hybrid/hybrid_block.py: both ask the configuration in every pass.
    """
    before = trainer.provider.recompute_granularity
    trainer.provider.recompute_granularity = "full" if on else before
    try:
        yield
    finally:
        trainer.provider.recompute_granularity = before


@contextlib.contextmanager
def params_synced(trainer: TrainerModel) -> Iterator[None]:
    """Gather every rank's parameters for the duration of the context.

    With `overlap_param_gather` a distributed optimiser updates only each rank's own shard; the next forward gathers the
    others. Between the two, parameters are stale. A rank whose weights have no copy has only its own shard.

    Source:
        megatron-core 0.19.2, megatron/core/distributed/distributed_data_parallel.py, `disable_forward_pre_hook`.
    """
    options = trainer.data_parallel
    if options is not None and options.fsdp is not None:
        with fsdp_megatron.gathered(trainer):
            yield
        return
    overlapped = trainer.mesh.has_copies and options is not None and options.overlap_param_gather
    for chunk in trainer.chunks if overlapped else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in trainer.chunks if overlapped else ():
            chunk.enable_forward_pre_hook()


def split_over_ranks(
    trainer: TrainerModel, rollouts: Sequence[Rollout], micro_batch_size: int, max_tokens: int | None
) -> MicroBatches:
    """Assign rollouts to the micro-batches of data-parallel ranks: by tokens if a budget is given, else by count."""
    mesh = trainer.mesh
    multiple = mesh.pp if mesh.vpp > 1 else 1
    if max_tokens is None:
        return split_by_count(len(rollouts), dp=mesh.dp, micro_batch_size=micro_batch_size, multiple=multiple)
    alignment = _alignment(trainer)
    return split_by_tokens(rollouts, dp=mesh.dp, max_tokens=max_tokens, alignment=alignment, multiple=multiple)


def _alignment(trainer: TrainerModel) -> Alignment:
    return Alignment(tp=trainer.mesh.tp, cp=trainer.mesh.cp, sp=trainer.provider.sequence_parallel)


def _micro_batches(
    trainer: TrainerModel,
    rollouts: Sequence[Rollout],
    split: MicroBatches,
    *,
    ledger: bool,
    columns: Columns | None = None,
) -> tuple[list[list[int]], list[PackedBatch]]:
    """Return this rank's micro-batches, as indices of rollouts and as its context-parallel shards of the packs."""
    at, alignment = _coordinate(trainer), _alignment(trainer)
    batches = split[at.dp]
    packs = [
        pack(
            [rollouts[index] for index in batch], alignment, batch if ledger else None,
            {name: [values[index] for index in batch] for name, values in (columns or {}).items()},
        )
        for batch in batches
    ]  # fmt: skip
    return batches, [shard_cp(packed, at.cp) for packed in packs]


@contextlib.contextmanager
def _seen(shards: list[PackedBatch], on_shards: OnShards | None) -> Iterator[None]:
    """Show the shards to a viewer before the body runs, and let it finish afterwards, even on errors."""
    rest = on_shards(shards) if on_shards is not None else None
    try:
        yield
    finally:
        if rest is not None:
            rest()


def _run(
    trainer: TrainerModel, forward: Callable[..., Any], shards: list[PackedBatch], **schedule_options: bool
) -> list[Any]:
    """Run the pipeline schedule over micro-batches; return what the last stage collected, empty on other stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = trainer.chunks
    pairs = [(shard, _moved(shard, device_of(trainer))) for shard in shards]
    collected = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(pairs) for _ in chunks] if len(chunks) > 1 else iter(pairs),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(shards),
        seq_length=max(shard.num_rows for shard in shards),
        micro_batch_size=1,
        **schedule_options,
    )
    return collected or []


def _moved(shard: PackedBatch, device: torch.device) -> PackedBatch:
    """Copy what model and loss read to the device, before the first kernel, so that no copy waits for a kernel."""
    names = ("tokens_T", "positions_T", "labels_T", "loss_mask_T", "segments_T", "cu_seqlens", "cu_seqlens_padded")
    columns = {name: values.to(device, non_blocking=True) for name, values in shard.columns.items()}
    return replace(
        shard, columns=columns, **{name: getattr(shard, name).to(device, non_blocking=True) for name in names}
    )


def _forward(
    data_iterator: Iterator[tuple[PackedBatch, PackedBatch]],
    model: Any,
    *,
    trainer: TrainerModel,
    temperature: float,
    entropy: bool,
    finish: Callable[..., Any],
    read: ReadLogits | None = None,
    further: float = 0.0,
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one packed micro-batch through one model chunk: Megatron's forward step.

    The iterator yields each micro-batch twice: on the host and on the device. `further` is the number of tokens in the
    step's loss, over that of those a layer for a further token (MTP) is trained on.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    shard, moved = next(data_iterator)
    provider = trainer.provider
    factor = provider.mtp_loss_scaling_factor
    provider.mtp_loss_scaling_factor = factor * _share_of_further(shard, further) if factor else factor
    output = model(
        input_ids=moved.tokens_T[None],
        position_ids=_positions(trainer, moved.positions_T),
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=moved.cu_seqlens,
            cu_seqlens_kv=moved.cu_seqlens,
            cu_seqlens_q_padded=moved.cu_seqlens_padded,
            cu_seqlens_kv_padded=moved.cu_seqlens_padded,
            max_seqlen_q=shard.max_seqlen,
            max_seqlen_kv=shard.max_seqlen,
            # State-space layers need it to separate the sequences of the pack.
            total_tokens=shard.num_whole_rows if trainer.provider.is_hybrid_model else None,
            pad_between_seqs=shard.has_padding_between,  # so that no layer waits for the device
        ),
        # Megatron makes the labels of a layer for a further token of the input tokens, so its mask is of these too.
        **({"loss_mask": moved.loss_mask_T.roll(1)[None]} if factor else {}),
        # In bf16 Megatron would widen all logits and their gradient; `vocab_parallel_logprob` widens chunk by chunk.
        **({"fp32_output": False} if trainer.provider.bf16 else {}),
    )
    provider.mtp_loss_scaling_factor = factor

    def on_logits(logits: torch.Tensor, *, non_loss_data: bool = False) -> Any:
        first = _coordinate(trainer).tp * logits.shape[-1]
        group = parallel_state.get_tensor_model_parallel_group() if trainer.mesh.tp > 1 else None
        if read is not None:
            return read(logits[0], moved.labels_T, first, group)
        logprob_T, entropy_T = vocab_parallel_logprob(
            logits[0], moved.labels_T, vocab_start=first, group=group, temperature=temperature, entropy=entropy
        )
        return finish(logprob_T, entropy_T, moved)

    return output, on_logits


def _share_of_further(shard: PackedBatch, further: float) -> float:
    """Factor of a micro-batch's mean loss of further tokens (MTP), which makes a step's loss the mean over all of them.

    Megatron weighs that mean by the tokens in the micro-batch's own loss: a mean of means, Megatron-LM #7452.
    """
    mask_T = shard.loss_mask_T
    return further * int((mask_T & (shard.positions_T > 0)).sum()) / max(int(mask_T.sum()), 1)


def _positions(trainer: TrainerModel, positions_T: torch.Tensor) -> torch.Tensor:
    """[1, T]; [3, 1, T] of a model of images too, whose text has equal positions in time, height and width."""
    by_parts = trainer.provider.position_embedding_type == "mrope"
    return positions_T.expand(3, 1, -1) if by_parts else positions_T[None]


def _detached(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor | None, shard: PackedBatch, *, on_rows: OnRows | None
) -> torch.Tensor:
    if on_rows is not None:
        on_rows(shard, logprob_T.detach())
    return logprob_T.detach()


def _sum_loss(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch, *, loss: TokenLoss
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Megatron's loss triple: the sum to differentiate, the number of tokens to divide by, and the report."""
    mask_T = shard.loss_mask_T.to(logprob_T.device)
    loss_T = loss(logprob_T, entropy_T, shard)
    if "weight" in shard.columns:
        loss_T = shard.columns["weight"] * loss_T
    total = torch.where(mask_T, loss_T, 0).sum()
    num_tokens = mask_T.sum().int()
    return total, num_tokens, torch.stack([total.detach().double(), num_tokens.double()])


def _sums(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch, *, loss: TokenLoss, further: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_sum_loss`, whose report goes on with the sum and the number of losses of further tokens in this micro-batch."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    total, num_tokens, report = _sum_loss(logprob_T, entropy_T, shard, loss=loss)
    held, found = MTPLossLoggingHelper.tracker, report.new_zeros(2)
    if further:  # the mean, and the number that it is of
        found += torch.stack([(held["loss_values"] * held["total_values"]).sum(), held["total_values"].sum()])
    held.clear()
    return total, num_tokens, torch.cat([report, found])


@contextlib.contextmanager
def _mode(trainer: TrainerModel, *, training: bool) -> Iterator[None]:
    """Set modules to training or evaluation mode, and to training mode again afterwards."""
    for chunk in trainer.chunks:
        chunk.train(training)
    try:
        yield
    finally:
        for chunk in trainer.chunks:
            chunk.train()


def _coordinate(trainer: TrainerModel) -> Coordinate:
    return trainer.mesh.coordinate(dist.get_rank())


def device_of(trainer: TrainerModel) -> torch.device:
    """Device of this rank's tensors."""
    return torch.device("cpu") if trainer.tier == "cpu" else torch.device("cuda", torch.cuda.current_device())
