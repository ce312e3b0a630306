"""A trace: the run's manifest and its evidence; the only thing that checks read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifier.core.evidence import Evidence
from verifier.core.stage import Stage

if TYPE_CHECKING:
    import torch


class Trace:
    """Manifest plus ordered evidence, live or from disk; a check cannot tell which.

    Args:
        manifest: run identity: command, model, mesh, dtype, versions, declared coverage.
        evidence: every recorded fact.
        arrays: reads a payload array by its key; raises KeyError for an unknown key.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        evidence: Sequence[Evidence],
        arrays: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        self.manifest = manifest
        self.evidence = tuple(evidence)
        self._arrays = arrays
        self._index: dict[tuple[Stage, str], list[Evidence]] = {}
        for item in self.evidence:
            self._index.setdefault((item.stage, item.kind), []).append(item)
        self._last = max((item.version for item in self.evidence), default=0)

    def at(self, stage: Stage, kind: str | None = None, **equal: Any) -> Iterator[Evidence]:
        """Evidence of one stage (and kind), optionally filtered by field equality such as ``version=1``."""
        if kind is not None:
            items: Iterator[Evidence] = iter(self._index.get((stage, kind), ()))
        else:
            items = (item for item in self.evidence if item.stage is stage)
        for item in items:
            if all(getattr(item, field) == value for field, value in equal.items()):
                yield item

    def has(self, stage: Stage, kind: str) -> bool:
        """Whether anything of this kind was recorded at this stage."""
        return (stage, kind) in self._index

    def versions(self, stage: Stage, kind: str) -> list[int]:
        """Weight versions with evidence of this kind, ascending."""
        return sorted({item.version for item in self._index.get((stage, kind), ())})

    def came_past(self, version: int) -> bool:
        """Whether the run ended in order or went on to a later weight version, so that all of this one was reached."""
        return self.manifest.get("complete") is not False or version < self._last

    def array(self, evidence: Evidence) -> torch.Tensor:
        """Payload array of one fact; KeyError if it carries none."""
        if evidence.array is None or self._arrays is None:
            raise KeyError(f"no array was recorded with {evidence.kind} `{evidence.name}`")
        return self._arrays(evidence.array)
