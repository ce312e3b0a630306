"""What loops on Megatron hand to `verifier.probe`: whole tensors of all ranks' parts, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verifier.export.live_weights import LiveWeights
from verifier.export.names import layout_of
from verifier.export.sharding import unshard
from verifier.megatron.optimizer_megatron import named_gradients, owned_masters, torch_adams
from verifier.mesh import Mesh
from verifier.model.checkpoint import read_config
from verifier.model.provider_megatron import DataParallel, TrainerModel


class Follower:
    """Recorder of a rank whose data another rank of its model records: its copy of the weights alone."""

    def __init__(self, record: Any) -> None:
        self.weights_held = record.weights_held

    def sending(self, named: Iterable[tuple[str, Any]], *_: Any, **__: Any) -> Iterable[tuple[str, Any]]:
        """Tensors as they come."""
        return named

    def weights_exported(self, named: Iterable[tuple[str, Any]], *_: Any, **__: Any) -> None:
        """All ranks of a model export together."""
        list(named)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Parts:
    """A rank's parts of a model on Megatron, joined with all other ranks' apart from what the trainer exports by."""

    def __init__(self, checkpoint: Path, mesh: Mesh, *, distributed_optimizer: bool = True) -> None:
        self.mesh, self.layout = mesh, layout_of(read_config(checkpoint))
        self.options = DataParallel(distributed_optimizer=distributed_optimizer)
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def held(self, chunks: Sequence[Any]) -> list[tuple[str, Any]]:
        """Weights of a model."""
        return self.joined(LiveWeights([*chunks], None, self.mesh, self.rank).tensors())

    def gradients(self, chunks: Sequence[Any]) -> list[tuple[str, Any]]:
        """Gradients of a model as its optimizer gets them."""
        return self.joined(named_gradients(self._trainer(chunks)), gradients=True)

    def adam(self, chunks: Sequence[Any], optimizer: Any) -> tuple[Any, list[tuple[str, Any]]] | None:
        """Megatron's optimizer of torch and its parameters; None where others have some of this rank's."""
        if self.mesh.tp * self.mesh.pp * self.mesh.cp > 1:
            return None
        [adam] = torch_adams(optimizer)
        return adam, [(item.name, item.held) for item in owned_masters(self._trainer(chunks), optimizer)]

    def joined(self, tensors: Iterable[tuple[int, str, Any]], *, gradients: bool = False) -> list[tuple[str, Any]]:
        """Whole tensors of each rank's; of what several ranks have, this one's own."""
        every: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(every, [(*at, item.clone()) for *at, item in tensors])
        found: dict[str, Any] = {}
        for rank in sorted(range(self.world), key=lambda rank: rank != self.rank):
            for chunk, name, item in every[rank]:
                places = {place.param_name: place for place in self.layout.placements(self.mesh, rank, chunk)}
                place = places[name]
                found.setdefault(place.group, (place, item[: place.shape[0]]))  # without a vocabulary's padding
        return list(unshard(found.values(), gradients=gradients))

    def _trainer(self, chunks: Sequence[Any]) -> TrainerModel:
        """The model as functions of `verifier.megatron` take one."""
        return TrainerModel(
            chunks=[*chunks], bridge=None, provider=None, mesh=self.mesh, tier="cpu", data_parallel=self.options,
            fixes=frozenset(),
        )  # fmt: skip
