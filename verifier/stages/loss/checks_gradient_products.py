"""Every update of a training run: weights that scale the same numbers have gradients that tell of one change."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from verifier.core.check import At, Comparison, Given, Stage, Tolerance, Trace, check, compare_set, compare_value
from verifier.core.condition import condition, on
from verifier.stages.checks_conditions import LAYOUT, NO_FSDP, UPDATED
from verifier.stages.logprob.checks_entropies import compare_entropies
from verifier.stages.logprob.checks_logprobs import RARE
from verifier.stages.loss.records import LogitSpreads
from verifier.stages.pack.checks_packing import UpdateRows, updates_of
from verifier.stages.train.checks_adam_audit import compare_used, is_summed
from verifier.stages.train.records import GradientProducts, TrainerStep

HALF_UNIT = 2.0**-24
"""Share that a rounding to float32 may change a number by."""
DEVIATIONS = 2 * RARE
"""Standard deviations that a sum of independent roundings may be off by: twice what chance exceeds once in 1e6."""
DEPTH = 1024
"""Products that a sum of a forward or backward pass adds before it is cut into blocks, besides those over tokens."""
OF_A_SHARE = 4
"""Times that a probability is rounded besides log Z: exponential, its sum, quotient and difference."""
IN_BF16 = 2.0**-8 / math.sqrt(3)
"""Standard deviation of a rounding to bfloat16, as a share of what is rounded."""
ROUNDINGS_IN_BF16 = 9
"""Times at most that a term is rounded to bfloat16 between two sides: attention has the output, its gradient, scores,
shares, gradients of both, and of values; the linears beside it one each."""
OF_A_WRITE = 2
"""Further roundings of the residual stream for each module that writes to it: of the stream, and of its gradient."""
OF_A_ROW = 4
"""Roundings of a row: of logits and of their gradient, each of the label's and, together no greater, of all others'."""
OF_EPSILON = 2
"""Times what epsilon takes from each token's part of a scale of the residual stream, by magnitude: half at most."""
NO_EPSILON = "the residual stream (the record does not tell what epsilon takes from each token)"
NO_SIZE = "the last norm against the rows of the loss (the record does not tell the size of logits)"
_FINAL_OF_FURTHER = re.compile(r"mtp\.layers\.\d+\.final_layernorm\.weight")
"""Norms before the head of layers for further tokens (MTP)."""
FINAL = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "decoder.final_norm.weight")
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
NORM, SCORES, GATED, VALUES, STREAM, ROWS = "norm", "queries", "gated rows", "values", "residual stream", "last norm"
ADAPTER = "adapter"
_HINTS = {
    NORM: "look at what sums the gradients of the norm and of the linears behind it over ranks, and at their scales",
    SCORES: "look at the backward pass of attention, for queries and for keys",
    GATED: "look at the backward pass of the activation, and at the gradients of the linears around it",
    VALUES: "look at the backward pass of attention for values, and at what gathers them over ranks",
    STREAM: "look at what scales the gradient on its way from one layer or pipeline stage to the one before",
    ROWS: "look at the backward pass from the loss of each token to the logits and the last norm",
    ADAPTER: "look at the backward pass of the adapter: its scale, and what sums gradients between its matrices over "
    "ranks",
}
LEAST_ENTROPY = 1e-6
"""Entropy in nats of a token whose gradient by the logits does not vanish by rounding."""
_A, _B = ".adapter.linear_in.weight", ".adapter.linear_out.weight"
_REACHED = re.compile(
    r"(^embedding\.word_embeddings|layers\.\d+\.(self_attention\.linear_(qkv|proj)|mlp\.(router|linear_fc[12])))"
    r"(\.adapter\.linear_(in|out))?\.weight$"
)
"""Names of tensors that every token in the loss gives a gradient."""
_OWN_NORM = "layer_norm_weight"
_MIXTURE_READS = re.compile(
    r"(router\.weight|experts\.linear_fc1\.weight\d+|shared_experts\.(linear_fc1\.weight|gate_weight))$"
)
"""Names below ``mlp.`` that multiply the output of the norm before a mixture."""
_MIXTURE_REST = re.compile(r"(linear_fc1\.(weight|bias)\d*#up|linear_fc1\.bias\d*|linear_fc2\.(weight|bias)\d*)$")
_ATTENTION_READS = ("linear_q_down_proj", "linear_q_proj", "linear_kv_down_proj", "linear_qkv")
_WRITES = re.compile(
    r"\.(self_attention\.linear_proj|mixer\.out_proj|mlp\.(experts\.|shared_experts\.)?linear_fc2)\.(weight|bias)\d*$"
)
"""Weights and biases whose products are added to the residual stream."""
_INSIDE = re.compile(
    r"\.(self_attention\.(linear_(qkv|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)"
    r"\.(weight|bias|layer_norm_(weight|bias))(#value)?|[qk]_layernorm\.weight)|(input|pre_mlp)_layernorm\.(weight|bias)"
    r"|mlp\.((experts\.|shared_experts\.)?linear_fc1\.(weight|bias|layer_norm_(weight|bias))\d*(#up)?|router\.weight"
    r"|shared_experts\.gate_weight)|mixer\.(in_proj\.(weight|layer_norm_weight)|conv1d_(weight|bias)|A_log|D|dt_bias"
    r"|norm\.weight))$"
)
"""Names that read the residual stream through a norm. With others in a layer the stream is not judged."""


