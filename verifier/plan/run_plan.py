"""Plan of a model on a mesh, of config.json alone: what each rank holds and exports, how much memory, how long a sync.

Nothing is started and no weight is read: places are those of the hand-written layout (`verifier.export.names`), names
and shapes those of the family's row (`verifier.model.families`), order and chunks those of `chunk_plan`. Without a row
names and shapes are those of transformers' model on torch's meta device, and places follow from them (`named_layout`).
Contradictions are sizes that do not divide, with what would, and ranks that would not send the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verifier.config import PlanConfig
from verifier.config_json import CHOSEN, stated_dtype, text_model
from verifier.errors import UsageError
from verifier.export.names import ModelLayout, layout_of
from verifier.mesh import Mesh
from verifier.mesh.mesh import ranges
from verifier.model.bridges import bridged
from verifier.model.checkpoint import without_class
from verifier.model.families import JSON, Content, TensorSpec, size_if_any, tensors_of
from verifier.model.mesh_fit import architecture_of, misfits
from verifier.plan.chunk_plan import DTYPE_BYTES, ChunkPlan, chunk_bytes_of
from verifier.plan.export_stream import RanksPlan, Streams, plans_of
from verifier.plan.held_shards import (
    BUFFERS,
    Holding,
    Ownership,
    RankBytes,
    activation_bytes,
    holdings_of,
    join_bytes,
    listed,
    ownership_of,
    rank_bytes,
)
from verifier.plan.named_layout import ASSUMED, NamedLayout

GIB = 1 << 30
MEASURED_GB_S = {"nccl": 312.3, "ipc": 248.6}
"""Speed of a verified transfer of 2,751 tensors on H200s of one host, GB/s."""
MEASURED_IN = "golden/gpu/h200-x4-6aa0e87.json"
_WIDE = (Content.SCORE_BIAS, Content.DECAY)
"""Contents that checkpoints hold in float32."""
_LEFT_OUT = {
    "num_nextn_predict_layers": "layers that predict further tokens (MTP), of which config.json names {}",
    "mtp_num_hidden_layers": "layers that predict further tokens (MTP), of which config.json names {}",
    "vision_config": "the part of the model that reads images",
    "quantization_config": "the quantization of the checkpoint: the plan is of weights in {dtype}",
}
"""Key of config.json -> what the plan does without."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A model on a mesh, the contradictions between the two, and what follows from both."""

    config: PlanConfig
    sizes: Mapping[str, JSON]
    """config.json, without what the plan does without."""
    layout: ModelLayout | NamedLayout
    specs: tuple[TensorSpec, ...]
    """Every tensor of the checkpoint."""
    left_out: tuple[str, ...]
    """Clauses on parts of the model that the plan does not have."""
    derived: str = ""
    """Source of derived places, and what is assumed; empty for those of a hand-written row."""
    contradictions: tuple[str, ...] = ()
    """Sentences; empty for a sound plan."""
    made: Made | None = None
    """None where the mesh does not divide the model."""

    @property
    def family(self) -> str:
        """Name of the hand-written row, or of the architecture where there is none."""
        return architecture_of(self.sizes) if isinstance(self.layout, NamedLayout) else self.layout.family.name

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the checkpoint, by name."""
        return {spec.name: spec.shape for spec in self.specs}

    @cached_property
    def _wide(self) -> frozenset[str]:
        """Names of the tensors that ranks hold in float32, whatever the dtype."""
        kept = (Content.SCORE_BIAS,) if self.config.rounds_decay else _WIDE
        return frozenset(spec.name for spec in self.specs if spec.content in kept)

    def dtype_of(self, name: str) -> str:
        """Return the dtype in which ranks hold and export a tensor."""
        return "float32" if name in self._wide else self.config.dtype

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors of the checkpoint that are trained."""
        return sum(math.prod(spec.shape) for spec in self.specs if spec.content is not Content.SCORE_BIAS)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are exported."""
        return sum(math.prod(spec.shape) * DTYPE_BYTES[self.dtype_of(spec.name)] for spec in self.specs)

    @cached_property
    def chunk_bytes(self) -> int:
        """Greatest size of a chunk, in bytes; it follows from what the checkpoint's files hold."""
        sizes = ((math.prod(spec.shape), spec.content) for spec in self.specs)
        dtype = self.config.dtype
        stored = sum(size * DTYPE_BYTES["float32" if content in _WIDE else dtype] for size, content in sizes)
        return chunk_bytes_of(stored, self.config.max_chunk_mib << 20)

    @property
    def transfer_gb_s(self) -> float:
        """Bandwidth from rank 0 to the engine, GB/s."""
        return self.config.transfer_gb_s or MEASURED_GB_S[self.config.transport]

    @property
    def gather_gb_s(self) -> float:
        """Bandwidth at which a rank gets what other ranks hold, GB/s."""
        return self.config.gather_gb_s or MEASURED_GB_S["nccl"]


