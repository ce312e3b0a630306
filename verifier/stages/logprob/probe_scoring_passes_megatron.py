"""Evidence of a rank's scoring passes: log-probabilities of its rows as it made them, and weights of the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from verifier.core.record import Probe
from verifier.data.rollout import Rollout
from verifier.export.live_weights import LiveWeights
from verifier.megatron.pack import PackedBatch
from verifier.megatron.step_megatron import OnRows
from verifier.mesh import Coordinate
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.logprob.records import ARRAYS_OF_PACK, NUMBERS_OF_PACK, GivenArguments, ReferenceShard, ScoredRows
from verifier.trainer.state_megatron import digests_of

SIDES = ("current", "reference")
"""Passes whose log-probabilities the policy loss reads."""
Digests = Mapping[str, dict[str, Any]]
"""Fields of a `TensorRecord` by name; see `digests_of`."""


class ScoringPasses:
    """Passes of a step that score its mini-batches, kept until the step has a trace.

    Args:
        judged: steps have traces, and a policy loss.
    """

    def __init__(self, *, judged: bool) -> None:
        self._judged = judged
        self._weights: list[Digests] = []
        self._rows: list[tuple[str, str, tuple[str, ...], list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def begin(self, which: str, batch: str, rollouts: Sequence[Rollout], live: LiveWeights) -> OnRows | None:
        """Keep a pass that begins now.

        Args:
            which: weights that it scores with.
            batch: name of the file of the rollouts; one of a step's mini-batches is "STEP-NUMBER".
            rollouts: of the batch.
            live: weights of the model.

        Returns:
            What has to be called with the pass's rows; None for a pass that no loss reads.
        """
        if not self._judged or which not in SIDES:
            return None
        if which == "reference":
            self._weights.append(live_digests(live))
        if not batch.replace("-", "").isdigit():
            return None
        rows = list[tuple[torch.Tensor, torch.Tensor]]()
        self._rows.append((which, batch, tuple(item.id for item in rollouts), rows))

        def on_rows(shard: PackedBatch, logprob_T: torch.Tensor) -> None:
            assert shard.ledger_T is not None
            rows.append((shard.ledger_T, logprob_T))

        return on_rows

    def record(self, probe: Probe, version: int, frozen: Digests, begun: Digests, at: Coordinate) -> None:
        """Record the passes of a step, once; those of a step that took no update are forgotten."""
        for item in reference_shards(self._weights, frozen, begun, version):
            probe.emit(item)
        for which, batch, ids, rows in self._rows if at.tp == 0 else ():
            if not rows or int(batch.partition("-")[0]) != version:
                continue
            sentinel_T = torch.cat([ledger_T for ledger_T, _ in rows])
            logprob_T = torch.cat([own_T.float().cpu() for _, own_T in rows])
            kept = sentinel_T != 0
            record = ScoredRows(name=f"{which} {batch}", version=version, which=which, ids=ids, coordinate=str(at))
            probe.emit(record, {"sentinel": sentinel_T[kept].numpy(), "logprob": logprob_T[kept].numpy()})
        self._weights, self._rows = [], []


def live_digests(live: LiveWeights) -> dict[str, dict[str, Any]]:
    """Fields of a `TensorRecord` of the live tensors, as they are, by their names."""
    return digests_of([tensor for _, _, tensor in live.tensors()], live)


def reference_shards(
    passes: Sequence[Digests], frozen: Digests, begun: Digests, version: int
) -> Iterator[ReferenceShard]:  # fmt: skip
    """Records of the tensors that the model held while it scored as the reference.

    Args:
        passes: the live tensors during each pass.
        frozen: of the reference when it was made.
        begun: of the live weights that the run began with; none where it goes on from a checkpoint.
        version: step that the passes are of.
    """
    for number, scored in enumerate(passes):
        for name, fields in scored.items():
            yield ReferenceShard(
                name=f"{name} in pass {number}" if number else name, version=version, frozen=frozen[name]["digest"],
                begun=begun[name]["digest"] if name in begun else None, **fields,
            )  # fmt: skip


@contextlib.contextmanager
def given_arguments(probe: Probe, trainer: TrainerModel, name: str, version: int) -> Iterator[None]:
    """Record what every chunk is given for each micro-batch of a pass, once it is over: nothing waits for a copy."""
    seen: list[tuple[int, Any, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        for number, chunk in enumerate(trainer.chunks):

            def look(_: object, __: object, given: dict[str, Any], number: int = number) -> None:
                seen.append((number, given["packed_seq_params"], given["input_ids"]))

            stack.callback(chunk.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield
    counts = dict.fromkeys(range(len(trainer.chunks)), 0)
    for number, packed, tokens in seen:
        arrays = {key: getattr(packed, key) for key in ARRAYS_OF_PACK}
        lengths = {key: None if values is None else tuple(values.tolist()) for key, values in arrays.items()}
        hints = {key: getattr(packed, key) for key in NUMBERS_OF_PACK if hasattr(packed, key)}
        where = f"{name} micro-batch {counts[number]}"
        probe.emit(
            GivenArguments(
                name=where, version=version, chunk=number, num_rows=tokens.shape[1],
                lacks=tuple(key for key in NUMBERS_OF_PACK if key not in hints), **lengths,
                **{key: None if value is None else int(value) for key, value in hints.items()},
            )
        )  # fmt: skip
        counts[number] += 1
