"""Where every checkpoint tensor lives in Megatron: an independent statement, made without Megatron-Bridge.

Bridge's import and export mirror each other, so a wrong transpose made in both is an identity. This table says once
more, from Megatron-Core's own layers, which rows and columns of which checkpoint tensors a rank must hold, and so a
check can compare what the rank does hold.

Names are those of Transformer Engine's layer spec, in which the norm before a column-parallel layer is fused into it.

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
from verifier.export.sharding import Box, Placement
from verifier.mesh import Coordinate, Mesh
from verifier.model.families import JSON, Family, Scope, family_of, layer_scopes, sizes_of


class Cut(Enum):
    """How tensor parallelism divides a parameter."""

    WHOLE = "every rank holds all of it"
    ROWS = "dim 0 is divided"
    COLUMNS = "dim 1 is divided"
    GATED = "gate and up are each divided along dim 0; a rank holds its gate rows above its up rows"
    QKV = "query, key and value rows are interleaved per query group, and the result is divided along dim 0"
    RUNS = "the rows are runs of several things; a rank holds its part of each run, in the order of the runs"


@dataclass(frozen=True, slots=True)
class ParamRow:
    """One parameter pattern of Megatron and the checkpoint tensors it is made of."""

    pattern: str
    cut: Cut
    sources: tuple[str, ...]
    """Checkpoint patterns, spelled as in the family's row."""
    scope: Scope = Scope.LAYER
    is_buffer: bool = False
    runs: tuple[str, ...] = ()
    """Names of the sizes of the runs (`Cut.RUNS`), which sum to the source's rows."""


_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = ParamRow("output_layer.weight", Cut.ROWS, ("lm_head.weight",), Scope.MODEL)


def _row(param: str, cut: Cut, *sources: str, scope: Scope = Scope.LAYER, is_buffer: bool = False) -> ParamRow:
    prefixed = tuple(f"model.layers.{{layer}}.{source}" for source in sources)
    return ParamRow(f"decoder.layers.{{layer}}.{param}", cut, prefixed, scope, is_buffer)