@dataclass(frozen=True, kw_only=True)
class Made:
    """Consequences of a model and a mesh that divides it."""

    holdings: tuple[Holding, ...]
    ownership: Ownership
    plans: tuple[RanksPlan, ...]
    """Chunk plans of all ranks, equal ones once; one, unless ranks contradict each other."""
    memory: tuple[RankBytes, ...]
    """Bytes of the ranks of each holding; of rank 0 without what it sends from."""
    sending: int
    """Bytes of the chunks that rank 0 holds at a time."""
    gather_s: float
    """Lower bound: what the rank that holds least gets from the others, by bandwidth."""
    transfer_s: float
    """Lower bound: the whole stream by bandwidth."""

    def bytes_of(self, holding: int, rank: int) -> RankBytes:
        """Bytes of one rank of a holding."""
        memory = self.memory[holding]
        return memory if rank else replace(memory, transfer=memory.transfer + self.sending)

    def above(self, limit: float, measure: Callable[[RankBytes], int]) -> list[int]:
        """Ranks of whose bytes a measure is above a limit, in bytes."""
        return sorted(
            rank
            for index, holding in enumerate(self.holdings)
            for rank in holding.ranks
            if measure(self.bytes_of(index, rank)) > limit
        )


def described(config: PlanConfig, sizes: Mapping[str, JSON]) -> RunPlan:
    """Plan a model on a mesh as far as nothing follows from it.

    Raises:
        UsageError: neither a row nor a class of transformers describes the model, or a size in config.json is absent or
            no positive integer.
    """
    given, sizes = sizes, text_model(sizes)
    left_out = [
        sentence.format(sizes[key], dtype=config.dtype) for key, sentence in _LEFT_OUT.items() if sizes.get(key)
    ]
    if stated_dtype(sizes) is None:
        left_out.append(f"a dtype, which config.json does not name: the plan is of weights in {config.dtype}")
    sizes = {key: value for key, value in sizes.items() if key not in _LEFT_OUT}
    layout: ModelLayout | NamedLayout | None = layout_of(sizes)
    derived = ""
    if layout is None:
        if clause := without_class(given):
            raise UsageError(f"no hand-written row describes {architecture_of(sizes)}, and config.json has {clause}")
        from verifier.model.transformers_hf import meta_tensors  # torch, which plans by a row do without

        layout, name = NamedLayout(tuple(meta_tensors(given))), architecture_of(sizes)
        derived = f"by names and shapes of transformers' {name}, without a hand-written row; assumed: {ASSUMED}"
        if bridged() and name not in bridged():
            derived += f"; megatron-bridge has no bridge for {name}, so no run starts"
    specs = layout.specs if isinstance(layout, NamedLayout) else tuple(tensors_of(layout.family, sizes))
    return RunPlan(
        config=config, sizes=sizes, layout=layout, specs=specs, left_out=tuple(left_out), derived=derived,
        contradictions=tuple(contradictions(sizes, config.mesh)),
    )  # fmt: skip


def run_plan(config: PlanConfig, sizes: Mapping[str, JSON]) -> RunPlan:
    """Plan a model on a mesh; for what is refused see `described`."""
    plan, mesh = described(config, sizes), config.mesh
    if plan.contradictions:
        return plan
    try:
        holdings = holdings_of(plan.layout, mesh)
    except UsageError as refusal:
        return replace(plan, contradictions=(str(refusal),))
    made = make(plan, holdings)
    limit = config.gpu_gib * GIB
    found = [*made.ownership.errors(plan.shapes), *plan_errors(made.plans, plan.shapes)]
    if ranks := made.above(limit, lambda item: item.certain):
        worst = max(made.bytes_of(index, holding.ranks[0]).certain for index, holding in enumerate(made.holdings))
        found.append(
            f"{len(ranks):,} of {mesh.world_size:,} ranks do not fit a GPU of {config.gpu_gib:g} GiB, activations "
            f"apart: the largest needs {worst / GIB:,.1f} GiB"
        )
    return replace(plan, contradictions=tuple(found), made=made)


