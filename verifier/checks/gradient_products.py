"""Every update of a training run: gradients of tensors that scale each other agree on what scaling them would do."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verifier.checks.content import times
from verifier.checks.loss_rows import updates_of
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.records_gradients import GradientProducts
from verifier.core.records_policy import LossRows
from verifier.core.records_trainer import LossColumns, TrainerStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace

BOUNDS = {
    "float32": Tolerance(absolute=1e-5, unit="of the root of the squares", source="x"),
    "bfloat16": Tolerance(absolute=0.05, unit="of the root of the squares", source="x"),
}
RESIDUAL = Tolerance(absolute=1e-3, unit="of the root of the squares", source="x")
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
_READ, _SCORES, _GATED, _VALUES, _RESIDUAL, _ROWS = "norm", "queries", "gated rows", "values", "residual stream", "last norm"
_HINTS = dict.fromkeys((_READ, _SCORES, _GATED, _VALUES, _RESIDUAL, _ROWS), "x")
FINAL = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
_MIXTURE_READS = re.compile(
    r"(router\.weight|experts\.linear_fc1\.weight\d+|shared_experts\.(linear_fc1\.weight|gate_weight))$"
)
"""Weights of a mixture that are multiplied with the output of the norm before it, below ``mlp.``."""
_MIXTURE_KNOWN = re.compile(r"(linear_fc1\.(weight|bias)\d*#up|linear_fc1\.bias\d*|linear_fc2\.(weight|bias)\d*)$")
_ATTENTION_READS = ("linear_q_down_proj.weight", "linear_q_proj.weight", "linear_kv_down_proj.weight", "linear_qkv.weight")


_WRITES = re.compile(
    r"(self_attention\.linear_proj|mixer\.out_proj|mlp\.(experts\.|shared_experts\.)?linear_fc2)\.(weight|bias)\d*$"
)
_INSIDE = re.compile(
    r"(self_attention\.(linear_(qkv|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)\.(weight|bias|layer_norm_weight)(#value)?"
    r"|[qk]_layernorm\.weight)"
    r"|(input|pre_mlp)_layernorm\.weight"
    r"|mlp\.((experts\.|shared_experts\.)?linear_fc1\.(weight|bias|layer_norm_weight)\d*(#up)?|router\.weight|shared_experts\.gate_weight)"
    r"|mixer\.(in_proj\.(weight|layer_norm_weight)|conv1d_(weight|bias)|conv1d\.(weight|bias)|A_log|D|dt_bias|norm\.weight))$"
)
EMBEDDING = "embedding.word_embeddings.weight"


class _Sum(NamedTuple):
    """Inner product over the whole model, and the sum of the squares of what was added."""

    product: float
    squares: float


class _Rows(NamedTuple):
    """What the rows of an update's loss say of scaling its logits."""

    sum: _Sum
    told: bool
    """The gradient of the logits is that of their log-probabilities alone, and the rows are recorded."""


