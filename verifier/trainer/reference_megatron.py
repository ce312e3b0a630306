"""Evidence of the weights that a rank scores a frozen reference with, and of those that the reference is made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifier.core.records_policy import ReferenceShard
from verifier.probes.weights_megatron import LiveWeights
from verifier.trainer.state_megatron import digests_of

Digests = Mapping[str, dict[str, Any]]
"""Fields of a `TensorRecord` by name; see `digests_of`."""


def live_digests(live: LiveWeights) -> dict[str, dict[str, Any]]:
    """Fields of a `TensorRecord` of the live tensors, as they are, by their names."""
    return digests_of([tensor for _, _, tensor in live.tensors()], live)


def reference_shards(
    passes: Sequence[Digests], frozen: Digests, begun: Digests, version: int
) -> Iterator[ReferenceShard]:  # fmt: skip
    """Records of the tensors that the model held while it scored as the reference.

    Args:
        passes: the live tensors during each pass.
        frozen: of the reference when it was made.
        begun: of the live weights that the run began with; none where it goes on from a checkpoint.
        version: step that the passes are of.
    """
    for number, scored in enumerate(passes):
        for name, fields in scored.items():
            yield ReferenceShard(
                name=f"{name} in pass {number}" if number else name, version=version, frozen=frozen[name]["digest"],
                begun=begun[name]["digest"] if name in begun else None, **fields,
            )  # fmt: skip