class _Sum(NamedTuple):
    """Inner product of weights and gradients over the whole model, and the sum of the squares of what is added."""

    product: float
    squares: float


class _Rows(NamedTuple):
    """Change of an update's loss by a scale of its logits, as the rows of the loss say it."""

    sum: _Sum
    told: bool
    """The rows are recorded, and of their logits the size, and the spread too where their loss has an entropy."""
    rounding: float = 0.0
    """Change of the last norm's product by the rounding of the rows' probabilities, or in bfloat16 of their logits."""
    uncertain: bool = False
    """A token with a gradient has an entropy, so that the gradient by its logits is not 0."""


class _Pair(NamedTuple):
    """Names whose products, added up on either side, are equal."""

    kind: str
    left: tuple[str, ...]
    right: tuple[str, ...]


MULTIPLIED = condition(
    "Transformer Engine multiplies float32 in TF32 on a GPU",
    lambda run: run.tier == "cpu" or run.dtype != "float32", gap=True,
)  # fmt: skip


@check(
    "LSS007", needs=(GradientProducts, TrainerStep, LogitSpreads),
    applies=on(step=UPDATED & NO_FSDP & LAYOUT & MULTIPLIED),
)  # fmt: skip
def gradients_disagree_on_scale(trace: Trace) -> Iterator[Comparison]:
    """Weights that scale the same numbers have gradients that tell of one change, down from the rows of the loss.

    What it checks: per update, inner products of weights and their gradients, over all ranks. Such a product is what
    scaling the weight changes the loss by. It is the same for a norm and all linears that read it; the norms of
    queries and of keys; rows that a gated activation is linear in and the linear behind it; values and the projection
    of attention; both matrices of an adapter. Embeddings and all that is added to the residual stream have a sum of 0,
    since norms read it: with a tied head, that of the head. That of the last norm, which scales all logits, is the sum
    over the rows of the loss of the gradient of each log-probability times the log-probability and the entropy, less
    that of each entropy times the variance of the row's log-probabilities, by a second formula of its logits. And that
    no tensor that all tokens reach, an adapter's too, has a gradient of 0 where rows of the loss have one; the
    first matrix of an adapter once its second is not 0.
    Why it matters: a gradient of another size behind the loss, summed over ranks that have it whole, scaled at each
    pipeline stage, or of one token for all, comes with right values and a loss that falls. Gradients are compared with
    an oracle's on sampled steps alone, and large models have none.
    Where gradients are summed wrongly (TRN006), or passes use other weights than those that were stepped (TRN005),
    the loss is not the stage that is named. Entropies of another distribution (LGP012) say nothing of the last norm.
    Evidence: train/products, train/sums, loss/rows, loss/spreads, train/done.
    Tolerance and its source: in fp32 9.8 standard deviations of a sum of independent roundings: half of it chance
    exceeds once in 1e6 comparisons, all of it with four times the variance (docs/adr/0109). A term of a sum of D
    terms is rounded by 2^-24 times the root of D/2 of the root of the sum of squares, with the update's tokens and
    1,024 as D. Of the last norm also what rounds the probabilities of each row, by the size of its logits: log Z,
    whose roundings are independent between rows of other values, and four roundings that may go one way in all rows
    (docs/adr/0081). In bf16 9.8 standard deviations of nine roundings to it, 2^-8 over the root of 3 each, of that
    root, and of the residual stream two more for each module that writes to it; of the last norm also those of
    logits and their gradients, by their size. Of queries and keys the root has their rows of the linear before too.
    Norms have an epsilon, which nothing scales: of the residual stream also twice what it takes from each token at each
    norm, by magnitude, a share of epsilon over the mean square of the token's state (docs/adr/0111). It is never more
    than half.
    What it does not catch: a gradient that is changed within a layer alike for all weights that it reaches (LSS001),
    as of both matrices of an adapter; experts that are cut from a router with a loss of its own; the last norm where
    logits are bent to a bound; the residual stream of layers with further norms, and on a GPU, where fused norms do not
    show what epsilon takes; float32 on a GPU.
    References: torchtitan#3827, DeepSpeed#8154, Liger-Kernel#1298, Megatron-LM#1464, mcore-bridge#173,
    Megatron-Bridge#1750, Megatron-Bridge#5634, peft#2826.
    """
    found = [*_by_scale(trace)]
    sizes = trace.manifest.dtype != "float32" or all("size" in update.rows for update in updates_of(trace))
    told = all(item.damped is not None for item in trace.of(GradientProducts))
    if left := tuple(what for what, known in ((NO_SIZE, sizes), (NO_EPSILON, told)) if not known):
        found = [replace(item, left_out=left) for item in found]
    if all(item.same for item in found) or (is_summed(trace) and all(item.same for item in compare_used(trace))):
        yield from found
    else:
        yield from (replace(item, stage=Stage.TRAIN) for item in found)


