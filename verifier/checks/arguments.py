"""Arguments of forward passes over packed micro-batches, against the packs and each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec import structs

from verifier.checks.conditions import UPDATED
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.manifest import MeshSizes
from verifier.core.records_config import GivenArguments, ProviderFields
from verifier.core.records_tokens import PackLayout
from verifier.mesh import Coordinate, Mesh


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
