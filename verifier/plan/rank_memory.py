"""Bytes of a rank: weights, gradients, optimizer, buffers of a transfer; and an estimate of its activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verifier.config import PlanConfig
from verifier.export.names import PARAMS, Cut, ModelLayout
from verifier.mesh import Mesh
from verifier.model.families import Scope
from verifier.plan.chunk_plan import DTYPE_BYTES
from verifier.plan.held_shards import Holding, is_expert

_FP32 = 4
_MOMENTS = 8
"""Bytes of Adam's two moments of a parameter, fp32 each."""
BUFFERS = {"nccl": 4, "ipc": 5}
"""Chunks that the sender's GPU holds at a time: three ahead and one being packed; by IPC also one being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank."""

    weights: int
    """Parameters, and buffers that checkpoints hold."""
    gradients: int
    optimizer: int
    """Masters and Adam's moments, without the padding of Megatron's buckets."""
    transfer: int
    """Parts and whole of the largest parameter that an export joins; on rank 0 also the chunks that it sends."""
    activations: int
    """An estimate; see `activation_bytes`."""

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
        part; experts are divided over their own copies), optimizer/optimizer.py (parameters in fp32 have no master).
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
    return RankBytes(
        weights=weights, gradients=gradient * (dense + expert),
        optimizer=state * (math.ceil(dense / parts) + math.ceil(expert / expert_parts)),
        transfer=transfer, activations=activations,
    )  # fmt: skip


def join_bytes(holdings: tuple[Holding, ...], mesh: Mesh, itemsize: int) -> int:
    """Bytes of parts and whole of the largest parameter that an export joins: an expert's with those of its group."""
    largest = 0
    for holding in holdings:
        for place in holding.places:
            whole = sum(math.prod(shape) for shape in place.source_shapes.values())
            largest = max(largest, whole * (mesh.ep if is_expert(place) else 1))
    return 2 * largest * itemsize


def activation_bytes(layout: ModelLayout, config: PlanConfig, stage: int, top_k: int) -> int:
    """Estimate the activations that a rank of a pipeline stage keeps at its peak, in bytes.

    Every linear layer, norm and activation function keeps its input, attention its query, key, value and output; of
    scores flash attention keeps none. All of it is divided over tp, by sequence parallelism too, and over cp. Experts
    get equal shares of the tokens. The stages run one forward, one backward, so stage s of pp keeps pp - s
    micro-batches. With full recomputation each layer's input is kept, and one layer whole. The last stage adds logits
    of one micro-batch in the weights' type and in fp32.

    Source:
        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.1: 34 s b h
        bytes of a layer without its scores, of which 2 are masks of dropout that these models do not have.
    """
    mesh, itemsize = config.mesh, DTYPE_BYTES[config.dtype]
    tokens = config.tokens / (mesh.tp * mesh.cp)
    hidden, wide = layout.sizes["hidden"], 0
    kept = 0.0
    for chunk in range(mesh.vpp):
        for layer in mesh.layers_of(stage, chunk, layout.sizes["layers"]):
            elements = layer_elements(layout, layer, top_k)
            wide = max(wide, elements)
            kept += hidden if config.recompute == "full" else elements
    if mesh.vpp > 1:  # chunks of a micro-batch that have begun before the first backward pass
        in_flight = min(2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp + 1, 2 * mesh.pp * mesh.vpp) / mesh.vpp
    else:
        in_flight = float(mesh.pp - stage)
    kept = kept * in_flight + (wide if config.recompute == "full" else 0)
    logits = (itemsize + _FP32) * layout.sizes["vocab"] if stage == mesh.pp - 1 else 0
    return math.ceil(tokens * (itemsize * kept + logits))


def layer_elements(layout: ModelLayout, layer: int, top_k: int) -> int:
    """Elements that one layer keeps of each token; see `activation_bytes`."""
    sizes, scopes = layout.sizes, layout.layers[layer]
    rows = PARAMS[layout.family.name]
    gated = 2 if any(row.cut is Cut.GATED for row in rows) else 1
    hybrid = any(row.scope is Scope.MAMBA for row in rows)
    hidden, found = sizes["hidden"], 0
    if not hybrid or Scope.ATTENTION in scopes:
        found += 2 * hidden + _attention(sizes)
    if Scope.MAMBA in scopes:
        found += 2 * hidden + sizes["mamba_in"] + sizes["mamba_conv"] + 2 * sizes["mamba_inner"]
    if Scope.DENSE in scopes:
        found += 2 * hidden + (gated + 1) * sizes["ffn"]
    if Scope.EXPERT in scopes:
        shared = (gated + 1) * sizes["shared_ffn"]
        found += 2 * hidden + shared + top_k * (hidden + (gated + 1) * sizes["moe_ffn"])
    return found


def _attention(sizes: Mapping[str, int]) -> int:
    """Elements of queries, keys, values and output; of latent attention also what they are made of."""
    if "kv_lora" not in sizes:
        return 2 * sizes["q"] + 2 * sizes["kv"]
    compressed = 2 * sizes["q_lora"] + sizes["mla_kv_down"] + sizes["kv_lora"]
    return compressed + 2 * sizes["mla_q"] + sizes["mla_kv_up"] + sizes["mla_out"]