def _by_scale(trace: Trace) -> Iterator[Comparison]:
    updates = {(update.columns.version, update.columns.name): update for update in updates_of(trace)}
    tokens = {(item.version, item.name): item.num_tokens for item in trace.of(TrainerStep)}
    for (version, name), ranks in _by_update(trace).items():
        if len(ranks) < trace.manifest.world_size:
            continue
        update, num_tokens = updates.get((version, name)), tokens.get((version, name), 0)
        rows = _of_rows(update, num_tokens, sized=trace.manifest.dtype == "float32")
        sums, depth = _summed(ranks), DEPTH + (num_tokens if update is None else sum(update.columns.lengths))
        damped = [float(item.damped) for item in ranks if item.damped is not None]
        for pair in _pairs(sums):
            if pair.kind == STREAM and len(damped) < len(ranks):
                continue
            sides = [_joined([sums[each] for each in side]) for side in (pair.left, pair.right)]
            more = OF_EPSILON * sum(damped) / max(num_tokens, 1) if pair.kind == STREAM else 0.0
            allowed = _allowed(trace, [*sides, _before(pair, sums)], depth, more, pair)
            yield _compared(name, version, pair, sides, allowed)
        if rows.uncertain:
            yield _reached(ranks, sums, name, version)
        final = _there(sums, *FINAL)
        if final and rows.told and not any(item.bent for item in ranks):
            sides = [_joined([sums[each] for each in final]), rows.sum]
            of_rows = _Pair(ROWS, final, ())
            allowed = _allowed(trace, sides, depth, rows.rounding, of_rows)
            compared = _compared(name, version, of_rows, sides, allowed)
            if compared.same or all(item.same for item in compare_entropies(trace, updates[version, name])):
                yield compared


def _by_update(trace: Trace) -> Mapping[tuple[int, str], list[GradientProducts]]:
    found: dict[tuple[int, str], list[GradientProducts]] = defaultdict(list)
    for item in trace.of(GradientProducts):
        found[item.version, item.name].append(item)
    return found


def _summed(ranks: Sequence[GradientProducts]) -> Mapping[str, _Sum]:
    parts: dict[str, list[_Sum]] = defaultdict(list)
    for item in ranks:
        for each in item.products:
            parts[each.name].append(_Sum(float(each.product), float(each.squares)))
    return {name: _joined(own) for name, own in parts.items()}


def _joined(parts: Sequence[_Sum]) -> _Sum:
    return _Sum(sum(part.product for part in parts), sum(part.squares for part in parts))