_GQA = (
    _row("self_attention.linear_qkv.layer_norm_weight", Cut.WHOLE, "input_layernorm.weight"),
    _row(
        "self_attention.linear_qkv.weight",
        Cut.QKV,
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    _row("self_attention.linear_proj.weight", Cut.COLUMNS, "self_attn.o_proj.weight"),
)
_QKV_BIAS = (
    _row(
        "self_attention.linear_qkv.bias",
        Cut.QKV,
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
)
_QK_NORM = (
    _row("self_attention.q_layernorm.weight", Cut.WHOLE, "self_attn.q_norm.weight"),
    _row("self_attention.k_layernorm.weight", Cut.WHOLE, "self_attn.k_norm.weight"),
)
_MLA = (
    _row("input_layernorm.weight", Cut.WHOLE, "input_layernorm.weight"),
    _row("self_attention.linear_q_down_proj.weight", Cut.WHOLE, "self_attn.q_a_proj.weight"),
    _row("self_attention.linear_q_up_proj.layer_norm_weight", Cut.WHOLE, "self_attn.q_a_layernorm.weight"),
    _row("self_attention.linear_q_up_proj.weight", Cut.ROWS, "self_attn.q_b_proj.weight"),
    _row("self_attention.linear_kv_down_proj.weight", Cut.WHOLE, "self_attn.kv_a_proj_with_mqa.weight"),
    _row("self_attention.linear_kv_up_proj.layer_norm_weight", Cut.WHOLE, "self_attn.kv_a_layernorm.weight"),
    _row("self_attention.linear_kv_up_proj.weight", Cut.ROWS, "self_attn.kv_b_proj.weight"),
    _row("self_attention.linear_proj.weight", Cut.COLUMNS, "self_attn.o_proj.weight"),
)
_DENSE_MLP = (
    _row("mlp.linear_fc1.layer_norm_weight", Cut.WHOLE, "post_attention_layernorm.weight", scope=Scope.DENSE),
    _row("mlp.linear_fc1.weight", Cut.GATED, "mlp.gate_proj.weight", "mlp.up_proj.weight", scope=Scope.DENSE),
    _row("mlp.linear_fc2.weight", Cut.COLUMNS, "mlp.down_proj.weight", scope=Scope.DENSE),
)
_EXPERTS = (
    _row("pre_mlp_layernorm.weight", Cut.WHOLE, "post_attention_layernorm.weight", scope=Scope.MOE),
    _row("mlp.router.weight", Cut.WHOLE, "mlp.gate.weight", scope=Scope.MOE),
    _row(
        "mlp.experts.linear_fc1.weight{expert}",
        Cut.GATED,
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
        scope=Scope.EXPERT,
    ),
    _row(
        "mlp.experts.linear_fc2.weight{expert}",
        Cut.COLUMNS,
        "mlp.experts.{expert}.down_proj.weight",
        scope=Scope.EXPERT,
    ),
)
_SCORE_BIAS = _row(
    "mlp.router.expert_bias", Cut.WHOLE, "mlp.gate.e_score_correction_bias", scope=Scope.MOE, is_buffer=True
)
_SHARED_EXPERTS = (
    _row(
        "mlp.shared_experts.linear_fc1.weight",
        Cut.GATED,
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        scope=Scope.MOE,
    ),
    _row("mlp.shared_experts.linear_fc2.weight", Cut.COLUMNS, "mlp.shared_experts.down_proj.weight", scope=Scope.MOE),
)


def _mixer(
    param: str, cut: Cut, *sources: str, scope: Scope, runs: tuple[str, ...] = (), is_buffer: bool = False
) -> ParamRow:
    prefixed = tuple(f"backbone.layers.{{layer}}.{source}" for source in sources)
    return ParamRow(f"decoder.layers.{{layer}}.{param}", cut, prefixed, scope, is_buffer, runs)


_CONVOLVED = ("mamba_inner", "mamba_state", "mamba_state")
_PROJECTED = ("mamba_inner", *_CONVOLVED, "mamba_heads")
_HYBRID = (
    _mixer("mixer.conv1d_weight", Cut.RUNS, "mixer.conv1d.weight", scope=Scope.MAMBA, runs=_CONVOLVED),
    _mixer("mixer.conv1d_bias", Cut.RUNS, "mixer.conv1d.bias", scope=Scope.MAMBA, runs=_CONVOLVED),
    _mixer("mixer.dt_bias", Cut.ROWS, "mixer.dt_bias", scope=Scope.MAMBA),
    _mixer("mixer.A_log", Cut.ROWS, "mixer.A_log", scope=Scope.MAMBA),
    _mixer("mixer.D", Cut.ROWS, "mixer.D", scope=Scope.MAMBA),
    _mixer("mixer.in_proj.layer_norm_weight", Cut.WHOLE, "norm.weight", scope=Scope.MAMBA),
    _mixer("mixer.in_proj.weight", Cut.RUNS, "mixer.in_proj.weight", scope=Scope.MAMBA, runs=_PROJECTED),
    _mixer("mixer.norm.weight", Cut.ROWS, "mixer.norm.weight", scope=Scope.MAMBA),
    _mixer("mixer.out_proj.weight", Cut.COLUMNS, "mixer.out_proj.weight", scope=Scope.MAMBA),
    _mixer("self_attention.linear_qkv.layer_norm_weight", Cut.WHOLE, "norm.weight", scope=Scope.ATTENTION),
    _mixer(
        "self_attention.linear_qkv.weight",
        Cut.QKV,
        "mixer.q_proj.weight",
        "mixer.k_proj.weight",
        "mixer.v_proj.weight",
        scope=Scope.ATTENTION,
    ),
    _mixer("self_attention.linear_proj.weight", Cut.COLUMNS, "mixer.o_proj.weight", scope=Scope.ATTENTION),
    _mixer("mlp.linear_fc1.layer_norm_weight", Cut.WHOLE, "norm.weight", scope=Scope.DENSE),
    _mixer("mlp.linear_fc1.weight", Cut.ROWS, "mixer.up_proj.weight", scope=Scope.DENSE),
    _mixer("mlp.linear_fc2.weight", Cut.COLUMNS, "mixer.down_proj.weight", scope=Scope.DENSE),
    _mixer("pre_mlp_layernorm.weight", Cut.WHOLE, "norm.weight", scope=Scope.MOE),
    _mixer("mlp.router.weight", Cut.WHOLE, "mixer.gate.weight", scope=Scope.MOE),
    _mixer("mlp.router.expert_bias", Cut.WHOLE, "mixer.gate.e_score_correction_bias", scope=Scope.MOE, is_buffer=True),
    _mixer(
        "mlp.experts.linear_fc1.weight{expert}", Cut.ROWS, "mixer.experts.{expert}.up_proj.weight", scope=Scope.EXPERT
    ),
    _mixer(
        "mlp.experts.linear_fc2.weight{expert}",
        Cut.COLUMNS,
        "mixer.experts.{expert}.down_proj.weight",
        scope=Scope.EXPERT,
    ),
    _mixer("mlp.shared_experts.linear_fc1.weight", Cut.ROWS, "mixer.shared_experts.up_proj.weight", scope=Scope.MOE),
    _mixer(
        "mlp.shared_experts.linear_fc2.weight", Cut.COLUMNS, "mixer.shared_experts.down_proj.weight", scope=Scope.MOE
    ),
)

PARAMS: dict[str, tuple[ParamRow, ...]] = {
    "qwen3": (*_GQA, *_QK_NORM, *_DENSE_MLP),
    "qwen2": (*_GQA, *_QKV_BIAS, *_DENSE_MLP),
    "llama": (*_GQA, *_DENSE_MLP),
    "qwen3-moe": (*_GQA, *_QK_NORM, *_EXPERTS),
    "deepseek-v3": (*_MLA, *_DENSE_MLP, *_EXPERTS, _SCORE_BIAS, *_SHARED_EXPERTS),
    "nemotron-h": _HYBRID,
}
"""Family name -> its layer parameters. The embedding and the output layer have the same names in every family."""

_FINAL_NORMS = {**dict.fromkeys(PARAMS, "decoder.final_layernorm.weight"), "nemotron-h": "decoder.final_norm.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table, applied to one checkpoint's config; make it with `layout_of`."""

    family: Family
    sizes: Mapping[str, int]
    layers: tuple[frozenset[Scope], ...]
    """Which rows each layer has."""
    tied: bool

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[Placement]:
        """Every parameter and checkpointed buffer that a model chunk of a rank holds, in the model's order.

        Args:
            mesh: Parallel sizes.
            rank: Trainer rank, 0 <= rank < mesh.world_size.
            chunk: Virtual pipeline chunk, 0 <= chunk < mesh.vpp.

        Raises:
            UsageError: the mesh does not divide the layers, the experts or a tensor.
        """
        return list(self._placements(mesh, mesh.coordinate(rank), chunk))

    def _placements(self, mesh: Mesh, at: Coordinate, chunk: int) -> Iterator[Placement]:
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
        """Local and global numbers of the experts a rank holds; one dummy for what is no expert."""
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
    ) -> Placement:
        """One row's parameter on one rank.

        Args:
            row: Its cut, and the checkpoint tensors of this layout's family that it is made of.
            mesh: Parallel sizes.
            at: The rank's coordinate.
            local: Layer and expert as the rank numbers them; None where the row has neither.
            whole: The same as the checkpoint does.

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
            boxes = _cut_runs(
                names[0], runs, index, parts, f"{axis} = {parts} does not divide a run of `{global_name}`"
            )
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
        return Placement(
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
    """Boxes of part `index` of `parts` of query, key and value, interleaved per group: q0 k0 v0 q1 k1 v1 and so on.

    With more parts than groups a part holds a piece of one group, as Megatron-Core divides it.
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
    """Boxes of part `index` of `parts` of every run of rows, in the order of the runs."""
    undivided = [run for run in runs if run % parts]
    if undivided:
        raise UsageError(f"tp = {parts} does not divide the {undivided[0]} rows of a run of `{global_name}`")
    begins = [sum(runs[:at]) for at in range(len(runs))]
    pieces = [(begin, run // parts) for begin, run in zip(begins, runs, strict=True)]
    return tuple(Box(name, begin + index * size, begin + (index + 1) * size) for begin, size in pieces)


def layout_of(config: Mapping[str, JSON]) -> Layout | None:
    """The layout of checkpoints with this config.json, or None where no family row describes it.

    Args:
        config: Parsed config.json.

    Raises:
        UsageError: a size that the family needs is absent or no positive integer.
    """
    family = family_of(config)
    if family is None:
        return None
    return Layout(
        family=family, sizes=sizes_of(config), layers=layer_scopes(config), tied=bool(config.get("tie_word_embeddings"))
    )
