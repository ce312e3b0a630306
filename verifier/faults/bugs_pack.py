"""Bugs of packing: rollouts to the rows that each rank works on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, Fired, Inject
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.data.rollout import Rollout
    from verifier.train.pack import PackedBatch

STEP = "verifier.train.step_megatron"
CP2, TP2 = Mesh(cp=2), Mesh(tp=2)


def on_packs(change: Callable[[PackedBatch], PackedBatch | None]) -> Inject:
    """A fault in packing: every micro-batch as `change` gives it; None leaves it."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def pack(rollouts: Any, alignment: Any, **options: Any) -> Any:
                packed = original(rollouts, alignment, **options)
                found = change(packed) if packed.ids else None
                if found is None:
                    return packed
                fired()
                return found

            return pack

        return replaced(f"{STEP}:pack", "rollouts, alignment, pad_token, extra", make)

    return inject


def on_rollouts(change: Callable[[list[Rollout]], list[Rollout] | None]) -> Inject:
    """A fault before packing: the rollouts of every micro-batch as `change` gives them; None leaves them."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def pack(rollouts: Any, alignment: Any, **options: Any) -> Any:
                found = change(list(rollouts)) if rollouts else None
                if found is None:
                    return original(rollouts, alignment, **options)
                fired()
                return original(found, alignment, **options)

            return pack

        return replaced(f"{STEP}:pack", "rollouts, alignment, pad_token, extra", make)

    return inject


def on_shards(change: Callable[[PackedBatch, PackedBatch, int], PackedBatch | None]) -> Inject:
    """A fault in context-parallel sharding: `change` gets the whole pack, the right shard and its rank."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def shard_cp(packed: Any, cp_rank: int) -> Any:
                shard = original(packed, cp_rank)
                found = change(packed, shard, cp_rank) if packed.ids else None
                if found is None:
                    return shard
                fired()
                return found

            return shard_cp

        return replaced(f"{STEP}:shard_cp", "packed, cp_rank", make)

    return inject


def _neighbours(packed: PackedBatch, rows: int) -> Any:
    """[T] bool: whether the row so many rows before lies in the same sub-sequence."""
    return packed.segments_T == packed.segments_T.roll(rows)


def _mask_of_the_input(packed: PackedBatch) -> PackedBatch:
    mask_T = packed.loss_mask_T.roll(1) & _neighbours(packed, 1) & (packed.labels_T >= 0)
    return dataclasses.replace(packed, loss_mask_T=mask_T)


def _mask_of_the_response(packed: PackedBatch) -> PackedBatch:
    from verifier.data.rollout import Role

    written_T = (packed.roles_T.roll(-1) != Role.PROMPT) & (packed.labels_T >= 0)
    return dataclasses.replace(packed, loss_mask_T=written_T)


def _mask_wiped_where_padded(packed: PackedBatch) -> PackedBatch:
    padded_S = packed.cu_seqlens_padded.diff() > packed.cu_seqlens.diff()
    wiped_T = padded_S[packed.segments_T.clamp(min=0).long()]
    return dataclasses.replace(packed, loss_mask_T=packed.loss_mask_T & ~wiped_T)


def _padding_as_tokens(packed: PackedBatch) -> PackedBatch:
    return dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens_padded)


def _floored_boundaries(packed: PackedBatch) -> PackedBatch:
    cp = packed.alignment.cp
    return dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens // cp * cp)


def _other_tokens_on_rank_1(packed: PackedBatch) -> PackedBatch | None:
    import torch.distributed as dist

    if dist.get_rank() != 1:
        return None
    return dataclasses.replace(packed, tokens_T=packed.tokens_T.flip(0))


def _logprobs_of_the_input(packed: PackedBatch) -> PackedBatch:
    return dataclasses.replace(packed, engine_logprobs_T=packed.engine_logprobs_T.roll(1))


def _labels_across_samples(packed: PackedBatch) -> PackedBatch:
    labels_T = packed.labels_T.clone()
    starts = packed.cu_seqlens_padded[1:-1].long()
    last = packed.cu_seqlens_padded[:-2].long() + packed.cu_seqlens.diff()[:-1].long() - 1
    labels_T[last] = packed.tokens_T[starts]
    return dataclasses.replace(packed, labels_T=labels_T)


