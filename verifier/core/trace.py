"""A trace: the run's manifest and its evidence; the only thing that checks read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from verifier.core.manifest import Manifest
from verifier.core.record import ONLY, ArrayRecord, Record, UnknownRecord, kind_of

if TYPE_CHECKING:
    import numpy as np

R = TypeVar("R", bound=Record)
Arrays = Callable[[str], "Mapping[str, np.ndarray]"]


class Trace:
    """Manifest plus ordered records, live or from disk; a check cannot tell which.

    Args:
        manifest: identity of the run and what it undertook to show.
        records: every recorded fact.
        arrays: reader of the arrays of a record by its key, which raises KeyError for an unknown one.
        unknown: facts of kinds that nothing here declares.
        path: directory that it was read from; empty for a live one.
    """

    def __init__(
        self,
        manifest: Manifest,
        records: Sequence[Record],
        arrays: Arrays | None = None,
        unknown: Sequence[UnknownRecord] = (),
        path: str = "",
    ) -> None:
        self.manifest = manifest
        self.records, self.unknown, self.path = tuple(records), tuple(unknown), path
        self.arrays_by_key = arrays
        self._index: dict[type[Record], dict[int, list[Record]]] = {}
        for item in self.records:
            self._index.setdefault(type(item), {}).setdefault(item.version, []).append(item)
        self._groups: dict[tuple[type[Record], int, str], dict[Any, list[Record]]] = {}
        self._missing: dict[type[Record], tuple[str, ...]] = {}
        self._last = max((item.version for item in self.records), default=0)

    def of(self, kind: type[R], *, version: int | None = None, **equal: Any) -> Iterator[R]:
        """Records of one class as they were recorded: of one weight version, and with these values of other fields."""
        versions = self._index.get(kind, {})
        for number in versions if version is None else versions.keys() & {version}:
            found = cast("list[R]", versions[number])
            for place, (field, value) in enumerate(equal.items()):
                if place:
                    found = [item for item in found if getattr(item, field) == value]
                else:  # each of many ranks asks for its own
                    groups = self._groups.setdefault((kind, number, field), {})
                    for item in () if groups else found:
                        groups.setdefault(getattr(item, field), []).append(item)
                    found = cast("list[R]", groups.get(value, []))
            yield from found

    def has(self, kind: type[Record]) -> bool:
        """True if anything of this class was recorded."""
        return kind in self._index

    def versions(self, kind: type[Record]) -> list[int]:
        """Weight versions with records of this class, ascending."""
        return sorted(self._index.get(kind, ()))

    def missing(self, kind: type[Record]) -> tuple[str, ...]:
        """Sentences on what ranks, engines, versions and updates owe of this class and have not; see `Record.owed`."""
        if kind not in self._missing:
            found = [item for items in self._index.get(kind, {}).values() for item in items]
            texts = [owed.missing(kind_of(kind), found, self.manifest, self.came_past) for owed in kind.owed]
            self._missing[kind] = tuple(text for part in texts for text in part)
        return self._missing[kind]

    def came_past(self, version: int) -> bool:
        """True if the run ended in order or went on to a later weight version, so that all of this one was reached."""
        return self.manifest.complete or version < self._last

    def array(self, record: ArrayRecord, name: str = ONLY) -> np.ndarray:
        """One array of a record, by default its only one; KeyError if it has none of that name."""
        return self.arrays(record)[name]

    def arrays(self, record: ArrayRecord) -> Mapping[str, np.ndarray]:
        """All arrays of a record, by name; KeyError if it has none."""
        if not record.array or self.arrays_by_key is None:
            raise KeyError(f"no array was recorded with {kind_of(type(record))} `{record.name}`")
        return self.arrays_by_key(record.array)
