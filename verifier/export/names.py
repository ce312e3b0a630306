"""Place of every checkpoint tensor and published adapter in Megatron, stated independently of Megatron-Bridge.

Bridge's import and export mirror each other, so one wrong transpose in both cancels. This table follows Megatron-Core's
layers alone: which rows and columns of which checkpoint tensors each parameter of a rank must hold. A check compares
what the rank holds with it.

Names are those of Transformer Engine's layer spec, which fuses the norm before a column-parallel layer into it.

Source:
    megatron-core 0.19.2: models/gpt/gpt_layer_specs.py (`get_gpt_layer_with_transformer_engine_submodules`),
    transformer/attention.py (`SelfAttention.get_query_key_value_tensors`, rows interleaved per query group),
    transformer/mlp.py (GLU: ``torch.chunk`` of the local output, so gate above up within each shard),
    transformer/moe/router.py, transformer/moe/experts.py (`TEGroupedMLP`), transformer/multi_latent_attention.py;
    models/hybrid/hybrid_layer_specs.py, ssm/mamba_mixer.py (`MambaMixer.__init__`: what each rank holds of z, x, B, C
    and dt, and of the convolution over x, B and C).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from verifier.errors import UsageError
from verifier.export.sharding import Box, ParamPlacement
from verifier.mesh import Coordinate, Mesh
from verifier.model.families import JSON, Family, Scope, TensorRow, family_of, further_scopes, layer_scopes, sizes_of

if TYPE_CHECKING:
    import torch


class Cut(Enum):
    """Division of a parameter over tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    ROWS = "dim 0 is divided"
    COLUMNS = "dim 1 is divided"
    GATED = "gate and up are each divided along dim 0; a rank holds its gate rows above its up rows"
    QKV = "query, key and value rows are interleaved per query group, and the result is divided along dim 0"
    RUNS = "dim 0 is a concatenation of runs; a rank holds its part of each run, in the order of the runs"


@dataclass(frozen=True, slots=True)
class ParamRow:
    """One parameter pattern of Megatron and the checkpoint tensors that it consists of."""

    pattern: str
    cut: Cut
    sources: tuple[str, ...]
    """Checkpoint patterns, as in the family's row."""
    scope: Scope = Scope.LAYER
    is_buffer: bool = False
    runs: tuple[str, ...] = ()
    """Names of the sizes of the runs (`Cut.RUNS`); they sum to the source's rows."""


Rows = tuple[ParamRow, ...]
Numbers = tuple[int, int]
"""Layer and expert; 0 where a row has none."""

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_CONVOLVED = ("mamba_inner", "mamba_state", "mamba_state")
_RUNS = {
    "mixer.conv1d_weight": _CONVOLVED,
    "mixer.conv1d_bias": _CONVOLVED,
    "mixer.in_proj.weight": ("mamba_inner", *_CONVOLVED, "mamba_heads"),
}
"""Parameter cut by `Cut.RUNS` -> names of the sizes of its runs."""


def _rows(prefix: str, table: str) -> Rows:
    """Parse rows of a layer: scope, Megatron's parameter name, cut, and checkpoint names; names lack their prefix."""
    rows = []
    for scope, param, cut, *sources in (line.split() for line in table.strip().splitlines()):
        patterns = tuple(prefix + source for source in sources)
        is_buffer, runs = param.endswith("expert_bias"), _RUNS.get(param, ())
        rows.append(ParamRow(f"decoder.layers.{{layer}}.{param}", Cut[cut], patterns, Scope[scope], is_buffer, runs))
    return tuple(rows)


