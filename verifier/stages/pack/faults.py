"""Bugs of packing, rollouts to the rows that each rank works on, and of replay, their routes to its routers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, in_training, kind
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.megatron.pack import PackedBatch

STEP = "verifier.megatron.step_megatron"
PACK = f"{STEP}:pack(rollouts, alignment, numbers, columns)"
Fields = dict[str, Any] | None
ROW: dict[str, Any] = {"stage": Stage.PACK, "model": "tiny:qwen3", "engine": NO_ENGINE}
CP2: dict[str, Any] = {**ROW, "mesh": Mesh(cp=2)}
TP2: dict[str, Any] = {**ROW, "mesh": Mesh(tp=2)}


@kind(PACK)
def on_packs(change: Callable[[PackedBatch], Fields], call: Call) -> Any:
    """Pack wrongly: the function returns wrong fields of a micro-batch's pack, or None to keep the right ones."""
    packed = call.original()
    wrong = change(packed) if packed.ids else None
    return packed if wrong is None else call.wrong(dataclasses.replace(packed, **wrong))


def _same_sample(packed: PackedBatch, rows: int) -> Any:
    """[T] bool: whether the row so many rows before lies in the same sub-sequence."""
    return packed.segments_T == packed.segments_T.roll(rows)


@on_packs("rllm-org/rllm#605", caught_by=("PCK001",), **CP2)
def groups_of_one(packed: PackedBatch) -> Fields:
    """Rollouts are grouped by their own id, so that each is compared with nothing but itself."""
    return {"groups": packed.ids}


@on_packs("verl-project/verl#3287", caught_by=("PCK001", "LSS001"), **CP2)
def mask_of_input_not_label(packed: PackedBatch) -> Fields:
    """The loss mask is that of each row's input, not of the token that the row predicts."""
    return {"loss_mask_T": packed.loss_mask_T.roll(1) & _same_sample(packed, 1) & (packed.labels_T >= 0)}


@on_packs("NVIDIA/Megatron-LM#5541", caught_by=("PCK002",), **CP2)
def padding_taken_for_tokens(packed: PackedBatch) -> Fields:
    """Attention gets the padded boundaries where it expects those of the tokens."""
    return {"cu_seqlens": packed.cu_seqlens_padded}


@on_packs("sii-research/siiRL#69", caught_by=("PCK003", "LGP001"), **TP2)
def batch_differs_on_one_rank(packed: PackedBatch) -> Fields:
    """The batch does not reach one rank of a group, which embeds other tokens than its peers."""
    import torch.distributed as dist

    return {"tokens_T": packed.tokens_T.flip(0)} if dist.get_rank() == 1 else None


@fault(
    "verl-project/verl#4250", f"{STEP}:shard_cp(packed, cp_rank)", caught_by=("PCK001", "LGP001"), **CP2,
)  # fmt: skip
def labels_rolled_in_the_shard(call: Call) -> Any:
    """Labels are shifted after sharding, so a chunk's last token predicts the next local chunk's first."""
    shard = call.original()
    if not call.packed.ids:
        return shard
    within_T = _same_sample(shard, -1) & (shard.labels_T >= 0)
    return call.wrong(dataclasses.replace(shard, labels_T=shard.tokens_T.roll(-1).where(within_T, shard.labels_T)))


@fault(
    "modelscope/ms-swift#10071", "verifier.megatron.pack:cp_rows(cu_seqlens_padded, cp, cp_rank)",
    caught_by=("PCK002", "LGP001"), **CP2,
)  # fmt: skip
def chunks_contiguous(call: Call) -> Any:
    """Context-parallel ranks take contiguous chunks where attention expects two of the zigzag each."""
    import numpy as np

    samples = itertools.pairwise(call.cu_seqlens_padded)
    chunks = [np.arange(begin, end).reshape(call.cp, -1)[call.cp_rank] for begin, end in samples]
    return call.wrong(np.concatenate(chunks))


@fault(
    "THUDM/slime#2238", f"{STEP}:split_by_count(num_rollouts, dp, micro_batch_size, multiple)",
    caught_by=("PCK001", "LGP001", "LSS001"), **CP2,
)  # fmt: skip
def last_sample_dropped(call: Call) -> Any:
    """A finished sample is cut off when the batch is split, and nothing reports it."""
    return call.faulty(num_rollouts=call.num_rollouts - 1)


@in_training(
    "PrimeIntellect-ai/prime-rl#583", PACK, stage=Stage.PACK, caught_by=("PCK004",), mesh=Mesh(dp=2),
    training=("aggregation=sequence_mean", "algorithm=grpo"),
)  # fmt: skip
def weights_normalised_by_rank(call: Call) -> Any:
    """A data-parallel rank normalises the weights once more over its own micro-batch, so its few tokens count more."""
    weights = (call.columns or {}).get("weight", [])
    total, num_tokens = sum(float(part.sum()) for part in weights), sum(int(item.mask.sum()) for item in call.rollouts)
    if not total:
        return call.original()
    return call.faulty(columns={**call.columns, "weight": [part * num_tokens / total for part in weights]})