def _of_rows(update: UpdateRows | None, num_tokens: int, *, sized: bool) -> _Rows:
    """Change of an update's loss by a scale of all logits, from its rows: of each, c (log p + H) - e V.

    By c and e the loss changes with the log-probability and with the entropy H; V is the variance of log-probabilities.
    `sized` rows are told only with the size of their logits.
    """
    if update is None or not num_tokens:
        return _Rows(_Sum(0.0, 0.0), told=False)
    rows = {key: values.astype(np.float64) for key, values in update.rows.items()}
    spread = rows.get("spread", np.zeros(len(rows["gradient"])))
    terms = rows["gradient"] * (rows["current"] + rows["entropy"]) / num_tokens
    others = -rows["entropy_gradient"] * spread / num_tokens
    found = _Sum(float(terms.sum() + others.sum()), float(np.square([terms, others]).sum()))
    uncertain = bool((rows["entropy"][rows["gradient"] != 0] > LEAST_ENTROPY).any())
    told = ("spread" in rows or not rows["entropy_gradient"].any()) and ("size" in rows or not sized)
    rounding = 0.0
    if told and sized:
        rounding = _rounding_of(rows, spread) / num_tokens
    elif told and "size" in rows:
        rounding = _rounding_in_bf16(rows, spread) / num_tokens
    return _Rows(found, told=told, rounding=rounding, uncertain=uncertain)


def _rounding_of(rows: Mapping[str, np.ndarray], spread: np.ndarray) -> float:
    """Change of the rows' sum by float32's rounding of their probabilities, each of which is off by a share of itself.

    The gradient of a row by its logits adds up to 0 before it is rounded, so a share of each probability comes with the
    size of the logits. log Z is at most their size and the entropy. Rows of one log-probability may be copies of
    another, and those that are sure beyond the rounding of log Z round to one side: these add up as they are.
    """
    entropy, size = np.maximum(rows["entropy"], 0.0), 1 + rows["size"]
    slope = np.abs(rows["gradient"]) + np.abs(rows["entropy_gradient"]) * (1 + np.sqrt(spread))
    normalizer = OF_A_SHARE + rows["size"] + entropy
    sure = entropy - rows["current"] < OF_A_SHARE * HALF_UNIT * normalizer
    _, alike = np.unique(np.where(sure, 0.0, rows["current"]), return_inverse=True)
    apart = np.bincount(alike, slope * normalizer * size)
    together = OF_A_SHARE * (slope * size).sum()
    return HALF_UNIT * float(DEVIATIONS * np.linalg.norm(apart) + together)


def _rounding_in_bf16(rows: Mapping[str, np.ndarray], spread: np.ndarray) -> float:
    """Change of the rows' sum by bfloat16's rounding of logits, and of their gradients, each independent of the others.

    A row's gradient by its logits is c (1 - p) for the label and as much, or less, for all others together.
    """
    slope = np.abs(rows["gradient"]) * -np.expm1(np.minimum(rows["current"], 0.0))
    slope += np.abs(rows["entropy_gradient"]) * (1 + np.sqrt(spread))
    return DEVIATIONS * IN_BF16 * math.sqrt(OF_A_ROW) * float(np.linalg.norm(slope * (1 + rows["size"])))


def _pairs(names: Collection[str]) -> Iterator[_Pair]:
    """Both sides of all that is equal among the products of these names."""
    for name in names:
        base, _, leaf = name.rpartition(".")
        if leaf == _OWN_NORM and f"{base}.weight" in names:
            yield _Pair(NORM, _there(names, name, f"{base}.layer_norm_bias"), (f"{base}.weight",))
        elif name.endswith(".pre_mlp_layernorm.weight"):
            inside = name.removesuffix("pre_mlp_layernorm.weight") + "mlp."
            own = [other for other in names if other.startswith(inside)]
            reads = tuple(other for other in own if _MIXTURE_READS.search(other))
            if reads and all(other in reads or _MIXTURE_REST.search(other) for other in own):
                yield _Pair(NORM, _there(names, name, f"{base}.bias"), reads)
        elif name.endswith(".input_layernorm.weight"):
            inside = name.removesuffix("input_layernorm.weight") + "self_attention."
            if reads := _there(names, *(f"{inside}{linear}.weight" for linear in _ATTENTION_READS)):
                yield _Pair(NORM, _there(names, name, f"{base}.bias"), reads)
        elif name.endswith(".q_layernorm.weight"):
            if keys := _there(names, name.removesuffix("q_layernorm.weight") + "k_layernorm.weight"):
                yield _Pair(SCORES, (name,), keys)
        elif up := re.fullmatch(r"(.*)linear_fc1\.weight(\d*)#up", name):
            if down := _there(names, f"{up[1]}linear_fc2.weight{up[2]}"):
                yield _Pair(GATED, _there(names, name, f"{up[1]}linear_fc1.bias{up[2]}#up"), down)
        elif name.endswith("linear_qkv.weight#value"):
            inside = name.removesuffix("linear_qkv.weight#value")
            if projection := _there(names, f"{inside}linear_proj.weight"):
                yield _Pair(VALUES, _there(names, name, f"{inside}linear_qkv.bias#value"), projection)
        elif name.endswith(_A) and (outward := _there(names, name.removesuffix(_A) + _B)):
            yield _Pair(ADAPTER, (name,), outward)
    yield from _whole(names)