_LAYER = "model.layers.{layer}."
_GQA = _rows(
    _LAYER,
    """
    LAYER self_attention.linear_qkv.layer_norm_weight WHOLE input_layernorm.weight
    LAYER self_attention.linear_qkv.weight QKV self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight
    LAYER self_attention.linear_proj.weight COLUMNS self_attn.o_proj.weight
    """,
)
_QKV_BIAS = _rows(
    _LAYER, "LAYER self_attention.linear_qkv.bias QKV self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"
)
_QK_NORM = _rows(
    _LAYER,
    """
    LAYER self_attention.q_layernorm.weight WHOLE self_attn.q_norm.weight
    LAYER self_attention.k_layernorm.weight WHOLE self_attn.k_norm.weight
    """,
)
_MLA = _rows(
    _LAYER,
    """
    LAYER input_layernorm.weight                              WHOLE   input_layernorm.weight
    LAYER self_attention.linear_q_down_proj.weight            WHOLE   self_attn.q_a_proj.weight
    LAYER self_attention.linear_q_up_proj.layer_norm_weight   WHOLE   self_attn.q_a_layernorm.weight
    LAYER self_attention.linear_q_up_proj.weight              ROWS    self_attn.q_b_proj.weight
    LAYER self_attention.linear_kv_down_proj.weight           WHOLE   self_attn.kv_a_proj_with_mqa.weight
    LAYER self_attention.linear_kv_up_proj.layer_norm_weight  WHOLE   self_attn.kv_a_layernorm.weight
    LAYER self_attention.linear_kv_up_proj.weight             ROWS    self_attn.kv_b_proj.weight
    LAYER self_attention.linear_proj.weight                   COLUMNS self_attn.o_proj.weight
    """,
)
_DENSE_MLP = _rows(
    _LAYER,
    """
    DENSE mlp.linear_fc1.layer_norm_weight WHOLE   post_attention_layernorm.weight
    DENSE mlp.linear_fc1.weight            GATED   mlp.gate_proj.weight mlp.up_proj.weight
    DENSE mlp.linear_fc2.weight            COLUMNS mlp.down_proj.weight
    """,
)
_EXPERTS = _rows(
    _LAYER,
    """
    MOE    pre_mlp_layernorm.weight WHOLE post_attention_layernorm.weight
    MOE    mlp.router.weight        WHOLE mlp.gate.weight
    """,
) + _rows(
    _LAYER + "mlp.experts.{expert}.",
    """
    EXPERT mlp.experts.linear_fc1.weight{expert} GATED   gate_proj.weight up_proj.weight
    EXPERT mlp.experts.linear_fc2.weight{expert} COLUMNS down_proj.weight
    """,
)
_SCORE_BIAS = _rows(_LAYER, "MOE mlp.router.expert_bias WHOLE mlp.gate.e_score_correction_bias")
_SHARED_EXPERTS = _rows(
    _LAYER + "mlp.shared_experts.",
    """
    MOE mlp.shared_experts.linear_fc1.weight GATED   gate_proj.weight up_proj.weight
    MOE mlp.shared_experts.linear_fc2.weight COLUMNS down_proj.weight
    """,
)
_HYBRID = _rows(
    "backbone.layers.{layer}.",
    """
    MAMBA     mixer.conv1d_weight                         RUNS    mixer.conv1d.weight
    MAMBA     mixer.conv1d_bias                           RUNS    mixer.conv1d.bias
    MAMBA     mixer.dt_bias                               ROWS    mixer.dt_bias
    MAMBA     mixer.A_log                                 ROWS    mixer.A_log
    MAMBA     mixer.D                                     ROWS    mixer.D
    MAMBA     mixer.in_proj.layer_norm_weight             WHOLE   norm.weight
    MAMBA     mixer.in_proj.weight                        RUNS    mixer.in_proj.weight
    MAMBA     mixer.norm.weight                           ROWS    mixer.norm.weight
    MAMBA     mixer.out_proj.weight                       COLUMNS mixer.out_proj.weight
    ATTENTION self_attention.linear_qkv.layer_norm_weight WHOLE   norm.weight
    ATTENTION self_attention.linear_qkv.weight QKV mixer.q_proj.weight mixer.k_proj.weight mixer.v_proj.weight
    ATTENTION self_attention.linear_proj.weight           COLUMNS mixer.o_proj.weight
    DENSE     mlp.linear_fc1.layer_norm_weight            WHOLE   norm.weight
    DENSE     mlp.linear_fc1.weight                       ROWS    mixer.up_proj.weight
    DENSE     mlp.linear_fc2.weight                       COLUMNS mixer.down_proj.weight
    MOE       pre_mlp_layernorm.weight                    WHOLE   norm.weight
    MOE       mlp.router.weight                           WHOLE   mixer.gate.weight
    MOE       mlp.router.expert_bias                      WHOLE   mixer.gate.e_score_correction_bias
    EXPERT    mlp.experts.linear_fc1.weight{expert}       ROWS    mixer.experts.{expert}.up_proj.weight
    EXPERT    mlp.experts.linear_fc2.weight{expert}       COLUMNS mixer.experts.{expert}.down_proj.weight
    MOE       mlp.shared_experts.linear_fc1.weight        ROWS    mixer.shared_experts.up_proj.weight
    MOE       mlp.shared_experts.linear_fc2.weight        COLUMNS mixer.shared_experts.down_proj.weight
    """,
)