class _Pair(NamedTuple):
    """Two sides that are equal: names whose products are added."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    why: str


def _pairs(names: Mapping[str, object]) -> Iterator[_Pair]:
    """Sides that scaling one up and the other down leaves the loss alone, or that one scaling reaches through both."""
    for name in names:
        base, _, leaf = name.rpartition(".")
        if leaf == "layer_norm_weight" and f"{base}.weight" in names:
            yield _Pair(_there(names, name, f"{base}.layer_norm_bias"), (f"{base}.weight",), _READ)
        elif name.endswith(".pre_mlp_layernorm.weight"):
            inside = name.removesuffix("pre_mlp_layernorm.weight") + "mlp."
            own = [other for other in names if other.startswith(inside)]
            reads = tuple(other for other in own if _MIXTURE_READS.search(other))
            if reads and all(other in reads or _MIXTURE_KNOWN.search(other) for other in own):
                yield _Pair((name,), reads, _READ)
        elif name.endswith(".input_layernorm.weight"):
            inside = name.removesuffix("input_layernorm.weight") + "self_attention."
            if reads := _there(names, *(inside + leaf for leaf in _ATTENTION_READS)):
                yield _Pair((name,), reads, _READ)
        elif name.endswith(".q_layernorm.weight") and f"{base.removesuffix('q_layernorm')}k_layernorm.weight" in names:
            yield _Pair((name,), (f"{base.removesuffix('q_layernorm')}k_layernorm.weight",), _SCORES)
        elif (up := re.fullmatch(r"(.*)linear_fc1\.weight(\d*)#up", name)) and f"{up[1]}linear_fc2.weight{up[2]}" in names:
            yield _Pair(
                _there(names, name, f"{up[1]}linear_fc1.bias{up[2]}#up"), (f"{up[1]}linear_fc2.weight{up[2]}",), _GATED
            )
        elif name.endswith("linear_qkv.weight#value"):
            inside = name.removesuffix("linear_qkv.weight#value")
            if f"{inside}linear_proj.weight" in names:
                yield _Pair(_there(names, name, f"{inside}linear_qkv.bias#value"), (f"{inside}linear_proj.weight",), _VALUES)
    if final := _there(names, *FINAL):
        if "output_layer.weight" in names:
            yield _Pair(final, ("output_layer.weight",), _READ)
        layers = [name for name in names if name.startswith("decoder.layers.")]
        writes = [name for name in layers if _WRITES.search(name)]
        if EMBEDDING in names and all(_WRITES.search(name) or _INSIDE.search(name) for name in layers):
            yield _Pair((EMBEDDING, *writes), () if "output_layer.weight" in names else final, _RESIDUAL)


def _there(names: Mapping[str, object], *wanted: str) -> tuple[str, ...]:
    return tuple(name for name in wanted if name in names)


@check("LSS007", needs=(GradientProducts, TrainerStep), scope="products")
def gradient_breaks_scaling(trace: Trace) -> Iterator[Comparison]:
    """PAGE."""
    for (version, name), ranks in _by_update(trace).items():
        if len(ranks) < trace.manifest.world_size:
            continue
        sums, rows = _summed(ranks), _of_rows(trace, name, version)
        for pair in _pairs(sums):
            sides = [_joined([sums[each] for each in side]) for side in (pair.left, pair.right)]
            yield _compared(trace, name, version, pair, sides, rows)
        if (final := _there(sums, *FINAL)) and rows.told and not any(item.bent for item in ranks):
            yield _compared(trace, name, version, _Pair(final, (), _ROWS), [_joined([sums[final[0]]]), rows.sum], rows)


def _by_update(trace: Trace) -> Mapping[tuple[int, str], list[GradientProducts]]:
    found: dict[tuple[int, str], list[GradientProducts]] = defaultdict(list)
    for item in trace.of(GradientProducts):
        found[item.version, item.name].append(item)
    return found


def _summed(ranks: Sequence[GradientProducts]) -> Mapping[str, _Sum]:
    """Sums over ranks, by name."""
    parts: dict[str, list[_Sum]] = defaultdict(list)
    for item in ranks:
        for each in item.products:
            parts[each.name].append(_Sum(float(each.product), float(each.squares)))
    return {name: _joined(own) for name, own in parts.items()}


def _joined(parts: Sequence[_Sum]) -> _Sum:
    return _Sum(math.fsum(part.product for part in parts), math.fsum(part.squares for part in parts))


def _of_rows(trace: Trace, name: str, version: int) -> _Rows:
    """What scaling all logits does to the loss of an update, by the rows of its loss."""
    steps = [item for item in trace.of(TrainerStep, version=version) if item.name == name]
    for update in updates_of(trace) if steps else ():
        if (update.columns.name, update.columns.version) != (name, version):
            continue
        rows = {key: values.astype(np.float64) for key, values in update.rows.items()}
        terms = rows["gradient"] * (rows["current"] + rows["entropy"]) / max(steps[0].num_tokens, 1)
        found = _Sum(float(terms.sum()), float(np.square(terms).sum()))
        return _Rows(found, told=not rows["entropy_gradient"].any())
    return _Rows(_Sum(0.0, 0.0), told=False)


def _compared(
    trace: Trace, name: str, version: int, pair: _Pair, sides: Sequence[_Sum], rows: _Rows
) -> Comparison:
    left, right = sides
    bound = BOUNDS[trace.manifest.dtype]
    share = max(bound.absolute, RESIDUAL.absolute) if pair.why == _RESIDUAL else bound.absolute
    gap = abs(left.product - right.product)
    allowed = share * math.sqrt(left.squares + right.squares) + ROUNDING[trace.manifest.dtype] * math.sqrt(rows.sum.squares)
    first = pair.left[0]
    return Comparison(
        what=f"{pair.why} of {first} in {name}", same=gap <= allowed, stage=Stage.LOSS, version=version,
        badness=times(gap, allowed),
        sentence=f"in {name} scaling `{first}` changes the loss by {left.product:.6g}, by {_other(pair)} it is "
        f"{right.product:.6g}",
        expected=f"{right.product:.6g} ({_other(pair)})", actual=f"{left.product:.6g} ({pair.why})",
        allowed=f"{allowed:.3g}, {bound}", hint=_HINTS[pair.why],
    )  # fmt: skip


def _other(pair: _Pair) -> str:
    if pair.why == _ROWS:
        return "the rows of the loss"
    if not pair.right:
        return "what a norm undoes"
    more = f" and {len(pair.right) - 1} more" if len(pair.right) > 1 else ""
    return f"the gradient of `{pair.right[0]}`{more}"