def _whole(names: Collection[str]) -> Iterator[_Pair]:
    """The same of what all layers share: the last norm and an untied head, and the residual stream."""
    final = _there(names, *FINAL)
    final += tuple(name for name in names if final and _FINAL_OF_FURTHER.fullmatch(name))
    if final and HEAD in names:
        yield _Pair(NORM, final, (HEAD,))
    layers = [name for name in names if name.startswith("decoder.layers.")]
    writes = [name for name in layers if _WRITES.search(name)]
    if final and EMBEDDING in names and all(name in writes or _INSIDE.search(name) for name in layers):
        yield _Pair(STREAM, (EMBEDDING, *writes), () if HEAD in names else final)


def _there(names: Collection[str], *wanted: str) -> tuple[str, ...]:
    return tuple(name for name in wanted if name in names)


def _reached(ranks: Sequence[GradientProducts], sums: Mapping[str, _Sum], name: str, version: int) -> Comparison:
    """Compare the gradients of tensors that every token reaches with 0."""
    heard = {each.name for item in ranks for each in item.products if each.name not in item.silent}
    lost = []
    for each in sums:
        after = sums.get(each.removesuffix(_A) + _B) if each.endswith(_A) else None
        if _REACHED.search(each) and each not in heard and (after is None or after.squares):
            lost.append(each)
    subject = f"tensors without a gradient in {name}, whose rows of the loss have one"
    hint = "look at what detaches a module's input or output, and at recomputation behind frozen weights"
    at, what = At(Stage.LOSS, version), f"tensors without a gradient in {name}"
    return compare_set(at, what, lost, total=len(sums), subject=subject, hint=hint)


def _before(pair: _Pair, sums: Mapping[str, _Sum]) -> _Sum:
    """Squares of queries' and keys' rows: their norms have few elements for all tokens and heads, whose parts cancel.

    What rounds these parts is left.
    """
    if pair.kind != SCORES:
        return _Sum(0.0, 0.0)
    rows = pair.left[0].removesuffix("q_layernorm.weight") + "linear_qkv.weight"
    whole, values = (sums.get(name, _Sum(0.0, 0.0)).squares for name in (rows, f"{rows}#value"))
    return _Sum(0.0, max(whole - values, 0.0))


def _allowed(trace: Trace, parts: Sequence[_Sum], depth: int, more: float, pair: _Pair) -> Tolerance:
    """Difference of two sides by rounding of these parts, with `more` that only they have."""
    root, unit = math.sqrt(sum(part.squares for part in parts)), "times the factor's change"
    dtype, each = "fp32", HALF_UNIT * math.sqrt(depth / 2)
    if trace.manifest.dtype == "bfloat16":
        writers = {name.split(".linear_")[0].split(".experts")[0] for name in pair.left if _WRITES.search(name)}
        further = OF_A_WRITE * len(writers) if pair.kind == STREAM else 0
        dtype, each = "bf16", IN_BF16 * math.sqrt(ROUNDINGS_IN_BF16 + further)
    source = f"{dtype}: {DEVIATIONS} standard deviations of a sum of roundings"
    return Tolerance(absolute=DEVIATIONS * each * root + more, unit=unit, source=source)


def _compared(name: str, version: int, pair: _Pair, sides: Sequence[_Sum], bound: Tolerance) -> Comparison:
    left, right = (side.product for side in sides)
    first, by = pair.left[0], _other_side(pair)
    also = f" and {len(pair.left) - 1} more" if len(pair.left) > 1 else ""
    sentence = f"in {name} scaling `{first}`{also} changes the loss by {left:.6g} times the factor's change, "
    sentence += f"by {by} it is {right:.6g}"
    at, what = At(Stage.LOSS, version), f"{pair.kind}: {first} in {name}"
    texts: Given = {"says": ("weight times gradient, over all ranks", by), "hint": _HINTS[pair.kind]}
    return compare_value(at, what, left, right, sentence=sentence, allowed=bound, **texts)


def _other_side(pair: _Pair) -> str:
    if pair.kind == ROWS:
        return "the rows of the loss"
    if not pair.right:
        return "the norms that read it"
    more = f" and {len(pair.right) - 1} more" if len(pair.right) > 1 else ""
    return f"the gradient of `{pair.right[0]}`{more}"
