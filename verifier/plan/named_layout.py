"""Places of the tensors of a model without a hand-written row, by their names and shapes alone; for plans.

A name tells the layer, the expert and the kind of a tensor, and the kind how it is cut. What has a name that no rule
knows is whole on every rank of its stage: too many bytes, not too few. Which rows of a tensor a rank holds, and the
order of an export, are not those of Megatron.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from verifier.errors import UsageError
from verifier.export.sharding import Box, ParamPlacement
from verifier.mesh import Mesh
from verifier.model.families import Content, TensorSpec

ASSUMED = (
    "projections of attention and state-space layers, feed-forward layers and vocabulary divided over tp, routed "
    "experts over ep and etp, all else whole on each rank; chunks in the order of names, which is not an export's"
)
"""Rules by which places follow from names."""
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(?:(\d+)\.)?")
_EMBEDDING = re.compile(r"(?:embed_tokens|embed_in|embeddings?|wte)\.weight$")
_FIRST = re.compile(r"embed(?!_out)|wte|wpe|per_layer")
"""Outside of layers, what the first stage holds; the last one holds the rest."""
_ROWS = re.compile(
    r"(?:^|\.)(?:(?:q|k|v|qkv|q_b|kv_b|gate|up|gate_up)_proj|w1|w3|in_proj\w*|conv1d|dt|A_log|D|mixer\.norm"
    r"|embed_tokens|embed_in|embed_out|embeddings?|wte|lm_head|query_key_value|dense_h_to_4h)$"
)
_COLUMNS = re.compile(r"\.(?:(?:o|down|out)_proj|w2|attention\.dense|dense_4h_to_h)$")
_SUFFIX = re.compile(r"(?:\.weight|[._]bias)?$")
_JOINED = {r"\.[qkv]_proj(?=$|[._])": ".linear_qkv", r"\.(?:gate_proj|up_proj|w1|w3)(?=$|[._])": ".linear_fc1"}
"""Tensors that are one parameter in Megatron, and its name."""
_OUTPUT, _HEADS = "output_layer.weight", ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Param:
    """A parameter of the whole model. Of several tensors, each is cut by itself."""

    name: str
    specs: tuple[TensorSpec, ...]
    dim: int | None
    """Dim along which it is cut, behind the dim of a stack of experts; None where it is whole."""
    stacked: bool = False
    expert: int | None = None
    num_experts: int = 0

    def place(self, mesh: Mesh, rank: int) -> ParamPlacement | None:
        """Return what a rank holds of it; None of an expert of others."""
        at, name = mesh.coordinate(rank), self.name
        axis, index, parts = "tp", at.tp, mesh.tp
        copies: tuple[str, ...] = ("cp", "dp")
        if self.expert is not None:
            if self.num_experts % mesh.ep:
                raise UsageError(f"ep = {mesh.ep} does not divide the {self.num_experts} experts of `{name}`")
            owner, local = divmod(self.expert, self.num_experts // mesh.ep)
            if owner != at.ep:
                return None
            (axis, index, parts), copies = ("etp", at.etp, mesh.etp), ("edp",)
            name = re.sub(r"\d+$", str(local), name)
        if self.dim is None:
            index, parts, copies = 0, 1, (axis, *copies)
        dim, boxes = self.dim or 0, list[Box]()
        for spec in self.specs:
            size, rest = divmod(spec.shape[dim + self.stacked], parts)
            if rest:
                raise UsageError(f"{axis} = {parts} does not divide dim {dim + self.stacked} of `{spec.name}`")
            boxes.append(Box(spec.name, index * size, (index + 1) * size, self.expert if self.stacked else None))
        return ParamPlacement(
            param_name=name, global_name=self.name, is_buffer=self.specs[0].content is Content.SCORE_BIAS, dim=dim,
            boxes=tuple(boxes), source_shapes={spec.name: spec.shape for spec in self.specs},
            group=f"{self.name} {axis} {index}/{parts}", replicated_over=copies,
        )  # fmt: skip


@dataclass(frozen=True)
class NamedLayout:
    """Places by the names of a model's tensors, with the interface of `ModelLayout`."""

    specs: tuple[TensorSpec, ...]

    @cached_property
    def embedding(self) -> TensorSpec:
        """Table of the vocabulary; refused with a UsageError where no tensor has such a name."""
        for spec in self.specs:
            if _EMBEDDING.search(spec.name):
                return spec
        raise UsageError("no tensor of the model has the name of an embedding: a plan is made of models with one")

    @cached_property
    def tied(self) -> bool:
        """True if the output layer is the embedding."""
        return all(spec.name not in _HEADS for spec in self.specs)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names of `sizes_of`."""
        vocab, hidden = self.embedding.shape
        return {"vocab": vocab, "hidden": hidden, "layers": 1 + max(layer for layer in self._params if layer >= 0)}

    @cached_property
    def _params(self) -> dict[int, list[_Param]]:
        joined, found = defaultdict[str, list[TensorSpec]](list), defaultdict[int, list[_Param]](list)
        for spec in self.specs:
            name = spec.name
            for pattern, whole in _JOINED.items():
                name = re.sub(pattern, whole, name)
            joined[name].append(spec)
        experts = defaultdict[str, list[int]](list)
        for name in joined:
            if (match := _EXPERT.search(name)) and match[1]:
                experts[_EXPERT.sub("experts.", name)].append(int(match[1]))
        for name, specs in joined.items():
            layer, match, kind = _LAYER.search(name), _EXPERT.search(name), _EXPERT.sub("experts.", name)
            stacked = match is not None and not match[1] and len(specs[0].shape) > 1
            one = _Param(name=name, specs=tuple(specs), dim=self._cut(specs[0], stacked), stacked=stacked)
            number = int(match[1]) if match and match[1] else None
            count = specs[0].shape[0] if stacked else len(experts[kind])
            numbers = range(count) if stacked else [number]
            found[int(layer[1]) if layer else -1] += (
                one if index is None else replace(one, name=f"{kind}{index}", expert=index, num_experts=count)
                for index in numbers
            )  # fmt: skip
        return found

    def _cut(self, spec: TensorSpec, stacked: bool) -> int | None:
        """Return the dim along which a tensor is cut; of a stack of experts the one that is not the model's width."""
        stem, shape = _SUFFIX.sub("", spec.name), spec.shape[stacked:]
        is_rows, is_columns = _ROWS.search(stem) is not None, _COLUMNS.search(stem) is not None and len(shape) > 1
        if stacked and len(shape) > 1 and (is_rows or is_columns):
            return next((dim for dim, size in enumerate(shape) if size != self.embedding.shape[1]), 0)
        return 0 if is_rows else 1 if is_columns else None

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List what one model chunk of a rank holds; see `ModelLayout.placements`."""
        at = mesh.coordinate(rank)
        is_first, is_last = at.pp == chunk == 0, (at.pp, chunk) == (mesh.pp - 1, mesh.vpp - 1)
        params = [param for param in self._params[-1] if (is_first if _FIRST.search(param.name) else is_last)]
        for layer in mesh.layers_of(at.pp, chunk, self.sizes["layers"]):
            params += self._params[layer]
        found = [place for param in params if (place := param.place(mesh, rank)) is not None]
        if is_last and not is_first and self.tied:
            heads = (param.place(mesh, rank) for param in self._params[-1] if param.name == self.embedding.name)
            found += (replace(head, param_name=_OUTPUT, global_name=_OUTPUT) for head in heads if head is not None)
        return found

    def elements(self, layer: int, top_k: float) -> tuple[float, float]:
        """Elements that a layer keeps of each token: of norms both sides, of matrices the side that is cut.

        A norm of another width than the model's keeps one side, norms of heads keep queries and keys. Each of a token's
        experts also keeps what enters it, and one that is not gated its product with the router's weight. The second
        number is that of `layer_elements`.
        """
        found, passing, width = 0.0, 0.0, self.sizes["hidden"]
        names = [spec.name for param in self._params[layer] if not param.expert for spec in param.specs]
        gated, scans, normed = (
            any(re.search(part, name) for name in names) for part in (r"gate_(up_)?proj|\.w1\.", "A_log", r"\.k_norm")
        )
        for param in self._params[layer]:
            shapes, name = [spec.shape[param.stacked :] for spec in param.specs], param.specs[0].name
            if param.expert or (len(shapes[0]) == 1 and "norm" not in param.name):
                continue
            kept: float = sum(shape[param.dim or 0] for shape in shapes) * (1 + (shapes[0] == (width,)))
            is_output = _COLUMNS.search(_SUFFIX.sub("", name)) is not None
            if param.expert is not None:
                entering = shapes[0][1 - (param.dim or 0)]
                passing += top_k * (4 * kept * (not gated) if is_output else 2 * entering)
                kept = top_k * (kept * (1 + (not gated)) if is_output else kept + entering)
            elif is_output and scans:
                passing += 4 * kept
            elif normed:
                kept += sum(spec.shape[0] for spec in param.specs if re.search(r"\.[qk]_proj\.", spec.name))
            found += kept
        return found, passing
