"""Contradictions of a plan: sizes that do not divide, with what would; ranks that would not send the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from verifier.mesh import Mesh
from verifier.model.families import JSON, size_if_any
from verifier.model.mesh_fit import misfits
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.export_stream import RanksPlan
from verifier.plan.held_shards import listed


def contradictions(config: Mapping[str, JSON], mesh: Mesh) -> Iterator[str]:
    """Yield a sentence on each size of a mesh that does not divide the model, and what would.

    Raises:
        UsageError: a size in config.json that is no positive integer.
    """
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
        fits = [tp for tp in range(1, mesh.tp) if not _about_tp(config, tp)]
        yield f"the greatest tp below {mesh.tp} that divides this model is {fits[-1]}"


def _about_tp(config: Mapping[str, JSON], tp: int) -> bool:
    """True if this tp, alone, does not divide the model."""
    return any(sentence.startswith("tp ") for sentence in misfits(config, Mesh(tp=tp)))


def _stages(num_layers: int, mesh: Mesh) -> str:
    """Return the flag of an uneven last stage that leaves the others equal, of several the one nearest to them."""
    stages = mesh.pp - 1
    if mesh.vpp > 1 or not stages:
        return ""
    fits = [size for size in range(1, num_layers) if (num_layers - size) % stages == 0]
    best = min(fits, key=lambda size: abs((num_layers - size) // stages - size), default=None)
    return "" if best is None else f"--last-stage-layers {best}"


def plan_errors(plans: Sequence[RanksPlan], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a sentence on each set of ranks that has no plan, or another one; and on tensors that are not sent.

    Args:
        plans: of all ranks, equal ones once, that of most ranks first.
        shapes: name -> shape of every tensor of the checkpoint.
    """
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
    """Clause on the first place at which two plans differ."""
    ours, theirs = list(first.tensors), list(other.tensors)
    for place, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if one != two:
            return f"tensor {place:,} is `{two.name}` where the others have `{one.name}`"
    return f"it has {len(theirs):,} tensors where the others have {len(ours):,}"


def _said(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks, most=3)}"


def ranges(numbers: Sequence[int], most: int | None = None) -> str:
    """Return sorted numbers as ranges, such as "0-3, 8"; at most so many of them."""
    runs = [[value for _, value in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    said = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(said[:most]) + (", ..." if most is not None and len(said) > most else "")
