"""Probes of the token path: which token of which rollout every row of every shard is, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verifier.core.evidence import Evidence, Probe
from verifier.core.stage import Stage
from verifier.data.rollout import Rollout
from verifier.mesh import Mesh
from verifier.plan.digest import digest_tensor, raw_bytes
from verifier.train.pack import PackedBatch
from verifier.train.token_ledger import LossRows, audit, loss_rows

SHOWN = 8
"""Misplaced tokens that are listed per rollout; the count is of all."""


class TokenProbe:
    """Records what this rank's micro-batches hold; a collective, since one rank audits the rows of all.

    Args:
        probe: this rank's recorder.
        mesh: parallel sizes.
        rank: this rank.
        name: of the pass over the tokens, such as "scored" or "trained".
        version: weight version.
        rollouts: what has to be handed to packing, the same on every rank, and made by no code that makes that.
    """

    def __init__(
        self, probe: Probe, mesh: Mesh, rank: int, name: str, version: int, rollouts: Sequence[Rollout]
    ) -> None:
        self._probe, self._mesh, self._rank = probe, mesh, rank
        self._name, self._version, self._rollouts = name, version, rollouts

    def __call__(self, shards: Sequence[PackedBatch]) -> Callable[[], None] | None:
        """Look at this rank's shards, in the order of its micro-batches; on rank 0, returns the audit of all ranks'."""
        at = self._mesh.coordinate(self._rank)
        self._probe.emit(
            Evidence(
                stage=Stage.PACK, kind="batch", name=f"{self._name} dp={at.dp} cp={at.cp}", version=self._version,
                digest=digest_tensor(_everything(shards)), facts={"at": str(at), "micro_batches": len(shards)},
            )
        )  # fmt: skip
        owner = at.tp == 0 and at.pp == 0
        if owner:
            self._record_layout(shards, cp_rank=at.cp)
        mine = loss_rows(shards) if owner else None
        everyone: list[Any] = [mine]
        if self._mesh.world_size > 1:
            everyone = [None] * self._mesh.world_size
            dist.gather_object(mine, everyone if self._rank == 0 else None)
        return partial(self._audit, [rows for rows in everyone if rows is not None]) if self._rank == 0 else None

    def _record_layout(self, shards: Sequence[PackedBatch], cp_rank: int) -> None:
        lengths = {rollout.id: len(rollout) for rollout in self._rollouts}
        for number, shard in enumerate(shards):
            self._probe.emit(
                Evidence(
                    stage=Stage.PACK, kind="layout", name=f"{self._name} micro-batch {number}", version=self._version,
                    facts={
                        "cp_rank": cp_rank,
                        "cu_seqlens": shard.cu_seqlens.tolist(),
                        "cu_seqlens_padded": shard.cu_seqlens_padded.tolist(),
                        "max_seqlen": shard.max_seqlen,
                        "lengths": [lengths.get(name, 0) for name in shard.ids],
                        "filler": not shard.ids,
                    },
                ),
                shard.rows_T,
            )  # fmt: skip

    def _audit(self, parts: Sequence[LossRows]) -> None:
        import numpy as np

        rows = parts[0]
        if len(parts) > 1:
            names = [field.name for field in fields(LossRows)]
            rows = LossRows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
        found = audit(self._rollouts, rows)
        for rollout in self._rollouts:
            self._emit_audit(rollout.id, len(rollout), [item for item in found if item.rollout == rollout.id])
        self._emit_audit("padding", int((rows.sentinel_T == 0).sum()), [item for item in found if not item.rollout])

    def _emit_audit(self, name: str, num_tokens: int, misplaced: Sequence[Any]) -> None:
        shown = [[m.position, m.field, m.expected, m.actual] for m in misplaced[:SHOWN]]
        self._probe.emit(
            Evidence(
                stage=Stage.PACK, kind="ledger", name=f"{self._name} {name}", version=self._version,
                facts={"tokens": num_tokens, "misplaced": len(misplaced), "shown": _finite(shown)},
            )
        )  # fmt: skip


def _finite(rows: list[list[Any]]) -> list[list[Any]]:
    """JSON has no NaN: spelled out."""
    return [[str(value) if value != value else value for value in row] for row in rows]


def _everything(shards: Sequence[PackedBatch]) -> torch.Tensor:
    """The bytes of every field of all shards in one vector, so that one digest stands for a rank's whole batch.

    On this rank's GPU, if it has started one: a digest costs less there than on the host.
    """
    parts = []
    for shard in shards:
        values = [getattr(shard, field.name) for field in fields(shard) if field.name != "extra"]
        values += [shard.extra[name] for name in sorted(shard.extra)]
        plain = [value for value in values if not isinstance(value, torch.Tensor)]
        parts.append(torch.frombuffer(bytearray(repr(plain).encode()), dtype=torch.uint8))
        parts += [raw_bytes(value) for value in values if isinstance(value, torch.Tensor)]
    whole = torch.cat(parts)
    return whole.cuda() if torch.cuda.is_initialized() else whole
