"""Kinds of tensors and sequences among a check's mismatches, so that many names read as one thing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_KINDS = (
    (r"lora_[ab]|adapter", "adapter matrices"),
    (r"\bbias$|_bias$", "biases"),
    (r"(norm|layernorm)\w*\.weight$|\bnorm\.weight$", "norm weights"),
    (r"embed_tokens|word_embeddings|\bembeddings?\b", "embeddings"),
    (r"lm_head|output_layer", "output heads"),
    (r"shared_expert", "shared-expert weights"),
    (r"experts\b", "expert weights"),
    (r"router|\bgate\.weight$", "router weights"),
    (r"conv1d|A_log|dt_|mixer|ssm", "state-space weights"),
    (r"attn|attention|[qkvo]_proj|linear_qkv", "attention weights"),
    (r"mlp|gate_proj|up_proj|down_proj|linear_fc", "MLP weights"),
    (r"\bsequence \d+$", "sequences"),
)
"""Pattern in a name -> its kind, the first that fits."""
_SEQUENCE = re.compile(r"^(?P<kind>\S.*) sequence \d+$")


def kind_of_name(name: str) -> str:
    """Kind of a tensor or sequence by its name, a plural; the name with its numbers left out where it has no kind."""
    if found := _SEQUENCE.match(name):
        return f"{found['kind']} sequences"
    for pattern, kind in _KINDS:
        if re.search(pattern, name):
            return kind
    return f"`{re.sub(r'[0-9]+', '*', name)}`"


def grouped(names: Iterable[str]) -> str:
    """Say how many mismatches are of which kind, the largest first: "34 of 34 are norm weights"."""
    kinds = Counter(map(kind_of_name, names))
    total = kinds.total()
    (first, count), *others = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    text = f"{count:,} of {total:,} are {first}"
    named = [f"{number:,} {kind}" for kind, number in others[:2]]
    left = sum(number for _, number in others[2:])
    return ", ".join([text, *named]) + (f", {left:,} others" if left else "")
