"""Order in which a rank's export yields the tensors of a checkpoint, and the chunk plan that the rank makes of it.

A rank sees the parameters of its own pipeline: those of the ranks that differ from it in pp alone. It yields them by
layer, then by expert, then by name, whole. Of a routed expert it yields the tensor of each rank of its expert group, in
the order of ep. So ranks of unequal ep see unequal parameters, and their plans agree only if the layout is regular.

Source:
    megatron-bridge 0.6.2, models/conversion/model_bridge.py (`_megatron_global_param_names_all_pp_ranks`: a set, sorted
    by `extract_sort_key`; without the output layer where it is tied), models/conversion/param_mapping.py
    (`gather_from_ep_ranks`; `GatedMLPMapping.megatron_to_hf`: all gates, then all ups).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from verifier.errors import ContractError
from verifier.export.sharding import ParamPlacement
from verifier.mesh import Mesh
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan
from verifier.plan.held_shards import Holding, is_expert

_LAYER = re.compile(r"layers\.(\d+)")
_EXPERT = re.compile(r"(?:bias|weight)(\d+)")
_OUTPUT = "output_layer"

Named = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor of the checkpoint."""


def sort_key(global_name: str) -> tuple[list[int], str]:
    """Return what an export sorts parameters by, from a name with the checkpoint's layer and expert numbers."""
    found = [int(match[1]) for pattern in (_LAYER, _EXPERT) if (match := pattern.search(global_name))]
    return [*found, -1, -1][:2], global_name


class Streams:
    """Export streams of the ranks of a mesh; a tied output layer is not exported."""

    def __init__(self, mesh: Mesh, holdings: Sequence[Holding], tied: bool) -> None:
        self._mesh, self._tied = mesh, tied
        self._of_rank = {rank: holding for holding in holdings for rank in holding.ranks}
        self._local = {
            id(holding): {(chunk, place.param_name): place for chunk, own in enumerate(holding.chunks) for place in own}
            for holding in holdings
        }

    def pipelines(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (ranks, one of the first stage) of each set of ranks that see the same parameters.

        Ranks are of one set if their places within a stage have the same coordinates on tp, ep and etp.
        """
        mesh, alike = self._mesh, defaultdict[tuple[int, ...], list[int]](list)
        for within in range(mesh.dense_size):
            at = mesh.coordinate(within)
            alike[at.tp, at.ep, at.etp].append(within)
        for places in alike.values():
            ranks = (stage * mesh.dense_size + within for stage in range(mesh.pp) for within in places)
            yield tuple(sorted(ranks)), places[0]

    def of(self, within: int) -> list[Named]:
        """Return the stream of the ranks of one pipeline; `within` is the one of the first stage."""
        own: dict[str, tuple[int, int, ParamPlacement]] = {}
        for stage in range(self._mesh.pp):
            for chunk, places in enumerate(self._of_rank[stage * self._mesh.dense_size + within].chunks):
                for place in places:
                    if not (self._tied and _OUTPUT in place.global_name):
                        own[place.global_name] = (stage, chunk, place)
        found, stacks = list[Named](), set[Named]()
        for name in sorted(own, key=sort_key):
            stage, chunk, place = own[name]
            peers = [place] if not is_expert(place) else self._peers(stage, within, chunk, place.param_name)
            # A rank's own boxes may lack a source: more ranks than key-value heads share the rows of one.
            for sources in zip(*(peer.source_shapes.items() for peer in peers), strict=True):
                if place.boxes[0].index is None:
                    found += sources
                elif sources[0] not in stacks:  # a stack of experts, which all of them have as their source
                    found.append(sources[0])
                    stacks.add(sources[0])
        return found

    def _peers(self, stage: int, within: int, chunk: int, param_name: str) -> list[ParamPlacement]:
        """Return the parameter of this local name on each rank of the expert group, those that have it."""
        mesh = self._mesh
        at = mesh.coordinate(within)
        first = stage * mesh.dense_size + at.etp + mesh.expert_size * at.edp
        ranks = (self._of_rank[first + mesh.etp * ep] for ep in range(mesh.ep))
        found = (self._local[id(holding)].get((chunk, param_name)) for holding in ranks)
        return [place for place in found if place is not None]


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """A chunk plan and the ranks that make it."""

    ranks: tuple[int, ...]
    plan: ChunkPlan | None
    refused: str = ""
    """Why no plan can be made of what they export."""

    @property
    def digest(self) -> str:
        """Digest of the plan; empty where there is none."""
        return "" if self.plan is None else self.plan.digest


def plans_of(streams: Streams, dtype_of: Callable[[str], str], chunk_bytes: int) -> list[RanksPlan]:
    """Return the plans of all ranks, most ranks first; equal plans once."""
    distinct: list[tuple[list[Named], list[int]]] = []
    for ranks, within in streams.pipelines():
        stream = streams.of(within)
        known = next((found for seen, found in distinct if seen == stream), None)
        if known is None:
            distinct.append((stream, list(ranks)))
        else:
            known += ranks
    found = []
    for stream, of in distinct:
        plan, refused = None, ""
        try:
            metas = (TensorMeta(name=name, dtype=dtype_of(name), shape=shape) for name, shape in stream)
            plan = build_plan(metas, chunk_bytes=chunk_bytes)
        except ContractError as problem:
            refused = str(problem)
        found.append(RanksPlan(ranks=tuple(sorted(of)), plan=plan, refused=refused))
    return sorted(found, key=lambda item: (-len(item.ranks), item.ranks))
