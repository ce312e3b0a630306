"""Shards that the ranks of a mesh hold by a layout: equal ranks once, owner, copies and bytes, and what is amiss.

Bytes of a rank are weights, gradients, optimizer, buffers of a transfer, and an estimate of its activations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verifier.config import PlanConfig
from verifier.export.names import PARAMS, Cut, ModelLayout
from verifier.export.sharding import ParamPlacement, tiling_errors
from verifier.mesh import Coordinate, Mesh
from verifier.model.families import Scope
from verifier.plan.chunk_plan import DTYPE_BYTES
from verifier.plan.named_layout import NamedLayout

_NAMED = 3
"""Names that a sentence gives of many."""
_FP32 = 4
_MOMENTS = 8
"""Bytes of Adam's two moments of a parameter, fp32 each."""
BUFFERS = {"nccl": 4, "ipc": 5}
"""Chunks that the sender's GPU holds at a time: three ahead and one being packed; by IPC also one being read."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Shards of all ranks with the same coordinates on tp, pp, ep and etp."""

    ranks: tuple[int, ...]
    at: Coordinate
    """Coordinates of the first of the ranks."""
    chunks: tuple[tuple[ParamPlacement, ...], ...]
    """[virtual stage] placements."""

    @cached_property
    def places(self) -> tuple[ParamPlacement, ...]:
        """Placements of all virtual stages."""
        return tuple(place for chunk in self.chunks for place in chunk)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each of the placements."""
        return tuple(math.prod(place.shape) for place in self.places)

    def count(self, *, expert: bool) -> int:
        """Elements of the parameters of routed experts, or of all other parameters; buffers are none."""
        return sum(
            size for place, size in zip(self.places, self.elements, strict=True)
            if not place.is_buffer and is_expert(place) == expert
        )  # fmt: skip


def is_expert(place: ParamPlacement) -> bool:
    """True for a tensor of a routed expert."""
    return "edp" in place.replicated_over


def holdings_of(layout: ModelLayout | NamedLayout, mesh: Mesh, every: int = 1) -> tuple[Holding, ...]:
    """Return what the ranks hold, or every so many of them, in the order of the first rank of each holding.

    Places are a function of a rank's coordinates tp, pp, ep and etp alone.

    Raises:
        UsageError: the mesh does not divide the layers, the experts or a tensor.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(0, mesh.world_size, every):
        at = mesh.coordinate(rank)
        alike[at.pp, at.tp, at.ep, at.etp].append(rank)
    return tuple(
        Holding(
            ranks=tuple(ranks), at=mesh.coordinate(ranks[0]),
            chunks=tuple(tuple(layout.placements(mesh, ranks[0], chunk)) for chunk in range(mesh.vpp)),
        )
        for ranks in alike.values()
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """All copies of one shard."""

    place: ParamPlacement
    """Placement on the owner."""
    owner: int
    """Lowest rank that holds it."""
    copies: int
    """Ranks that hold it; a tied output layer is a further copy of the embedding."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Owner and number of copies of every shard, by the label of its copies."""

    replicas: Mapping[str, Replicas]
    differing: tuple[str, ...]
    """A sentence on each label whose copies are not the same part of the checkpoint."""

    def errors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yield a sentence on each way in which the owners do not hold every tensor exactly once."""
        yield from self.differing
        held: dict[str, tuple[int, ...]] = {}
        for item in self.replicas.values():
            held |= item.place.source_shapes
        if absent := [name for name in shapes if name not in held]:
            yield f"no rank owns {listed(absent)}"
        if surplus := [name for name in held if name not in shapes]:
            yield f"ranks hold {listed(surplus)}, which the checkpoint does not have"
        for name, shape in held.items():
            if name in shapes and shapes[name] != shape:
                yield f"`{name}` has shape {list(shapes[name])}, and ranks hold parts of {list(shape)}"
        yield from tiling_errors(item.place for item in self.replicas.values()).values()


def ownership_of(holdings: Sequence[Holding]) -> Ownership:
    """Return owner and copies of each shard."""
    found: dict[str, Replicas] = {}
    differing: list[str] = []
    for holding in holdings:
        lowest, copies = min(holding.ranks), len(holding.ranks)
        for place in holding.places:
            known = found.get(place.group)
            if known is None:
                found[place.group] = Replicas(place=place, owner=lowest, copies=copies)
                continue
            if known.place.boxes != place.boxes:
                differing.append(f"copies of {place.group} are other parts on rank {known.owner} and rank {lowest}")
            owner, first = (known.owner, known.place) if known.owner < lowest else (lowest, place)
            found[place.group] = Replicas(place=first, owner=owner, copies=known.copies + copies)
    return Ownership(replicas=found, differing=tuple(differing))


def listed(names: Sequence[str]) -> str:
    """Return the first names of many, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank."""

    weights: int
    """Parameters, and buffers that checkpoints hold."""
    gradients: int
    optimizer: int
    """Masters and Adam's moments, without the padding of Megatron's buckets, but for those on the host."""
    transfer: int
    """Parts and whole of the largest parameter that an export joins; on rank 0 also the chunks that it sends."""
    activations: int
    """An estimate; see `activation_bytes`."""
    host: int
    """Masters, Adam's moments and the gradients that they are stepped with, in memory of the host."""

    @property
    def certain(self) -> int:
        """All but the estimate."""
        return self.weights + self.gradients + self.optimizer + self.transfer

    @property
    def total(self) -> int:
        """All of it."""
        return self.certain + self.activations


def rank_bytes(
    holding: Holding, config: PlanConfig, dtype_of: Callable[[str], str], *, transfer: int, activations: int
) -> RankBytes:
    """Return the bytes of each rank of a holding.

    Source:
        megatron-core 0.19.2: distributed/param_and_grad_buffer.py (gradients in fp32 or the parameters' dtype, of all
        of a rank's parameters), optimizer/distrib_optimizer.py (a data-parallel rank holds masters and moments of its
        part; experts are divided over their own copies), optimizer/optimizer.py (parameters in fp32 have no master),
        optimizer/cpu_offloading/hybrid_optimizer.py (parameter, gradient and moments of what is on the host).
    """
    weights = sum(
        size * DTYPE_BYTES[dtype_of(place.sources[0])]
        for place, size in zip(holding.places, holding.elements, strict=True)
    )
    dense, expert = holding.count(expert=False), holding.count(expert=True)
    wide = config.dtype == "float32"
    gradient = _FP32 if wide or config.grad_reduce_in_fp32 else DTYPE_BYTES[config.dtype]
    state = _MOMENTS + (0 if wide else _FP32)
    mesh = config.mesh
    parts, expert_parts = (mesh.dp * mesh.cp, mesh.expert_dp) if config.distributed_optimizer else (1, 1)
    own = math.ceil(dense / parts) + math.ceil(expert / expert_parts)
    away = math.ceil(own * config.optimizer_offload)
    return RankBytes(
        weights=weights, gradients=gradient * (dense + expert), optimizer=state * (own - away),
        transfer=transfer, activations=activations, host=away * (_MOMENTS + 2 * _FP32),
    )  # fmt: skip


def join_bytes(holdings: tuple[Holding, ...], mesh: Mesh, itemsize: int) -> int:
    """Bytes of parts and whole of the largest parameter that an export joins: an expert's with those of its group."""
    largest = 0
    for holding in holdings:
        for place in holding.places:
            whole = sum(math.prod(shape) for shape in place.source_shapes.values())
            alone = is_expert(place) and place.boxes[0].index is None
            largest = max(largest, whole * (mesh.ep if alone else 1))
    return 2 * largest * itemsize


def activation_bytes(layout: ModelLayout | NamedLayout, config: PlanConfig, stage: int, top_k: int) -> int:
    """Estimate the activations of a rank of a pipeline stage at its peak, in bytes.

    Every linear layer, norm and activation function keeps its input, attention its query, key, value and output; of
    scores flash attention keeps none. All of it is divided over tp, by sequence parallelism too, and over cp. The
    busiest rank's experts get `busiest` times an even share of the tokens. The stages run one forward, one backward, so
    stage s of pp keeps pp - s micro-batches; with full recomputation the input of each layer. Beside what is kept, the
    peak is in the backward pass of a layer, which has a gradient of each value, with full recomputation the values
    too, and above tp 1 its input and the gradient of that, joined over the sequence; or on the last stage in that of
    the loss: logits and their gradient in the weights' type, and the final norm's input, output and gradient.

    Source:
        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.1: 34 s b h
        bytes of a layer without its scores, of which 2 are masks of dropout that these models do not have.
        docs/scaling-out.md has measured peaks beside it.
    """
    mesh, itemsize, full = config.mesh, DTYPE_BYTES[config.dtype], config.recompute == "full"
    hidden, kept, most = layout.sizes["hidden"], 0.0, 0.0
    for chunk in range(mesh.vpp):
        for layer in mesh.layers_of(stage, chunk, layout.sizes["layers"]):
            elements, passing = layer_elements(layout, layer, top_k * config.busiest)
            most = max(most, elements * (1 + full) + passing + (2 * mesh.tp * hidden if mesh.tp > 1 else 0))
            kept += hidden if full else elements
    if mesh.vpp > 1:  # chunks of a micro-batch that have begun before the first backward pass
        in_flight = min(2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp + 1, 2 * mesh.pp * mesh.vpp) / mesh.vpp
    else:
        in_flight = float(mesh.pp - stage)
    if stage == mesh.pp - 1:
        most = max(most, 2 * layout.sizes["vocab"] + 3 * hidden)
    return math.ceil(config.tokens / (mesh.tp * mesh.cp) * itemsize * (kept * in_flight + most))


def layer_elements(layout: ModelLayout | NamedLayout, layer: int, top_k: float) -> tuple[float, float]:
    """Elements that one layer keeps of each token, and those that its backward pass makes beside their gradients.

    The latter are chunks' states of a state-space layer and their gradients, in fp32, and values of an expert's
    activation that no kernel joins with the weight of its router: the product, its two gradients and a copy.
    """
    if isinstance(layout, NamedLayout):
        return layout.elements(layer, top_k)
    sizes, scopes = layout.sizes, layout.layers[layer]
    rows = PARAMS[layout.family.name]
    gated = 2 if any(row.cut is Cut.GATED for row in rows) else 1
    hidden, found, passing = sizes["hidden"], 0.0, 0.0
    if Scope.ATTENTION in scopes or not any(row.scope is Scope.MAMBA for row in rows):
        normed = any("q_layernorm" in row.pattern for row in rows) and "kv_lora" not in sizes
        found += 2 * hidden + _attention(sizes) + (sizes["q"] + sizes["kv"] if normed else 0)
    if Scope.MAMBA in scopes:
        found += 2 * hidden + sizes["mamba_in"] + sizes["mamba_conv"] + 2 * sizes["mamba_inner"]
        passing = 4.0 * sizes["mamba_inner"]
    if Scope.DENSE in scopes:
        found += 2 * hidden + (gated + 1) * sizes["ffn"]
    if Scope.EXPERT in scopes:
        found += 2 * hidden + (gated + 1) * sizes["shared_ffn"] + top_k * (hidden + 3 * sizes["moe_ffn"])
        passing = top_k * (2 * hidden + (0 if gated == 2 else 4 * sizes["moe_ffn"]))
    return found, passing


def _attention(sizes: Mapping[str, int]) -> int:
    """Elements of queries, keys, values and output; of latent attention also what they are made of."""
    if "kv_lora" not in sizes:
        return 2 * sizes["q"] + 2 * sizes["kv"]
    compressed = 2 * sizes["q_lora"] + sizes["mla_kv_down"] + sizes["kv_lora"]
    return compressed + 2 * sizes["mla_q"] + sizes["mla_kv_up"] + sizes["mla_out"]
