"""Arguments of a forward pass, scales of adapters, and weights of the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec import structs

from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.manifest import MeshSizes
from verifier.mesh import Coordinate, Mesh
from verifier.stages.checks_conditions import ADAPTER, GRPO, REFERENCE, UPDATED
from verifier.stages.logprob.records import AdapterScales, GivenArguments, ProviderFields, ReferenceShard
from verifier.stages.pack.records import PackLayout

ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-7}
"""Twice the greatest relative error of two roundings, of the scale and of the product, by type."""


@check("LGP016", needs=(AdapterScales,), applies=on(step=UPDATED & ADAPTER))
def adapter_scaled_otherwise(trace: Trace) -> Iterator[Comparison]:
    """Each adapter multiplies all of its input by its matrices and by alpha over rank, as whoever merges it does.

    What it checks: per rank, update and adapter, in the first pass of the update: each element of the adapter's output
    against that of its second matrix, times alpha over rank of the config. Of an adapter that has not moved, whose
    second matrix is 0, both are 0. What its first matrix is given, against what the adapter is.
    Why it matters: an adapter that is scaled by alpha alone, or by the root of its rank, trains well, and is another
    one once it is merged or served: of fine-tuning in bf16 nothing else compares the two. Dropout of its input, which
    no config asks for, trains against noise.
    Evidence: logprob/adapter-scales.
    Tolerance and its source: four roundings of the output's type, of the greatest element; an input is the same tensor.
    Where to look: what the forward pass multiplies an adapter's output by, and what stands before its first matrix:
    dropout, a cast, a norm.
    What it does not catch: matrices that are applied in another order, or adapters that are given the input of another
    linear (LGP001, LSS001); adapters of experts.
    References: mlx-vlm#841, TensorRT-LLM#1668, verl#4708.
    """
    for item in trace.of(AdapterScales):
        for adapter in item.adapters:
            gap, bound = float(adapter.gap), ROUNDING[adapter.dtype] * float(adapter.greatest)
            what = f"{adapter.name} in {item.name} on rank {item.rank}"
            subject = f"the scale of `{adapter.name}` in {item.name}"
            scale, asked, says = float(adapter.scale), float(item.asked), ("", "alpha over rank of the config")
            words = f"{bound:.3g} of an element (four roundings of {adapter.dtype})"
            yield compare_value(
                item, what, scale, asked, subject=subject, says=says, allowed=words, bound=bound, gap=gap
            )
            subject = f"the gap of what the first matrix of `{adapter.name}` and the adapter are given in {item.name}"
            yield compare_value(item, f"input of {what}", float(adapter.altered), 0.0, subject=subject)


@check(
    "LGP008",
    needs=(GivenArguments, PackLayout),
    applies=on(roundtrip=ALWAYS, step=UPDATED, loop=recorded(GivenArguments, PackLayout)),
)
def packed_arguments_disagree(trace: Trace) -> Iterator[Comparison]:
    """Arguments of a forward pass over a packed micro-batch agree with the pack, and with each other.

    What it checks: on every rank, for each model chunk and micro-batch of passes that score all sequences or train:
    cumulative lengths of queries and keys, real and padded, against those of the pack; the greatest length, the number
    of all rows and the flag for padding between sequences against what follows from them; the rows of the tokens.
    Why it matters: most of these arguments are redundant. The CPU tier's kernels read some, those of a GPU others, so a
    wrong one is right on one of them. With context parallelism padding after the last sequence lies between its parts:
    each of the 2 cp parts is attended to by itself, and Transformer Engine takes them for equally long if it is told of
    no padding.
    Evidence: logprob/arguments, pack/layout.
    Tolerance and its source: exact; integers that follow from each other.
    Where to look: what makes the arguments of the forward pass.
    What it does not catch: cumulative lengths that are wrong in the pack too (PCK002), arguments that change inside of
    the model (LGP001), those that the installed Megatron does not take (`pad_between_seqs` before 0.19).
    References: RL#4070, TransformerEngine#3331, Megatron-Bridge#4400, SkyRL#2056.
    """
    mesh = Mesh(**structs.asdict(trace.manifest.mesh or MeshSizes()))
    known = trace.has(ProviderFields)
    hybrid = any(item.values.get("is_hybrid_model") == "true" for item in trace.of(ProviderFields))
    layouts = {}
    for pack in trace.of(PackLayout):  # of ranks of the first tensor and pipeline coordinate
        at = mesh.coordinate(pack.rank)
        layouts[at.dp, at.cp, pack.name, pack.version] = pack
    for item in trace.of(GivenArguments):
        at = mesh.coordinate(item.rank)
        layout = layouts.get((at.dp, at.cp, item.name, item.version))
        if layout is None:
            yield _told(item, at, "pack", "recorded", "absent", absent=True)
            continue
        ends, padded = layout.cu_seqlens, layout.cu_seqlens_padded
        longest = max(end - begin for begin, end in pairwise(padded))
        last = None if mesh.cp > 1 else -1
        for key, want in (
            ("cu_seqlens_q", ends), ("cu_seqlens_kv", ends), ("cu_seqlens_q_padded", padded),
            ("cu_seqlens_kv_padded", padded), ("max_seqlen_q", longest), ("max_seqlen_kv", longest),
            ("total_tokens", padded[-1] if hybrid else None), ("pad_between_seqs", int(ends[:last] != padded[:last])),
            ("num_rows", padded[-1] // mesh.cp),
        ):  # fmt: skip
            if key not in item.lacks and (known or key != "total_tokens"):
                yield _told(item, at, key, want, getattr(item, key))


def _told(
    item: GivenArguments, at: Coordinate, key: str, want: object, got: object, *, absent: bool = False
) -> Comparison:
    want, got = (list(value) if isinstance(value, tuple) else value for value in (want, got))
    says, subject = (f"argument of chunk {item.chunk}", "the pack"), f"`{key}` of the forward pass over {item.name}"
    owner, what = f"trainer rank {item.rank} ({at})", f"{item.name} {key}"
    return compare_value(item, what, got, want, subject=subject, says=says, owner=owner, absent=absent)


@check("LGP010", needs=(ReferenceShard,), applies=on(step=GRPO & UPDATED & REFERENCE, loop=recorded(ReferenceShard)))
def reference_moved(trace: Trace) -> Iterator[Comparison]:
    """The reference is scored with the weights that the run began with, in every step.

    What it checks: per rank and tensor, the content that the model held in each pass as the reference, against that of
    the reference when the run was loaded; and that, once, against the live weights that the run began with.
    Why it matters: a reference that is the live model has a KL of 0, one that follows the policy has no anchor, one of
    other weights pulls the policy to them, and the reported KL looks healthy in all.
    Evidence: logprob/reference.
    Tolerance and its source: bitwise; the reference is a copy.
    Where to look: what else writes the reference, and which model scores.
    What it does not catch: a reference that a resume takes from other weights (CKP001); what the first load brings
    (WGT001).
    References: slime#914, RL#3722, trl#6688, trl#1340.
    """
    for item in trace.of(ReferenceShard):
        pairs = [("what it was when it was loaded", "while the reference was scored", item.digest, item.frozen)]
        if item.begun is not None:
            pairs.append(("what the run began with", "when the reference was made", item.frozen, item.begun))
        for wanted, when, found, right in pairs:
            what, sentence = f"{item.name} on rank {item.rank}", f"`{item.name}` of the reference is not {wanted}"
            says = when, wanted.removeprefix("what it was ")
            yield compare_value(item, what, found, right, sentence=sentence, says=says)