def make(plan: RunPlan, holdings: tuple[Holding, ...]) -> Made:
    """Return what follows from what the ranks hold."""
    config, mesh = plan.config, plan.config.mesh
    streams = Streams(mesh, holdings, plan.layout.tied)
    plans = tuple(plans_of(streams, plan.dtype_of, plan.chunk_bytes))
    memory = memory_of(plan, holdings)
    largest = max((chunk.num_bytes for item in plans if item.plan for chunk in item.plan.chunks), default=0)
    least = min(item.weights for item in memory)
    return Made(
        holdings=holdings, ownership=ownership_of(holdings), plans=plans, memory=memory,
        sending=BUFFERS[config.transport] * largest,
        gather_s=max(0, plan.num_bytes - least) / plan.gather_gb_s / 1e9,
        transfer_s=plan.num_bytes / plan.transfer_gb_s / 1e9,
    )  # fmt: skip


def memory_of(plan: RunPlan, holdings: tuple[Holding, ...]) -> tuple[RankBytes, ...]:
    """Return the bytes of the ranks of each holding."""
    config, mesh = plan.config, plan.config.mesh
    top_k = next(filter(None, (size_if_any(plan.sizes, key) for key in CHOSEN)), 1)
    activations = [activation_bytes(plan.layout, config, stage, top_k) for stage in range(mesh.pp)]
    transfer = join_bytes(holdings, mesh, DTYPE_BYTES[config.dtype])
    return tuple(
        rank_bytes(item, config, plan.dtype_of, transfer=transfer, activations=activations[item.at.pp])
        for item in holdings
    )


def contradictions(config: Mapping[str, JSON], mesh: Mesh) -> Iterator[str]:
    """Yield a sentence on each size of a mesh that does not divide the model, and what would."""
    found = list(misfits(config, mesh))
    kv_heads = None if config.get("kv_lora_rank") is not None else size_if_any(config, "num_key_value_heads")
    vocabulary, layers = size_if_any(config, "vocab_size"), size_if_any(config, "num_hidden_layers") or 0
    for sentence in found:
        if "key-value heads" in sentence and kv_heads is not None and mesh.tp > kv_heads:
            sentence += ", and is no multiple of them"
        elif "vocabulary entries" in sentence and vocabulary is not None:
            padded = -(-vocabulary // mesh.tp) * mesh.tp
            sentence += f": it would have to be padded to {padded:,}, and the trainer does not pad"
        elif ("layers do not divide" in sentence or "layers are left" in sentence) and (offer := _stages(layers, mesh)):
            sentence += f"; {offer} does"
        yield sentence
    if any(sentence.startswith("tp ") for sentence in found):
        wrong = ((tp, misfits(config, Mesh(tp=tp))) for tp in range(1, mesh.tp))
        fits = [tp for tp, said in wrong if not any(sentence.startswith("tp ") for sentence in said)]
        yield f"the greatest tp below {mesh.tp} that divides this model is {fits[-1]}"


def _stages(num_layers: int, mesh: Mesh) -> str:
    """Return the flags of uneven stages, of the last or of both ends, whose sizes are nearest to each other."""
    found: dict[str, int] = {}
    bare = replace(mesh, first_stage_layers=None, last_stage_layers=None)
    for size in range(1, num_layers):
        for ends in (("last",), ("first", "last")):
            with contextlib.suppress(UsageError):
                sizes = replace(bare, **{f"{end}_stage_layers": size for end in ends}).stage_sizes(num_layers)
                found[" ".join(f"--{end}-stage-layers {size}" for end in ends)] = max(sizes) - min(sizes)
    return min(found, key=found.__getitem__, default="")


def plan_errors(plans: Sequence[RanksPlan], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a sentence on each set of ranks that has no plan, or another one than most; and on tensors not sent."""
    first, *others = plans
    found = [f"{_said(item.ranks)} cannot plan the transfer: {item.refused}" for item in plans if item.refused]
    found += [
        f"{_said(item.ranks)} would have another chunk plan than {_said(first.ranks)}: {_unlike(first.plan, item.plan)}"
        for item in others if item.plan is not None and first.plan is not None
    ]  # fmt: skip
    if first.plan is not None:
        sent = {tensor.name for tensor in first.plan.tensors}
        if absent := [name for name in shapes if name not in sent]:
            found.append(f"nobody sends {listed(absent)}")
        if surplus := sorted(sent - shapes.keys()):
            found.append(f"{listed(surplus)} would be sent, which the checkpoint does not have")
    return found


def _unlike(first: ChunkPlan, other: ChunkPlan) -> str:
    ours, theirs = list(first.tensors), list(other.tensors)
    for place, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if one != two:
            return f"tensor {place:,} is `{two.name}` where the others have `{one.name}`"
    return f"it has {len(theirs):,} tensors where the others have {len(ours):,}"


def _said(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks, most=3)}"
