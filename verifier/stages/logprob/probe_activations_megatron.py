"""Probe of the values and gradients at `verifier.model.module_points` on one rank, by hooks on Megatron's modules."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verifier.core.record import Probe
from verifier.errors import ContractError
from verifier.export.live_weights import unwrapped
from verifier.megatron.pack import PackedBatch
from verifier.megatron.step_megatron import TokenLoss
from verifier.mesh import Mesh
from verifier.model.module_points import EMBEDDING, LAST_POINTS, LAYER_POINTS, OF_THE_LOSS, ModulePoint, order_of
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.logprob.records import Activation, PointsLeftOut
from verifier.stages.loss.records import ActivationGradient

_Found = dict[int, torch.Tensor]
"""Micro-batch -> values [rows, columns], on the host."""


class ActivationProbe:
    """Records one pass; as an `OnShards` it is shown the rank's micro-batches.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        mesh: parallel sizes.
        rank: this rank.
        sequences: id of each rollout of the pass -> its index.
        step: pass, as `ActivationRecord.step` names it.
    """

    def __init__(
        self, probe: Probe, trainer: TrainerModel, mesh: Mesh, rank: int, sequences: Mapping[str, int], step: str
    ) -> None:
        self._probe, self._trainer, self._mesh, self._at = probe, trainer, mesh, mesh.coordinate(rank)
        self._rank, self._sequences, self._step = rank, sequences, step
        self._shards: Sequence[PackedBatch] = ()
        self._values: dict[str, _Found] = defaultdict(dict)
        self._gradients: dict[str, _Found] = defaultdict(dict)
        self._columns: dict[str, np.ndarray] = {}
        self._left_out: list[str] = []
        self._micro_batch: dict[int, int] = {}
        self._of_loss = 0

    def __call__(self, shards: Sequence[PackedBatch]) -> None:
        """Keep the micro-batches, which say what token each row is."""
        self._shards = shards

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on all points of this rank's chunks within; what they saw is recorded at the end."""
        with contextlib.ExitStack() as hooks:
            for number, chunk in enumerate(self._trainer.chunks):
                self._micro_batch[number] = -1
                hooks.callback(chunk.register_forward_pre_hook(self._counter(number)).remove)
                for name, module, point in points_of(unwrapped(chunk)):
                    hooks.callback(self._hook(number, name, module, point))
            yield
        self._emit()

    def loss(self, loss: TokenLoss) -> TokenLoss:
        """The same loss, which also records what it is given."""

        def watched(logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
            for name, values in zip(OF_THE_LOSS, (logprob_T, entropy_T), strict=True):
                self._columns[name] = np.zeros(1, np.int32)
                self._keep(name, self._of_loss, values[:, None], values)
            self._of_loss += 1
            return loss(logprob_T, entropy_T, shard)

        return watched

    def scored(self, found: Sequence[torch.Tensor]) -> None:
        """Record the log-probabilities that a pass returned, on rank 0."""
        if self._rank:
            return
        lengths = [len(row) for row in found]
        arrays = {
            "values": torch.cat(list(found))[:, None].numpy(), "columns": np.zeros(1, np.int32),
            "sequence": np.repeat(np.arange(len(found), dtype=np.int32), lengths),
            "position": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        }  # fmt: skip
        self._probe.emit(self._record(Activation, OF_THE_LOSS[0]), arrays)

    def _record(self, kind: type[Activation] | type[ActivationGradient], name: str) -> Any:
        order = order_of(name, int(self._trainer.provider.num_layers))
        return kind(name=name, version=1, step=self._step, order=order, coordinate=str(self._at))

    def _counter(self, number: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self._micro_batch[number] += 1

        return count

    def _hook(self, number: int, name: str, module: torch.nn.Module, point: ModulePoint) -> Callable[[], None]:
        """Hook one module; returns what removes the hook."""

        def keep(tensor: Any, bias: Any = None) -> None:
            if isinstance(tensor, torch.Tensor):
                value = tensor.detach() if bias is None else tensor.detach() + bias.detach()
                rows = value.reshape(value.shape[0], -1)
                if name not in self._columns:
                    columns = self._columns_of(point, module, rows.shape[1])
                    if columns is None:
                        self._left_out.append(name)
                        return
                    self._columns[name] = columns
                # Ranks that share a key-value head have a part of its gradient each.
                self._keep(name, self._micro_batch[number], rows, None if self._is_shared(point) else tensor)

        def given(_: Any, arguments: Any, named: Any) -> None:
            values = [*arguments, *named.values()]
            keep(values[point.argument])

        def put_out(_: Any, __: Any, output: Any) -> None:
            if isinstance(output, tuple):
                is_bias = len(output) == 2 and isinstance(output[1], torch.Tensor) and output[1].ndim == 1
                keep(output[0], output[1] if is_bias else None)
            else:
                keep(output)

        if point.side == "input":
            return module.register_forward_pre_hook(given, with_kwargs=True).remove
        return module.register_forward_hook(put_out).remove

    @property
    def _num_groups(self) -> int:
        config = self._trainer.provider
        return int(config.num_query_groups or config.num_attention_heads)

    def _is_shared(self, point: ModulePoint) -> bool:
        """True if several tensor-parallel ranks have the same columns of a point."""
        return point.columns == "keys" and self._num_groups < self._mesh.tp

    def _keep(self, name: str, micro_batch: int, rows: torch.Tensor, tensor: torch.Tensor | None) -> None:
        """Copy rows, and the gradient with respect to the tensor that they are of, if any, once it is known."""
        self._values[name][micro_batch] = rows.detach().float().cpu().clone()
        if tensor is not None and torch.is_grad_enabled() and tensor.requires_grad:

            def keep(gradient: torch.Tensor) -> None:
                flat = gradient.detach().float().cpu().reshape(gradient.shape[0], -1)
                self._gradients[name][micro_batch] = flat.clone()

            tensor.register_hook(keep)

    def _columns_of(self, point: ModulePoint, module: torch.nn.Module, width: int) -> np.ndarray | None:
        """Places of a rank's columns in the whole vector as transformers has it; None for a merge of another kind."""
        tp, rank = self._mesh.tp, self._at.tp
        if point.columns == "whole":
            return np.arange(width, dtype=np.int32)
        config, groups = self._trainer.provider, self._num_groups
        if point.columns in ("split", "keys"):
            at = rank // (tp // groups) if self._is_shared(point) else rank
            return np.arange(at * width, (at + 1) * width, dtype=np.int32)
        if point.columns == "gated":
            return _parts([width // 2] * 2, tp, rank) if width % 2 == 0 else None
        if point.columns == "mixer":
            return self._mixer_columns(width)
        each, size = int(config.num_attention_heads) // groups, int(config.kv_channels)
        if width * tp != groups * (each + 2) * size:
            return None
        of_group = np.arange(groups)[:, None]
        query = of_group * each * size + np.arange(each * size)
        key = groups * each * size + of_group * size + np.arange(size)
        merged = np.concatenate([query, key, key + groups * size], axis=1).ravel()
        return merged[rank * width : (rank + 1) * width].astype(np.int32)

    def _mixer_columns(self, width: int) -> np.ndarray | None:
        config, tp = self._trainer.provider, self._mesh.tp
        if heads := getattr(config, "linear_num_value_heads", None):  # of gated delta nets
            keys, values = (
                config.linear_num_key_heads * config.linear_key_head_dim,
                heads * config.linear_value_head_dim,
            )
            sizes = [size // tp for size in (keys, keys, values, values, heads, heads)]
        else:
            inner = int(config.mamba_num_heads) * int(config.mamba_head_dim) // tp
            state = int(config.mamba_num_groups) * int(config.mamba_state_dim) // tp
            sizes = [inner, inner, state, state, int(config.mamba_num_heads) // tp]
        return _parts(sizes, tp, self._at.tp) if sum(sizes) == width else None

    def _emit(self) -> None:
        for kind, found in ((Activation, self._values), (ActivationGradient, self._gradients)):
            for name, parts in found.items():
                rows = [self._rows(name, at, values) for at, values in sorted(parts.items())]
                values, sequence, position = (np.concatenate(column) for column in zip(*rows, strict=True))
                arrays = {"values": values, "sequence": sequence, "position": position, "columns": self._columns[name]}
                self._probe.emit(self._record(kind, name), arrays)
        if self._left_out:
            self._probe.emit(PointsLeftOut(name="trainer", version=1, points=tuple(sorted(set(self._left_out)))))

    def _rows(self, name: str, micro_batch: int, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of real tokens of a micro-batch, and the sequence and position of each."""
        shard = self._shards[micro_batch]
        rows = np.arange(shard.num_rows)
        if len(values) != len(rows):
            if len(values) * self._mesh.tp != len(rows):
                raise ContractError(
                    f"`{name}` has {len(values)} rows of a micro-batch of {len(rows)}, which is no slice of it"
                )
            rows = rows[self._at.tp * len(values) : (self._at.tp + 1) * len(values)]
        segment = shard.segments_T.numpy()[rows]
        real = segment >= 0
        if name in OF_THE_LOSS:
            real &= shard.labels_T.numpy()[rows] >= 0
        numbers = np.array([self._sequences.get(one, -1) for one in shard.ids], np.int32)
        sequence = numbers[segment[real]] if real.any() else np.zeros(0, np.int32)
        return values.numpy()[real], sequence, shard.positions_T.numpy()[rows][real].astype(np.int32)


def points_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, ModulePoint]]:
    """Points of a model chunk: whole name, module that has it, row of the table."""
    gated = bool(getattr(getattr(model, "config", None), "gated_linear_unit", False))
    for point in (EMBEDDING, *LAST_POINTS):
        module = _at(model, point)
        if module is not None:
            yield point.name, module, point
    for layer in getattr(getattr(model, "decoder", None), "layers", ()):
        for point in LAYER_POINTS:
            module = _at(layer, point)
            if module is None or (point.name == "mlp.linear_fc1" and (point.columns == "gated") is not gated):
                continue
            if point.name == "self_attn_bda" and type(layer.self_attention).__name__ == "IdentityOp":
                continue
            yield f"layers.{layer.layer_number - 1}.{point.name}", module, point


def _at(root: torch.nn.Module, point: ModulePoint) -> torch.nn.Module | None:
    found: Any = root
    for part in point.module.split(".") if point.module else ():
        found = getattr(found, part, None)
    return found if isinstance(found, torch.nn.Module) and type(found).__name__.endswith(point.needs) else None


def _parts(sizes: Sequence[int], tp: int, rank: int) -> np.ndarray:
    """Places of a rank's slices of parts that lie one after another, of which it has so many columns each."""
    starts = np.cumsum([0, *sizes[:-1]]) * tp
    pieces = [np.arange(size) + start + rank * size for size, start in zip(sizes, starts, strict=True)]
    return np.concatenate(pieces).astype(np.int32)
