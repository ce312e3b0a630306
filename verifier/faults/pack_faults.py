"""Bugs of packing: rollouts to the rows that each rank works on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, kind
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.data.rollout import Rollout
    from verifier.train.pack import PackedBatch

STEP = "verifier.train.step_megatron"
PACK = f"{STEP}:pack(rollouts, alignment, numbers)"
MAKE_ROLLOUT = (
    "verifier.runs.workload:make_rollout("
    "rollout_id, prompt, response, group, sampled, mask, logprobs, versions, reward, routes)"
)
ROW: dict[str, Any] = {"stage": Stage.PACK, "model": "tiny:qwen3", "engine": NO_ENGINE}
CP2: dict[str, Any] = {**ROW, "mesh": Mesh(cp=2)}
TP2: dict[str, Any] = {**ROW, "mesh": Mesh(tp=2)}


@kind(PACK)
def on_packs(change: Callable[[PackedBatch], PackedBatch | None], call: Call) -> Any:
    """Pack wrongly: the function returns a micro-batch's wrong pack, or None to keep the right one."""
    packed = call.original()
    wrong = change(packed) if packed.ids else None
    return packed if wrong is None else call.wrong(wrong)


@kind(PACK)
def on_rollouts(change: Callable[[list[Rollout]], list[Rollout] | None], call: Call) -> Any:
    """Pack wrong rollouts: the function returns them, or None to keep the right ones."""
    wrong = change(list(call.rollouts)) if call.rollouts else None
    return call.original() if wrong is None else call.faulty(rollouts=wrong)


@kind(f"{STEP}:shard_cp(packed, cp_rank)")
def on_shards(change: Callable[[PackedBatch, PackedBatch, int], PackedBatch | None], call: Call) -> Any:
    """Shard wrongly: the function of whole pack, right shard and its rank returns a wrong one, or None."""
    shard = call.original()
    wrong = change(call.packed, shard, call.cp_rank) if call.packed.ids else None
    return shard if wrong is None else call.wrong(wrong)


def _same_sample(packed: PackedBatch, rows: int) -> Any:
    """[T] bool: whether the row so many rows before lies in the same sub-sequence."""
    return packed.segments_T == packed.segments_T.roll(rows)


def _on_rank_1() -> bool:
    import torch.distributed as dist

    return bool(dist.get_rank() == 1)


@on_packs("rllm-org/rllm#605", caught_by=("PCK001",), **CP2)
def groups_of_one(packed: PackedBatch) -> PackedBatch:
    """Rollouts are grouped by their own id, so that each is compared with nothing but itself."""
    return dataclasses.replace(packed, groups=packed.ids)


@fault("areal-project/AReaL#1569", "verifier.runs.session_megatron:rollouts_of(rows)", caught_by=("PCK001",), **TP2)
def versions_of_a_later_policy(call: Call) -> Any:
    """Tokens are stamped with the version in force when their answer is collected, which is after an update."""
    later = [replace(row, versions=tuple(version + 1 for version in row.versions)) for row in call.rows]
    return call.faulty(rows=later)


@fault("NVIDIA-NeMo/RL#3766", MAKE_ROLLOUT, caught_by=("PCK001", "LSS001"), **TP2)
def mask_not_kept(call: Call) -> Any:
    """The mask that keeps an answer that was cut off out of the loss is lost, and all of it is trained on."""
    return call.faulty(mask=None)


@on_packs("Simple-Efficient/RL-Factory#46", caught_by=("PCK003",), **TP2)
def field_differs_on_one_rank(packed: PackedBatch) -> PackedBatch | None:
    """Each rank of a tensor-parallel group computes one field by itself, and one rank's differs."""
    if not _on_rank_1():
        return None
    return dataclasses.replace(packed, engine_logprobs_T=packed.engine_logprobs_T * 1.5)


@on_packs("NovaSky-AI/SkyRL#1908", caught_by=("PCK001", "LSS001"), **CP2)
def rewards_in_another_order(packed: PackedBatch) -> PackedBatch:
    """Samples of a pack are put in another order, all but their rewards."""
    return dataclasses.replace(packed, rewards=packed.rewards[1:] + packed.rewards[:1])


@on_packs("verl-project/verl#3287", caught_by=("PCK001", "LSS001"), **CP2)
def mask_of_input_not_label(packed: PackedBatch) -> PackedBatch:
    """The loss mask is that of each row's input, not of the token that the row predicts."""
    mask_T = packed.loss_mask_T.roll(1) & _same_sample(packed, 1) & (packed.labels_T >= 0)
    return dataclasses.replace(packed, loss_mask_T=mask_T)


