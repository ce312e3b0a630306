"""Probes of a trainer's tokens: its rollouts, the token that every row of every shard is, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from verifier.core.record import Probe, Record
from verifier.data.rollout import Rollout
from verifier.megatron.pack import PackedBatch, loss_rows
from verifier.mesh import Mesh
from verifier.plan.digest import digest_tensor, raw_bytes
from verifier.stages.logprob.records import ReturnedLogprobs, TrainerLogprobs
from verifier.stages.pack.records import PackedBatchDigest, PackLayout, Rollouts, TokenLedger


def record_of_rollouts(name: str, version: int, rollouts: Sequence[Rollout]) -> tuple[Rollouts, dict[str, np.ndarray]]:
    """The record of a pass's rollouts, in the order in which the pass gets them, and its arrays."""
    record = Rollouts(
        name=name, version=version, ids=tuple(item.id for item in rollouts),
        groups=tuple(item.group for item in rollouts), lengths=tuple(len(item) for item in rollouts),
        prompt_lengths=tuple(item.prompt_length for item in rollouts),
        rewards=tuple(float(item.reward) for item in rollouts),
    )  # fmt: skip
    kept = ("tokens", "sampled", "mask", "roles", "logprobs", "versions")
    return record, {field: np.concatenate([getattr(item, field) for item in rollouts]) for field in kept}


def record_scored(
    probe: Probe, name: str, version: int, scored: Sequence[torch.Tensor], temperature: float, *, whole: bool
) -> None:
    """Log-probabilities that one rank got back, one vector a rollout, nats; one rank records them `whole`."""
    values = torch.cat(list(scored))
    probe.emit(ReturnedLogprobs(name=name, version=version, digest=digest_tensor(values)))
    if whole:
        lengths = tuple(row.numel() for row in scored)
        probe.emit(TrainerLogprobs(name=name, version=version, lengths=lengths, temperature=temperature), values)


class TokenProbe:
    """Records what this rank's micro-batches hold, and on rank 0 what the run says of their tokens.

    Args:
        probe: this rank's recorder.
        mesh: parallel sizes.
        rank: this rank.
        name: of the pass over the tokens, such as "scored" or "trained".
        version: of the weights.
        rollouts: what has to be handed to packing, the same on every rank, and made by no code that makes that.
    """

    def __init__(
        self, probe: Probe, mesh: Mesh, rank: int, name: str, version: int, rollouts: Sequence[Rollout]
    ) -> None:
        self._probe, self._rank, self._at = probe, rank, mesh.coordinate(rank)
        self._name, self._version, self._rollouts = name, version, rollouts

    def __call__(self, shards: Sequence[PackedBatch]) -> Callable[[], None]:
        """Copy what the micro-batches hold before the pass; returns what digests and writes the copies after it.

        On a GPU the host does so while the GPU computes.
        """
        at, whole = self._at, _everything(shards)
        rows = [] if at.tp or at.pp else self._rows(shards)

        def write() -> None:
            if self._rank == 0:
                self._probe.emit(*record_of_rollouts(self._name, self._version, self._rollouts))
            for record, arrays in rows:
                self._probe.emit(record, arrays)
            # Last: the digest of a GPU, where it costs less than on the host, waits for what that still computes.
            digest = digest_tensor(whole.cuda() if torch.cuda.is_initialized() else whole)
            self._probe.emit(
                PackedBatchDigest(
                    name=f"{self._name} dp={at.dp} cp={at.cp}", version=self._version, coordinate=str(at),
                    digest=digest, micro_batches=len(shards),
                )
            )  # fmt: skip

        return write

    def _rows(self, shards: Sequence[PackedBatch]) -> list[tuple[Record, Any]]:
        """Each micro-batch's layout and the ledger of all, with copies of their arrays."""
        lengths = {rollout.id: len(rollout) for rollout in self._rollouts}
        layouts = [
            PackLayout(
                name=f"{self._name} micro-batch {number}", version=self._version, cp_rank=self._at.cp,
                cu_seqlens=tuple(shard.cu_seqlens.tolist()), cu_seqlens_padded=tuple(shard.cu_seqlens_padded.tolist()),
                max_seqlen=shard.max_seqlen, lengths=tuple(lengths.get(name, 0) for name in shard.ids),
                filler=not shard.ids,
            )
            for number, shard in enumerate(shards)
        ]  # fmt: skip
        ledger = TokenLedger(name=self._name, version=self._version, coordinate=str(self._at))
        return [*zip(layouts, (shard.rows_T.clone() for shard in shards), strict=True), (ledger, loss_rows(shards))]


def _everything(shards: Sequence[PackedBatch]) -> torch.Tensor:
    """The bytes of every field of all shards in one vector, so that one digest stands for a rank's whole batch."""
    parts = []
    for shard in shards:
        values = [getattr(shard, field.name) for field in fields(shard) if field.name != "columns"]
        values += shard.columns.values()
        plain = [value for value in values if not isinstance(value, torch.Tensor)]
        parts.append(torch.frombuffer(bytearray(repr(plain).encode()), dtype=torch.uint8))
        parts += [raw_bytes(value) for value in values if isinstance(value, torch.Tensor)]
    return torch.cat(parts)
