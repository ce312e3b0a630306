"""Probe of an export on one rank: what the rank's own shards are by the exported tensors, cut by the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from verifier.core.record import Probe
from verifier.export.live_weights import LiveWeights
from verifier.plan.digest import described
from verifier.stages.export.records import ExportedShard

if TYPE_CHECKING:
    from verifier.export.sharding import ParamPlacement


def cut(
    probe: Probe, live: LiveWeights, stream: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The export stream, of which each live shard is cut as soon as the last of its sources has passed.

    Sources are copied to the host until then, so that the stream may write over them. A shard of which one never comes,
    or comes in another shape, is not cut: names and shapes of the stream are compared elsewhere.

    Args:
        probe: this rank's recorder.
        live: weights of this rank, of a model with a layout; no adapters.
        stream: (checkpoint name, tensor).
        version: of the weights.
    """
    waiting: dict[str, list[ParamPlacement]] = defaultdict(list)
    for place in live.places.values():
        for name in place.sources:
            waiting[name].append(place)
    uses = {name: len(places) for name, places in waiting.items()}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        yield name, tensor
        if name in waiting:
            held[name] = tensor.detach().to("cpu", copy=True)
        for place in waiting.pop(name, ()):
            if all(source in held for source in place.sources):
                _record(probe, live, place, held, version)
                for source in place.sources:
                    uses[source] -= 1
                    if not uses[source]:
                        del held[source]


def _record(
    probe: Probe, live: LiveWeights, place: ParamPlacement, held: dict[str, torch.Tensor], version: int
) -> None:
    if any(tuple(held[name].shape) != tuple(place.source_shapes[name]) for name in place.sources):
        return
    facts = described(place.shard(held.__getitem__))
    probe.emit(ExportedShard(name=place.global_name, version=version, coordinate=live.coordinate, **facts))
