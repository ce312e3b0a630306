"""Place of every checkpoint tensor in Megatron, stated independently of Megatron-Bridge.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from verifier.errors import UsageError
from verifier.export.sharding import Box, ParamPlacement
from verifier.mesh import Coordinate, Mesh
from verifier.model.families import JSON, Family, Scope, family_of, layer_scopes, sizes_of


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

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = ParamRow("output_layer.weight", Cut.ROWS, ("lm_head.weight",), Scope.MODEL)


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
    """Scopes of the rows that each layer has."""
    tied: bool

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the parameters and checkpointed buffers of one model chunk of a rank, in the model's order.

        Args:
            mesh: parallel sizes.
            rank: trainer rank, 0 <= rank < mesh.world_size.
            chunk: virtual pipeline chunk, 0 <= chunk < mesh.vpp.

        Raises:
            UsageError: the mesh does not divide the layers, the experts or a tensor.
        """
        return list(self._placements(mesh, mesh.coordinate(rank), chunk))

    def _placements(self, mesh: Mesh, at: Coordinate, chunk: int) -> Iterator[ParamPlacement]:
        is_first = at.pp == 0 and chunk == 0
        is_last = at.pp == mesh.pp - 1 and chunk == mesh.vpp - 1
        embedding = (self.family.embedding.pattern,)
        if is_first:
            yield self.place(ParamRow(_EMBEDDING, Cut.ROWS, embedding, Scope.MODEL), mesh, at)
        layers = mesh.layers_of(at.pp, chunk, self.sizes["layers"])
        for local_layer, layer in enumerate(layers):
            for row in PARAMS[self.family.name]:
                if row.scope not in self.layers[layer]:
                    continue
                for local_expert, expert in self._experts(row, mesh, at):
                    local = {"layer": local_layer, "expert": local_expert}
                    yield self.place(row, mesh, at, local, {"layer": layer, "expert": expert})
        if is_last:
            final_norm = (self.family.final_norm.pattern,)
            yield self.place(ParamRow(_FINAL_NORMS[self.family.name], Cut.WHOLE, final_norm, Scope.MODEL), mesh, at)
            if not self.tied:
                yield self.place(_OUTPUT, mesh, at)
            elif not is_first:
                yield self.place(ParamRow(_OUTPUT.pattern, Cut.ROWS, embedding, Scope.MODEL), mesh, at)

    def _experts(self, row: ParamRow, mesh: Mesh, at: Coordinate) -> list[tuple[int, int]]:
        """Return (local, global) numbers of the experts of a rank; one (0, 0) for a row that is no expert."""
        if row.scope is not Scope.EXPERT:
            return [(0, 0)]
        if self.sizes["experts"] % mesh.ep:
            raise UsageError(f"ep = {mesh.ep} does not divide the model's {self.sizes['experts']} experts")
        num_local = self.sizes["experts"] // mesh.ep
        return [(index, at.ep * num_local + index) for index in range(num_local)]

    def place(
        self,
        row: ParamRow,
        mesh: Mesh,
        at: Coordinate,
        local: Mapping[str, int] | None = None,
        whole: Mapping[str, int] | None = None,
    ) -> ParamPlacement:
        """Return the placement of one row's parameter on one rank.

        Args:
            row: a row whose sources are tensors of this layout's family.
            mesh: parallel sizes.
            at: coordinate of the rank.
            local: layer and expert in the rank's numbering; None where the row has neither.
            whole: layer and expert in the checkpoint's numbering.

        Raises:
            UsageError: the mesh does not divide the tensor.
        """
        is_expert = row.scope is Scope.EXPERT
        axis, index, parts = ("etp", at.etp, mesh.etp) if is_expert else ("tp", at.tp, mesh.tp)
        if row.cut is Cut.WHOLE:
            index, parts = 0, 1
        dims = {tensor.pattern: tensor.dims for tensor in self.family.tensors}
        names = [source.format(**(whole or {})) for source in row.sources]
        shapes = [tuple(self.sizes[dim] for dim in dims[source]) for source in row.sources]
        dim = 1 if row.cut is Cut.COLUMNS else 0
        lengths = [shape[dim] for shape in shapes]
        global_name = row.pattern.format(**(whole or {}))
        undivided = [length for length in lengths if length % parts]
        if row.cut not in (Cut.QKV, Cut.RUNS) and undivided:
            raise UsageError(f"{axis} = {parts} does not divide the {undivided[0]} indices of `{global_name}`")
        if row.cut is Cut.RUNS:
            runs = [self.sizes[run] for run in row.runs]
            boxes = _cut_runs(names[0], runs, index, parts, global_name)
        elif row.cut is Cut.QKV:
            boxes = _cut_interleaved(names, lengths, self.sizes["kv_heads"], index, parts, global_name)
        else:
            boxes = tuple(
                Box(name, index * (length // parts), (index + 1) * (length // parts))
                for name, length in zip(names, lengths, strict=True)
            )
        replicated_over = ("edp",) if is_expert else ("cp", "dp")
        if row.cut is Cut.WHOLE:
            replicated_over = (axis, *replicated_over)
        canonical = _EMBEDDING if row.sources == (self.family.embedding.pattern,) else global_name
        return ParamPlacement(
            param_name=row.pattern.format(**(local or {})),
            global_name=global_name,
            is_buffer=row.is_buffer,
            dim=dim,
            boxes=boxes,
            source_shapes=dict(zip(names, shapes, strict=True)),
            group=f"{canonical} {axis} {index}/{parts}",
            replicated_over=replicated_over,
        )


def _cut_interleaved(
    names: list[str], lengths: list[int], num_groups: int, index: int, parts: int, global_name: str
) -> tuple[Box, ...]:
    """Return the boxes of part `index` of `parts` of query, key and value, interleaved per group: q0 k0 v0 q1 k1 v1 ...

    With more parts than groups a part holds a piece of one group, as in Megatron-Core.
    """
    total = sum(lengths)
    if total % parts or any(length % num_groups for length in lengths):
        raise UsageError(f"tp = {parts} does not divide the {total} rows of `{global_name}` in {num_groups} groups")
    begin, end = index * (total // parts), (index + 1) * (total // parts)
    boxes = []
    at = 0
    for group in range(num_groups):
        for name, length in zip(names, lengths, strict=True):
            size = length // num_groups
            first, last = max(begin, at), min(end, at + size)
            if first < last:
                boxes.append(Box(name, group * size + first - at, group * size + last - at))
            at += size
    return tuple(boxes)


def _cut_runs(name: str, runs: list[int], index: int, parts: int, global_name: str) -> tuple[Box, ...]:
    """Return the boxes of part `index` of `parts` of every run of rows, in the order of the runs."""
    undivided = [run for run in runs if run % parts]
    if undivided:
        raise UsageError(f"tp = {parts} does not divide the {undivided[0]} rows of a run of `{global_name}`")
    begins = [sum(runs[:at]) for at in range(len(runs))]
    pieces = [(begin, run // parts) for begin, run in zip(begins, runs, strict=True)]
    return tuple(Box(name, begin + index * size, begin + (index + 1) * size) for begin, size in pieces)


def layout_of(config: Mapping[str, JSON]) -> ModelLayout | None:
    """Return the layout of checkpoints with this config.json, or None if no family row describes it.

    Raises:
        UsageError: a size that the family needs is absent or no positive integer.
    """
    family = family_of(config)
    if family is None:
        return None
    return ModelLayout(
        family=family, sizes=sizes_of(config), layers=layer_scopes(config), tied=bool(config.get("tie_word_embeddings"))
    )