def _versions_counted() -> Inject:
    packs: list[str] = []

    def change(packed: PackedBatch) -> PackedBatch | None:
        import torch

        packs.append(packed.ids[0])
        versions_T = torch.where(packed.versions_T < 0, packed.versions_T, len(packs) - 1).int()
        return (
            None if torch.equal(versions_T, packed.versions_T) else dataclasses.replace(packed, versions_T=versions_T)
        )

    return on_packs(change)


def _labels_rolled_in_the_shard(whole: PackedBatch, shard: PackedBatch, cp_rank: int) -> PackedBatch:
    import torch

    within_T = _neighbours(shard, -1) & (shard.labels_T >= 0)
    return dataclasses.replace(shard, labels_T=torch.where(within_T, shard.tokens_T.roll(-1), shard.labels_T))


def _contiguous_chunks(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def cp_rows(cu_seqlens_padded: Any, cp: int, cp_rank: int) -> Any:
            import itertools

            import numpy as np

            fired()
            parts = [
                np.arange(begin, end).reshape(cp, -1)[cp_rank] for begin, end in itertools.pairwise(cu_seqlens_padded)
            ]
            return np.concatenate(parts)

        return cp_rows

    return replaced("verifier.train.pack:cp_rows", "cu_seqlens_padded, cp, cp_rank", make)


def _last_sample_dropped(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def split_by_count(num_rollouts: int, **sizes: int) -> Any:
            fired()
            return original(num_rollouts - 1, **sizes)

        return split_by_count

    return replaced(f"{STEP}:split_by_count", "num_rollouts, dp, micro_batch_size, multiple", make)


def _fields_of_the_rejected(rollouts: list[Rollout]) -> list[Rollout] | None:
    import numpy as np

    others = rollouts[1:] + rollouts[:1]
    return [
        dataclasses.replace(one, logprobs=np.resize(other.logprobs, len(one)))
        for one, other in zip(rollouts, others, strict=True)
    ]


def _groups_of_one(packed: PackedBatch) -> PackedBatch:
    return dataclasses.replace(packed, groups=packed.ids)


@contextlib.contextmanager
def _versions_of_now(fired: Fired) -> Iterator[None]:
    from msgspec.structs import replace

    def make(original: Any) -> Any:
        def rollouts_of(rows: Any) -> Any:
            fired()
            return original([replace(row, versions=tuple(version + 1 for version in row.versions)) for row in rows])

        return rollouts_of

    with replaced("verifier.runs.session_megatron:rollouts_of", "rows", make):
        yield


@contextlib.contextmanager
def _mask_not_kept(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def make_rollout(*given: Any, mask: Any = None, **fields: Any) -> Any:
            fired()
            return original(*given, **fields)

        return make_rollout

    parameters = "rollout_id, prompt, response, group, sampled, mask, logprobs, versions, reward, routes"
    with replaced("verifier.runs.workload:make_rollout", parameters, make):
        yield


def _other_logprobs_on_rank_1(packed: PackedBatch) -> PackedBatch | None:
    import torch.distributed as dist

    if dist.get_rank() != 1:
        return None
    return dataclasses.replace(packed, engine_logprobs_T=packed.engine_logprobs_T * 1.5)


def _rewards_in_another_order(packed: PackedBatch) -> PackedBatch:
    return dataclasses.replace(packed, rewards=packed.rewards[1:] + packed.rewards[:1])


def _fault(name: str, reproduces: str, summary: str, caught_by: tuple[str, ...], inject: Inject, mesh: Mesh) -> Fault:
    return Fault(
        id=name, stage=Stage.PACK, reproduces=reproduces, summary=summary, caught_by=caught_by, inject=inject,
        model="tiny:qwen3", mesh=mesh, engine=NO_ENGINE,
    )  # fmt: skip


FAULTS = (
    _fault(
        "groups-of-one",
        "rllm-org/rllm#605",
        "rollouts are grouped by their own id, so that each is compared with nothing but itself",
        ("PCK001",),
        on_packs(_groups_of_one),
        CP2,
    ),
    _fault(
        "versions-of-a-later-policy",
        "areal-project/AReaL#1569",
        "tokens are stamped with the version that is in force when their answer is taken in, after an update",
        ("PCK001",),
        _versions_of_now,
        TP2,
    ),
    _fault(
        "mask-not-kept",
        "NVIDIA-NeMo/RL#3766",
        "what is left out of the loss, such as an answer that was cut off, is not kept, and all of it is trained on",
        ("PCK001", "LSS001"),
        _mask_not_kept,
        TP2,
    ),
    _fault(
        "field-differs-on-one-rank",
        "Simple-Efficient/RL-Factory#46",
        "each rank of a tensor-parallel group makes one field by itself, and one rank's differs",
        ("PCK003",),
        on_packs(_other_logprobs_on_rank_1),
        TP2,
    ),
    _fault(
        "rewards-in-another-order",
        "NovaSky-AI/SkyRL#1908",
        "samples of a pack are put in another order, all but their rewards",
        ("PCK001", "LSS001"),
        on_packs(_rewards_in_another_order),
        CP2,
    ),
    _fault(
        "mask-of-input-not-label",
        "verl-project/verl#3287",
        "the loss mask is that of each row's input, not of the token that the row predicts",
        ("PCK001", "LSS001"),
        on_packs(_mask_of_the_input),
        CP2,
    ),
    _fault(
        "mask-from-attention",
        "verl-project/verl#2543",
        "the loss mask is made of what is attended to, so tool output of a dialogue is trained on",
        ("PCK001", "LSS001"),
        on_packs(_mask_of_the_response),
        CP2,
    ),
    _fault(
        "mask-wiped-by-padding",
        "NVIDIA-NeMo/Automodel#2314",
        "a mask made before padding falls on other tokens and is wiped, in the samples that got padding",
        ("PCK001", "LSS001"),
        on_packs(_mask_wiped_where_padded),
        CP2,
    ),
    _fault(
        "padding-taken-for-tokens",
        "NVIDIA/Megatron-LM#5541",
        "padded boundaries stand where attention expects those of the tokens",
        ("PCK002",),
        on_packs(_padding_as_tokens),
        CP2,
    ),
    _fault(
        "boundaries-floored",
        "ISEEKYAN/Megatron-LM#111",
        "boundaries are divided by the context-parallel size and rounded down, so odd lengths end a token early",
        ("PCK002",),
        on_packs(_floored_boundaries),
        CP2,
    ),
    _fault(
        "batch-differs-on-one-rank",
        "sii-research/siiRL#69",
        "the batch is not handed to one rank of a group, which embeds other tokens than its peers",
        ("PCK003", "LGP001"),
        on_packs(_other_tokens_on_rank_1),
        TP2,
    ),
    _fault(
        "engine-logprobs-of-the-input",
        "PrimeIntellect-ai/prime-rl#1525",
        "the trainer's log-probabilities moved to their label, the engine's stayed at the input",
        ("PCK001",),
        on_packs(_logprobs_of_the_input),
        CP2,
    ),
    _fault(
        "labels-across-samples",
        "NVIDIA/Megatron-LM#4495",
        "labels are shifted over the whole pack: a sample's last token predicts the next sample's first",
        ("PCK001",),
        on_packs(_labels_across_samples),
        CP2,
    ),
    _fault(
        "versions-counted",
        "Tencent-Hunyuan/UniRL#324",
        "tokens are stamped with a counter of batches that were fed, not with the version that sampled them",
        ("PCK001",),
        lambda fired: _versions_counted()(fired),
        CP2,
    ),
    _fault(
        "labels-rolled-in-the-shard",
        "verl-project/verl#4250",
        "labels are shifted after sharding, so a chunk's last token predicts the next local chunk's first",
        ("PCK001", "LGP001"),
        on_shards(_labels_rolled_in_the_shard),
        CP2,
    ),
    _fault(
        "chunks-contiguous",
        "modelscope/ms-swift#10071",
        "context-parallel ranks take contiguous chunks where attention expects two of the zigzag each",
        ("PCK002", "LGP001"),
        _contiguous_chunks,
        CP2,
    ),
    _fault(
        "last-sample-dropped",
        "THUDM/slime#2238",
        "a finished sample is cut off when the batch is split, and nothing says so",
        ("PCK001", "LGP001", "LSS001"),
        _last_sample_dropped,
        CP2,
    ),
    _fault(
        "fields-of-rejected-sample",
        "NovaSky-AI/SkyRL#1908",
        "a sample is replaced, but for one field: the engine's log-probabilities are the other sample's",
        ("PCK001",),
        on_rollouts(_fields_of_the_rejected),
        CP2,
    ),
)