@on_packs("verl-project/verl#2543", caught_by=("PCK001", "LSS001"), **CP2)
def mask_from_attention(packed: PackedBatch) -> PackedBatch:
    """The loss mask is made of what is attended to, so tool output of a dialogue is trained on."""
    from verifier.data.rollout import Role

    written_T = (packed.roles_T.roll(-1) != Role.PROMPT) & (packed.labels_T >= 0)
    return dataclasses.replace(packed, loss_mask_T=written_T)


@on_packs("NVIDIA-NeMo/Automodel#2314", caught_by=("PCK001", "LSS001"), **CP2)
def mask_wiped_by_padding(packed: PackedBatch) -> PackedBatch:
    """A mask made before padding falls on other tokens and is wiped, in the samples that were padded."""
    padded_S = packed.cu_seqlens_padded.diff() > packed.cu_seqlens.diff()
    wiped_T = padded_S[packed.segments_T.clamp(min=0).long()]
    return dataclasses.replace(packed, loss_mask_T=packed.loss_mask_T & ~wiped_T)


@on_packs("NVIDIA/Megatron-LM#5541", caught_by=("PCK002",), **CP2)
def padding_taken_for_tokens(packed: PackedBatch) -> PackedBatch:
    """Attention gets the padded boundaries where it expects those of the tokens."""
    return dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens_padded)


@on_packs("ISEEKYAN/Megatron-LM#111", caught_by=("PCK002",), **CP2)
def boundaries_floored(packed: PackedBatch) -> PackedBatch:
    """Boundaries are divided by the context-parallel size and rounded down, so odd lengths end a token early."""
    cp = packed.alignment.cp
    return dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens // cp * cp)


@on_packs("sii-research/siiRL#69", caught_by=("PCK003", "LGP001"), **TP2)
def batch_differs_on_one_rank(packed: PackedBatch) -> PackedBatch | None:
    """The batch does not reach one rank of a group, which embeds other tokens than its peers."""
    return dataclasses.replace(packed, tokens_T=packed.tokens_T.flip(0)) if _on_rank_1() else None


@on_packs("PrimeIntellect-ai/prime-rl#1525", caught_by=("PCK001",), **CP2)
def engine_logprobs_of_the_input(packed: PackedBatch) -> PackedBatch:
    """The trainer's log-probabilities moved to their label, the engine's stayed at the input."""
    return dataclasses.replace(packed, engine_logprobs_T=packed.engine_logprobs_T.roll(1))


@on_packs("NVIDIA/Megatron-LM#4495", caught_by=("PCK001",), **CP2)
def labels_across_samples(packed: PackedBatch) -> PackedBatch:
    """Labels are shifted over the whole pack: a sample's last token predicts the next sample's first."""
    labels_T = packed.labels_T.clone()
    starts = packed.cu_seqlens_padded[1:-1].long()
    last = packed.cu_seqlens_padded[:-2].long() + packed.cu_seqlens.diff()[:-1].long() - 1
    labels_T[last] = packed.tokens_T[starts]
    return dataclasses.replace(packed, labels_T=labels_T)


@fault("Tencent-Hunyuan/UniRL#324", PACK, caught_by=("PCK001",), **CP2)
def versions_counted(call: Call) -> Any:
    """Tokens are stamped with a counter of batches that were fed, not with the version that sampled them."""
    packed = call.original()
    if not packed.ids:
        return packed
    batch = call.state["batch"] = call.state.get("batch", -1) + 1
    versions_T = packed.versions_T.masked_fill(packed.versions_T >= 0, batch)
    same = versions_T.equal(packed.versions_T)
    return packed if same else call.wrong(dataclasses.replace(packed, versions_T=versions_T))


@on_shards("verl-project/verl#4250", caught_by=("PCK001", "LGP001"), **CP2)
def labels_rolled_in_the_shard(whole: PackedBatch, shard: PackedBatch, cp_rank: int) -> PackedBatch:
    """Labels are shifted after sharding, so a chunk's last token predicts the next local chunk's first."""
    within_T = _same_sample(shard, -1) & (shard.labels_T >= 0)
    return dataclasses.replace(shard, labels_T=shard.tokens_T.roll(-1).where(within_T, shard.labels_T))


@fault(
    "modelscope/ms-swift#10071", "verifier.train.pack:cp_rows(cu_seqlens_padded, cp, cp_rank)",
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


@on_rollouts("NovaSky-AI/SkyRL#1908", caught_by=("PCK001",), **CP2)
def fields_of_rejected_sample(rollouts: list[Rollout]) -> list[Rollout]:
    """A sample is replaced, but for one field: the engine's log-probabilities are the other sample's."""
    import numpy as np

    others = rollouts[1:] + rollouts[:1]
    return [
        dataclasses.replace(one, logprobs=np.resize(other.logprobs, len(one)))
        for one, other in zip(rollouts, others, strict=True)
    ]
