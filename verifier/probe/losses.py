"""Records of passes over a step's tokens: scores, micro-batches, and each token's loss with its gradient.

The gradient of the loss by a token's log-probability, and by its loss, comes from hooks on the loop's own tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from verifier.core.record import real
from verifier.errors import UsageError
from verifier.plan.digest import described
from verifier.probe.answers import AnswerRecorder
from verifier.probe.sharded import Named, pairs_of
from verifier.probe.steps import OpenStep, of_responses, on_host
from verifier.probe.tokens import Rows, row_of
from verifier.stages.advantage.records import LossColumns
from verifier.stages.logprob.records import (
    ARRAYS_OF_PACK,
    NUMBERS_OF_PACK,
    GivenArguments,
    ReferenceShard,
    ScoredRows,
    SpotScore,
)
from verifier.stages.loss.records import LossRows, UpdateRatios
from verifier.stages.pack.records import PackedBatchDigest, PackLayout, TokenLedger
from verifier.stages.rollout.records import EngineLogprobs

POSITION_BITS = 32
"""Low bits of a sentinel, see `TokenLedger`."""
NO_LABEL = -100
WIDE = ("float32", "float64")
"""Dtypes of rows whose rounding is bounded."""


@dataclass
class _Micro:
    """Rows of the loss of one micro-batch, and gradients as they come."""

    sentinel: np.ndarray
    mask: np.ndarray
    """Elements of the tensors that are rows."""
    columns: dict[str, np.ndarray]
    scale: float
    gradients: dict[str, Any] = field(default_factory=dict)


class LossRecorder(AnswerRecorder):
    """Calls of one process on passes over tokens."""

    gradient_divisor: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self._micros: dict[int, list[_Micro]] = {}
        self._ledgers: dict[int, list[dict[str, np.ndarray]]] = {}
        self._frozen: dict[str, str] = {}

    def scored(self, step: int, logprobs: Rows, *, ids: Sequence[Any], which: str = "current") -> None:
        """Log-probabilities that one scoring pass made for some rollouts of a step, before they are put in order.

        `which` is "current", whose values `trainer_logprobs` is given, or "reference".

        Raises:
            UsageError: an unknown rollout, or a row that is not as long as its response or its rollout.
        """
        own, names = self.opened(step), tuple(map(str, ids))
        sentinel, nats = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for number, (name, row) in enumerate(zip(names, logprobs, strict=True)):
            values = row_of(row, np.float32)
            at = own.positions(name, len(values), "scored")
            sentinel.append((number + 1 << POSITION_BITS) + at)
            nats.append(values[len(values) - len(at) :])
        count = len(self._micros.get(step, ()))
        record = ScoredRows(name=f"{which} {step}-{count}", version=step, which=which, ids=names, coordinate="")
        self.emit(record, {"sentinel": np.concatenate(sentinel), "logprob": np.concatenate(nats)})

    def scored_alone(
        self, step: int, rollout: Any, logprobs: Any, *, reference: Any = None, beginning: Any = None,
    ) -> None:  # fmt: skip
        """Log-probabilities of one rollout that was scored in a batch by itself, with the weights before the step.

        `reference` are those of the reference model, `beginning` those of the rollout without its end.

        Raises:
            UsageError: an unknown rollout, or a row that is not as long as its response or its rollout.
        """
        own, name = self.opened(step), str(rollout)
        whole = own.length(name)
        arrays = {}
        for key, values in (("current", logprobs), ("reference", reference)):
            if values is not None:
                row = row_of(values, np.float32)
                at = own.positions(name, len(row), "scored_alone")
                arrays[key] = np.full(whole - 1, np.nan, np.float32)
                arrays[key][at - 1] = row[len(row) - len(at) :]
        if beginning is not None:
            arrays["beginning"] = row_of(beginning, np.float32)
        record = SpotScore(
            name="rollout alone", version=step, id=name, seed=0, step=step, mini_batches=0,
            temperature=own.tokens.temperature,
        )  # fmt: skip
        self.emit(record, arrays)

    def engine_scores(self, step: int, logprobs: Rows) -> None:
        """Log-probabilities of a step's responses, which the engine was asked for anew after the sync before it.

        Raises:
            UsageError: rows of other numbers or lengths.
        """
        tokens = self.opened(step).tokens
        values = tokens.column(logprobs, "engine_scores")[of_responses(tokens)]
        self.emit(EngineLogprobs(name="old", version=step - 1, lengths=tuple(map(len, tokens.responses))), values)

    def reference_weights(self, step: int, named: Named) -> None:
        """Weights of a frozen reference as they are in a step; those of the first call are what all are to be."""
        for name, tensor in pairs_of(named):
            facts = described(tensor)
            frozen = self._frozen.setdefault(name, facts["digest"])
            self.emit(ReferenceShard(name=name, version=step, frozen=frozen, **facts))

    def micro_batch(
        self, step: int, ids: Sequence[Any], input_ids: Any, *, attention_mask: Any = None, labels: Any = None,
        loss_mask: Any = None, position_ids: Any = None, cu_seqlens: Any = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """One micro-batch of a step as the model gets it, whose logits at each place score the token at the next.

        Args:
            step: number of the step, after its `rollouts`.
            ids: of the rollouts in it: of each row, or of each sequence of a pack.
            input_ids: [B, L] padded rows, or with `cu_seqlens` a pack of [T] or [1, T].
            attention_mask: of the same shape, 0 for padding, also of a pack's sequences; by default there is none.
            labels: of the same shape, the token that each place is to predict (already shifted), -100 for none.
            loss_mask: of the same shape, whether the token that each place predicts is in the loss.
            position_ids: of the same shape.
            cu_seqlens: ends of the sequences of a pack, from 0; one after those of the rollouts is padding.
            arguments: of the packed forward pass, by Megatron's names: cu_seqlens_q, max_seqlen_q and so on.

        Raises:
            UsageError: an unknown rollout, or shapes that do not fit.
        """
        own, tokens = self.opened(step), row_of(input_ids, np.int64)
        given = {"label": labels, "mask": loss_mask, "position": position_ids}
        columns = {key: row_of(value, np.int64) for key, value in given.items() if value is not None}
        kept = np.ones(len(tokens), bool) if attention_mask is None else row_of(attention_mask, np.int64) != 0
        if cu_seqlens is not None:
            ends = [int(end) for end in row_of(cu_seqlens, np.int64)]
            parts = [np.arange(*pair) for pair in pairwise(ends)]
        else:
            parts = np.split(np.arange(len(tokens)), len(ids)) if len(ids) else []
        parts, padding = parts[: len(ids)], parts[len(ids) :]
        fits = {len(column) for column in (*columns.values(), kept)} == {len(tokens)}
        if len(parts) != len(ids) or len(padding) > 1 or not fits:
            raise UsageError(f"a micro-batch of step {step} has {len(ids)} rollouts, its tensors other rows")
        parts = [part[kept[part]] for part in parts]
        sentinel = np.zeros(len(tokens), np.int64)
        for name, part in zip(ids, parts, strict=True):
            sentinel[part[:-1]] = (own.number(str(name)) + 1 << POSITION_BITS) + np.arange(1, max(len(part), 1))
        rows = {"sentinel": sentinel, "input": tokens, **columns}
        if loss_mask is not None:
            rows["mask"] = rows["mask"] != 0
        count = len(self._ledgers.setdefault(step, []))
        self._ledgers[step].append(rows)
        if cu_seqlens is not None:
            lengths = [*(own.length(str(name)) for name in ids), *map(len, padding)]
            real = np.cumsum([0, *map(len, (*parts, *padding))]).tolist()
            self._record_pack(step, f"rollouts micro-batch {count}", lengths, real, ends, arguments or {}, len(tokens))

    def _record_pack(
        self, step: int, name: str, lengths: list[int], real: list[int], ends: list[int], arguments: Mapping[str, Any],
        rows: int,
    ) -> None:  # fmt: skip
        longest = max((b - a for a, b in pairwise(ends)), default=0)
        told: dict[str, Any] = {
            key: tuple(map(int, row_of(arguments[key], np.int64))) for key in ARRAYS_OF_PACK if key in arguments
        }
        sizes: dict[str, Any] = {key: int(arguments[key]) for key in NUMBERS_OF_PACK[:2] if key in arguments}
        layout = PackLayout(
            name=name, version=step, cp_rank=0, cu_seqlens=tuple(real), cu_seqlens_padded=tuple(ends),
            max_seqlen=next(iter(sizes.values()), longest), lengths=tuple(lengths), filler=False,
        )  # fmt: skip
        self.emit(layout, np.arange(ends[-1] if ends else 0))
        if arguments:
            lacks = tuple(key for key in (*ARRAYS_OF_PACK, *NUMBERS_OF_PACK) if key not in arguments)
            given = GivenArguments(name=name, version=step, chunk=0, num_rows=rows, lacks=lacks, **told, **sizes)
            self.emit(given)

    def token_losses(
        self, step: int, logprobs: Any, losses: Any, *, ids: Sequence[Any], mask: Any = None, entropies: Any = None,
        old: Any = None, advantages: Any = None, reference: Any = None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Loss of each token of a micro-batch, as it enters the mean, before the backward pass.

        Gradients by these tensors are taken as the backward pass makes them; the tensors are not changed.

        Args:
            step: number of the step, after its `advantages`.
            logprobs: [B, T] the log-probability that each token's loss is computed from, nats.
            losses: [B, T] loss of each token, nats; the loss that is differentiated is a weighted sum of these. Or
                pairs of a factor and such a tensor, for terms that the loop averages apart: the policy's, KL, entropy.
                A factor may be a tensor, such as 1 over the weight of a mean that the loop multiplies into advantages.
            ids: of the rollout of each row. Tensors may be [N], a value for each token of these rollouts' responses.
            mask: [B, T] tokens in the loss, of each row those of its rollout in order; by default the row has a place
                for each token of the response, or of the rollout, or for all but the first, from the left.
            entropies: [B, T] entropy at each token, if it is in the loss, with a gradient.
            old: [B, T] log-probabilities that the ratio divides by, as the loss reads them.
            advantages: [B, T] or [B] or [B, 1], as the loss reads them, times importance weights.
            reference: [B, T] log-probabilities of the reference, as the loss reads them.
            scale: of the loss beyond its mean over the whole batch: a gradient scaler's.

        Raises:
            UsageError: an unknown rollout, shapes that do not fit, or a tensor without a gradient.
        """
        own = self.opened(step)
        terms = [(1.0, losses)] if hasattr(losses, "shape") else list(losses)
        factor, losses = terms[0]
        kinds = {str(item.dtype).removeprefix("torch.") for item in (logprobs, losses)}
        if narrow := kinds - {*WIDE}:
            for record in (LossRows, LossColumns, UpdateRatios):
                self.unbounded(record, f"the loss is computed in {min(narrow)}")
            return
        shapes = {item.shape for _, item in terms}
        if not (losses.requires_grad and logprobs.requires_grad) or shapes != {logprobs.shape}:
            raise UsageError("`token_losses` takes tensors of one shape that the loss is differentiated by")
        shape, names = tuple(losses.shape), [*map(str, ids)]
        rows = np.zeros(shape, bool) if mask is None else row_of(mask, np.int64).reshape(shape) != 0
        ends = np.cumsum([len(own.tokens.responses[own.number(name)]) for name in names])
        parts = np.split(rows, ends) if len(shape) == 1 else [*rows[: len(names)], rows[:0]]  # each is a view
        if len(parts) != len(names) + 1 or parts.pop().size or (len(shape) == 1 and ends[-1:].sum() != len(rows)):
            raise UsageError(f"`token_losses` has tensors {list(shape)} of {len(names)} rollouts of other lengths")
        sentinel = []
        for part, name in zip(parts, names, strict=True):
            in_loss = own.in_loss(name)
            if mask is None:
                at = own.positions(name, min(len(part), own.length(name)), "token_losses", shortest=True)
                part[: len(at)] = np.isin(at, in_loss)
            found = int(part.sum())
            places = np.concatenate([in_loss, np.zeros(max(found - len(in_loss), 0), np.int64)])[:found]
            sentinel.append((own.number(name) + 1 << POSITION_BITS) + places)
        columns = {}
        for key, given in (("divisor", old), ("advantage", advantages), ("reference", reference)):
            if given is not None:
                values = np.asarray(on_host(given).double(), np.float64)
                columns[key] = np.broadcast_to(values.reshape(shape[0], *[-1] * (len(shape) - 1)), shape)[rows]
        micro = _Micro(np.concatenate(sentinel or [np.zeros(0, np.int64)]), rows, columns, scale)
        columns["loss"] = sum(np.asarray(on_host(each * item).double(), np.float64)[rows] for each, item in terms)
        told = {"current": logprobs, "loss": losses, "entropy": entropies}
        for key, tensor in told.items():
            if tensor is None:
                continue
            micro.columns.setdefault(key, np.asarray(on_host(tensor).double(), np.float64)[rows])
            if tensor.requires_grad:
                times = factor if key == "loss" else 1.0
                tensor.register_hook(lambda found, key=key, times=times: _keep(micro.gradients, key, found / times))
        self._micros.setdefault(step, []).append(micro)

    def flush_passes(self, step: int, own: OpenStep) -> None:
        """Record the micro-batches of a step, and the rows of its loss."""
        if ledgers := self._ledgers.pop(step, []):
            keys = set.intersection(*(set(rows) for rows in ledgers))
            record = TokenLedger(name="rollouts", version=step, coordinate=str(self.rank))
            self.emit(record, {key: np.concatenate([rows[key] for rows in ledgers]) for key in sorted(keys)})
            self._record_batch(step, ledgers)
        if micros := [item for item in self._micros.pop(step, []) if "loss" in item.gradients]:
            self._record_rows(step, own, micros)

    def _record_batch(self, step: int, parts: list[dict[str, np.ndarray]]) -> None:
        """Digest all micro-batches of a rank, named by its place in the data."""
        from verifier.core.reader import digest_of
        from verifier.mesh import Mesh

        if self.mesh is None:
            return
        at = Mesh(**msgspec.structs.asdict(self.mesh)).coordinate(self.rank)
        whole = b"".join(rows[key].tobytes() for rows in parts for key in sorted(rows))
        record = PackedBatchDigest(
            name=f"rollouts dp={at.dp} cp={at.cp}", version=step, coordinate=str(at), digest=digest_of(whole),
            micro_batches=len(parts),
        )  # fmt: skip
        self.emit(record)

    def _record_rows(self, step: int, own: OpenStep, micros: list[_Micro]) -> None:
        name, tokens = f"update {self.update_of(step)}", own.tokens
        count = max(int(tokens.mask.sum()), 1)
        joined: dict[str, list[np.ndarray]] = {}
        for micro in micros:
            at = _places(own, micro.sentinel)
            given = {
                key: np.asarray(on_host(value).double(), np.float64)[micro.mask] / micro.scale
                for key, value in micro.gradients.items()
            }
            nothing = np.zeros(len(micro.sentinel))
            found = {
                "sentinel": micro.sentinel,
                "mask": np.ones(len(micro.sentinel), bool),
                "current": micro.columns["current"],
                "loss": micro.columns["loss"],
                "entropy": micro.columns.get("entropy", np.full(len(nothing), np.nan)),
                "weight": given["loss"] * count,
                "gradient": given.get("current", nothing) * count,
                "entropy_gradient": given.get("entropy", nothing) * count,
            }
            read = {"divisor": own.divisor(), "advantage": own.weighted(), "reference": own.reference}
            for key, column in read.items():
                if column is not None:
                    found[key] = micro.columns.get(key, column[at])
            for key, values in found.items():
                joined.setdefault(key, []).append(values)
        kinds = {"sentinel": np.int64, "mask": bool}
        rows = {key: np.concatenate(parts).astype(kinds.get(key, np.float32)) for key, parts in joined.items()}
        self.emit(LossRows(name=name, version=step, coordinate=str(self.rank)), rows)
        weight = np.where(tokens.mask, np.nan, 0.0)  # NaN: the token came to no loss
        at = _places(own, rows["sentinel"])
        weight[at] = rows["weight"].astype(np.float64) / count
        if (terms := own.terms) is not None:
            record = LossColumns(
                name=name, version=step, aggregation=terms.name, divisor=terms.divisor, dtype="float32", ids=tokens.ids,
                groups=terms.parts or tokens.groups, lengths=tokens.lengths, gradient_divisor=self.gradient_divisor,
            )  # fmt: skip
            self.emit(record, {"weight": weight, "mask": tokens.mask})
        if (divisor := own.divisor()) is not None and len(rows["sentinel"]):
            gaps = np.abs(np.expm1(rows["current"].astype(np.float64) - divisor[at]))
            ratios = UpdateRatios(
                name=name, version=step, update=self.update_of(step), first=own.is_first, ratio_over="old",
                at_reference=False, ratio_gap=real(float(gaps.max())), kl_gap=0.0, clipped=0, clamped=0,
            )  # fmt: skip
            if own.policy.get("ratio_over", "old") == "old":
                self.emit(ratios)


def _places(own: OpenStep, sentinel: np.ndarray) -> np.ndarray:
    """Places of tokens among all of the step, by their sentinels."""
    found: np.ndarray = own.starts[(sentinel >> POSITION_BITS) - 1] + (sentinel & ((1 << POSITION_BITS) - 1))
    return found


def _keep(gradients: dict[str, Any], key: str, found: Any) -> None:
    gradients[key] = found.detach() if key not in gradients else gradients[key] + found.detach()