_FURTHER = _rows(
    _LAYER,
    """
    FURTHER enorm.weight           WHOLE enorm.weight
    FURTHER hnorm.weight           WHOLE hnorm.weight
    FURTHER eh_proj.weight         ROWS  eh_proj.weight
    FURTHER final_layernorm.weight WHOLE shared_head.norm.weight
    """,
)

PARAMS: dict[str, Rows] = {
    "qwen3": (*_GQA, *_QK_NORM, *_DENSE_MLP),
    "qwen2": (*_GQA, *_QKV_BIAS, *_DENSE_MLP),
    "llama": (*_GQA, *_DENSE_MLP),
    "qwen3-moe": (*_GQA, *_QK_NORM, *_EXPERTS),
    "deepseek-v3": (*_MLA, *_DENSE_MLP, *_EXPERTS, *_SCORE_BIAS, *_SHARED_EXPERTS),
    "nemotron-h": _HYBRID,
}
"""Family name -> parameters of its layers. Embedding and output layer have the same names in every family."""

_FINAL_NORMS = {**dict.fromkeys(PARAMS, "decoder.final_layernorm.weight"), "nemotron-h": "decoder.final_norm.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The table applied to one checkpoint's config; made by `layout_of`."""

    family: Family
    sizes: Mapping[str, int]
    layers: tuple[frozenset[Scope], ...]
    """Scopes of the rows that each layer has, those for further tokens behind the policy's."""
    tied: bool

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the parameters and checkpointed buffers of one model chunk of a rank, in the model's order.

        Raises:
            UsageError: the mesh does not divide the layers, the experts or a tensor.
        """
        at = mesh.coordinate(rank)
        is_first = at.pp == 0 and chunk == 0
        is_last = at.pp == mesh.pp - 1 and chunk == mesh.vpp - 1
        embedding, final_norm = (self.family.embedding.pattern,), (self.family.final_norm.pattern,)
        found = []
        further = range(self.sizes["layers"], len(self.layers)) if is_last else ()
        if is_first or further:
            found.append(self._place(ParamRow(_EMBEDDING, Cut.ROWS, embedding, Scope.MODEL), mesh, at))
        found += self.in_layers(PARAMS[self.family.name], mesh, rank, chunk)
        if is_last:
            norm = ParamRow(_FINAL_NORMS[self.family.name], Cut.WHOLE, final_norm, Scope.MODEL)
            found.append(self._place(norm, mesh, at))
        found += self._of_layers(_further(PARAMS[self.family.name]), mesh, rank, further)
        if is_last and not (is_first and self.tied):
            output = ParamRow(_OUTPUT, Cut.ROWS, embedding if self.tied else ("lm_head.weight",), Scope.MODEL)
            found.append(self._place(output, mesh, at))
        return found

    def in_layers(self, rows: Rows, mesh: Mesh, rank: int, chunk: int) -> list[ParamPlacement]:
        """List what rows of this layout's family make of the layers of one model chunk of a rank; see `placements`."""
        return self._of_layers(rows, mesh, rank, mesh.layers_of(mesh.coordinate(rank).pp, chunk, self.sizes["layers"]))

    def _of_layers(self, rows: Rows, mesh: Mesh, rank: int, layers: Iterable[int]) -> list[ParamPlacement]:
        at, found = mesh.coordinate(rank), []
        for local_layer, layer in enumerate(layers):
            for row in rows:
                if row.scope in self.layers[layer]:
                    experts = self._experts(mesh, at) if row.scope is Scope.EXPERT else range(1)
                    for local, expert in enumerate(experts):
                        found.append(self._place(row, mesh, at, (local_layer, local), (layer, expert)))
        return found

    def _experts(self, mesh: Mesh, at: Coordinate) -> range:
        if self.sizes["experts"] % mesh.ep:
            raise UsageError(f"ep = {mesh.ep} does not divide the model's {self.sizes['experts']} experts")
        num_local = self.sizes["experts"] // mesh.ep
        return range(at.ep * num_local, (at.ep + 1) * num_local)

    def _place(
        self, row: ParamRow, mesh: Mesh, at: Coordinate, local: Numbers = (0, 0), whole: Numbers = (0, 0)
    ) -> ParamPlacement:
        """Return the placement of a parameter; its layer and expert as numbered by the rank and by the checkpoint."""
        is_expert = row.scope is Scope.EXPERT
        axis, index, parts = ("etp", at.etp, mesh.etp) if is_expert else ("tp", at.tp, mesh.tp)
        replicated_over = ("edp",) if is_expert else ("cp", "dp")
        if row.cut is Cut.WHOLE:
            index, parts, replicated_over = 0, 1, (axis, *replicated_over)
        dims = {tensor.pattern: tensor.dims for tensor in self.family.tensors}
        shapes = {_named(source, whole): tuple(self.sizes[dim] for dim in dims[source]) for source in row.sources}
        dim = 1 if row.cut is Cut.COLUMNS else 0
        lengths = {name: shape[dim] for name, shape in shapes.items()}
        global_name = _named(row.pattern, whole)
        canonical = _EMBEDDING if row.sources == (self.family.embedding.pattern,) else global_name
        return ParamPlacement(
            param_name=_named(row.pattern, local),
            global_name=global_name,
            is_buffer=row.is_buffer,
            dim=dim,
            boxes=self._boxes(row, lengths, index, parts, f"{axis} = {parts} does not divide the", f"`{global_name}`"),
            source_shapes=shapes,
            group=f"{canonical} {axis} {index}/{parts}",
            replicated_over=replicated_over,
        )

    def _boxes(
        self, row: ParamRow, lengths: Mapping[str, int], index: int, parts: int, refusal: str, name: str
    ) -> tuple[Box, ...]:
        """Return the boxes of part `index` of `parts` of a parameter, from the lengths of its sources along the dim."""
        wholes, where = [[Box(source, 0, length)] for source, length in lengths.items()], f"indices of {name}"
        if row.cut is Cut.RUNS:
            ends = accumulate((self.sizes[run] for run in row.runs), initial=0)
            (source,) = lengths
            wholes = [[Box(source, begin, end)] for begin, end in pairwise(ends)]
            where = f"rows of a run of {name}"
        elif row.cut is Cut.QKV:  # q0 k0 v0 q1 k1 v1 ...
            groups = self.sizes["kv_heads"]
            if any(length % groups for length in lengths.values()):
                raise UsageError(f"{groups} groups do not divide the {sum(lengths.values())} rows of {name}")
            sizes = [(source, length // groups) for source, length in lengths.items()]
            wholes = [[Box(source, at * size, (at + 1) * size) for at in range(groups) for source, size in sizes]]
            where = f"rows of {name} in {groups} groups"
        found: list[Box] = []
        for boxes in wholes:
            total = sum(box.size for box in boxes)
            if total % parts:
                raise UsageError(f"{refusal} {total} {where}")
            found += _between(boxes, index * (total // parts), (index + 1) * (total // parts))
        return tuple(found)


def _further(rows: Rows) -> Rows:
    """Rows of a layer for a further token, of those of the layer that it consists of."""
    within, beside = ("decoder.layers.{layer}.", "mtp.layers.{layer}.mtp_model_layer."), ("decoder.", "mtp.")
    return tuple(replace(row, pattern=row.pattern.replace(*within)) for row in rows) + tuple(
        replace(row, pattern=row.pattern.replace(*beside)) for row in _FURTHER
    )


def _between(boxes: Sequence[Box], begin: int, end: int) -> Iterator[Box]:
    """Yield what lies at indices [begin, end) of boxes laid end to end; of a box, it may be a piece."""
    at = 0
    for box in boxes:
        first, last = max(begin, at), min(end, at + box.size)
        if first < last:
            yield Box(box.source, box.begin + first - at, box.begin + last - at)
        at += box.size


def _named(pattern: str, numbers: Numbers) -> str:
    return pattern.format(layer=numbers[0], expert=numbers[1])


def layout_of(config: Mapping[str, JSON]) -> ModelLayout | None:
    """Return the layout of checkpoints with this config.json, or None if no family row describes it.

    Raises:
        UsageError: a size that the family needs is absent or no positive integer.
    """
    family = family_of(config)
    if family is None:
        return None
    layers, tied = (*layer_scopes(config), *further_scopes(config)), bool(config.get("tie_word_embeddings"))
    return ModelLayout(family=family, sizes=sizes_of(config), layers=layers, tied=tied)


_A, _B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the two matrices' names; they replace ``.weight`` of the checkpoint tensor."""
_RANK = "adapter rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """Layout of a model's adapters; made by `adapters_of`.

    An adapter of a linear is two matrices: A [rank, in] reads the linear's input, B [out, rank] adds to its output.
    Megatron has one pair on each of its linears, fused ones included. Published adapters have one pair for each
    checkpoint matrix, so the parts of a fused linear share one A, and B is cut as the rows of the linear are.
    """

    layout: ModelLayout
    """Layout of the published adapters; the tensors of its family are their matrices."""
    rows: tuple[ParamRow, ...]
    """Megatron's adapter parameters."""
    shared: Mapping[str, tuple[str, ...]]
    """Pattern of the A named in a row -> patterns of all A that are the same matrix."""

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the adapter matrices of one model chunk of a rank; see `ModelLayout.placements`."""
        return self.layout.in_layers(self.rows, mesh, rank, chunk)

    def names(self) -> dict[str, list[str]]:
        """Map the name of each joined A to all of its published names: parts of a fused linear share one A."""
        return {
            first.format(layer=layer): [other.format(layer=layer) for other in others]
            for first, others in self.shared.items()
            for layer in range(self.layout.sizes["layers"])
        }

    def spread(self, joined: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every matrix under each of its published names."""
        names = self.names()
        for name, tensor in joined.items():
            for same in names.get(name, [name]):
                yield same, tensor


def adapters_of(layout: ModelLayout, targets: Sequence[str], rank: int) -> AdapterLayout:
    """Return the layout of adapters of this rank on Megatron's linears with these last names, such as "linear_qkv"."""
    dims = {tensor.pattern: tensor for tensor in layout.family.tensors}
    rows: list[ParamRow] = []
    tensors: list[TensorRow] = []
    shared: dict[str, tuple[str, ...]] = {}
    for row in PARAMS[layout.family.name]:
        base = row.pattern.removesuffix(".weight")
        if base == row.pattern or base.rpartition(".")[2] not in targets:
            continue
        inward, outward = (tuple(source.removesuffix(".weight") + end for source in row.sources) for end in (_A, _B))
        for source, to_rank, from_rank in zip(row.sources, inward, outward, strict=True):
            out_size, in_size = dims[source].dims
            tensors += [
                replace(dims[source], pattern=to_rank, dims=(_RANK, in_size)),
                replace(dims[source], pattern=from_rank, dims=(out_size, _RANK)),
            ]
        shared[inward[0]] = inward
        cut_in, cut_out = (Cut.COLUMNS, Cut.ROWS) if row.cut is Cut.COLUMNS else (Cut.ROWS, row.cut)
        rows += [
            replace(row, pattern=f"{base}.adapter.linear_in.weight", sources=inward[:1], cut=cut_in),
            replace(row, pattern=f"{base}.adapter.linear_out.weight", sources=outward, cut=cut_out),
        ]
    published = replace(
        layout, family=replace(layout.family, tensors=tuple(tensors)), sizes={**layout.sizes, _RANK: rank}
    )
    return AdapterLayout(layout=published, rows=tuple(rows), shared=shared)


def in_adapter(name: str) -> str | None:
    """Name of a live parameter of an adapter; None for one of the base."""
    return name if ".adapter." in name else None


def in_base(name: str) -> str | None:
    """Name that a live tensor of the frozen base has in a model without adapters; None for one of an adapter."""
    return None if ".adapter." in name else name.replace(".to_wrap.", ".")
