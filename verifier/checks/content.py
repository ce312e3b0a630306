"""Comparing recorded contents by name: the one comparison of two sets of tensor evidence, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from verifier.core.comparison import Comparison
from verifier.core.record import Record, TensorRecord
from verifier.core.stage import Stage
from verifier.core.trace import Trace

Moment = tuple[type[TensorRecord], int]
"""Class and version of what each rank recorded of all that it held."""


def owner_of(item: Record) -> str:
    """Recorder's name in the failure text."""
    where = getattr(item, "coordinate", "")
    return f"{item.role} rank {item.rank}" + (f" ({where})" if where else "")


def describe(item: TensorRecord) -> str:
    """Digest, dtype and shape of one recorded tensor; the text renderer cuts the digest."""
    return f"{item.digest} {item.dtype} {list(item.shape)}"


class Twins:
    """Finds what a wrong content equals instead: digest to the names that rightly hold it."""

    def __init__(self, expected: Mapping[str, TensorRecord]) -> None:
        self._names: dict[str, list[str]] = {}
        for name, item in expected.items():
            self._names.setdefault(item.digest, []).append(name)

    def of(self, item: TensorRecord) -> str:
        """Name of what it equals instead; empty if it equals nothing known."""
        return next((name for name in self._names.get(item.digest, ()) if name != item.name), "")


def compare_contents(
    actual: Mapping[str, TensorRecord],
    expected: Mapping[str, TensorRecord],
    *,
    stage: Stage,
    version: int,
    actual_says: str,
    expected_says: str,
    allowed: str,
    hint: str,
) -> Iterator[Comparison]:
    """Names as sets both ways, then dtype, shape and digest of every common name.

    Args:
        actual: by name, what the stage holds.
        expected: by name, what its predecessor handed over.
        stage: where a mismatch would have arisen.
        version: weight version.
        actual_says: who reports the actual side, for the failure text ("the export").
        expected_says: who says so on the expected side.
        allowed: tolerance with its source.
        hint: what to look at next.
    """
    twins = Twins(expected)
    for name in list(expected) + [name for name in actual if name not in expected]:
        got, want = actual.get(name), expected.get(name)
        if got is None or want is None:
            present = want or got
            assert present is not None
            sentence = (
                f"`{name}` is absent from {actual_says}"
                if got is None
                else f"`{name}` is in {actual_says} but not in {expected_says}"
            )
            yield Comparison(
                what=name, same=False, stage=stage, version=version, badness=1.0, sentence=sentence,
                owner=owner_of(present),
                expected=f"{describe(want)} ({expected_says})" if want else f"absent ({expected_says})",
                actual=f"{describe(got)} ({actual_says})" if got else f"absent ({actual_says})",
                allowed=allowed, hint=hint, absent=True,
            )  # fmt: skip
            continue
        same = (got.digest, got.dtype, got.shape) == (want.digest, want.dtype, want.shape)
        if same:
            yield Comparison(what=name, same=True, stage=stage, version=version)
            continue
        twin = twins.of(got)
        if got.dtype != want.dtype:
            what = f"has dtype {got.dtype} in {actual_says}, {want.dtype} in {expected_says}"
        elif got.shape != want.shape:
            what = f"has shape {list(got.shape)} in {actual_says}, {list(want.shape)} in {expected_says}"
        elif twin:
            what = f"holds in {actual_says} what `{twin}` should hold"
        else:
            what = f"holds other bits in {actual_says} than in {expected_says}"
        yield Comparison(
            what=name, same=False, stage=stage, version=version, badness=0.5,
            sentence=f"`{name}` {what}", owner=owner_of(got),
            expected=f"{describe(want)} ({expected_says})",
            actual=f"{describe(got)} ({actual_says}" + (f"; equals what `{twin}` should hold)" if twin else ")"),
            allowed=allowed, hint=hint,
        )  # fmt: skip


def by_name[R: Record](items: Iterable[R]) -> dict[str, R]:
    """Records by name; a name that stands twice keeps its first place and is renamed so that it cannot hide."""
    found: dict[str, R] = {}
    for item in items:
        name = item.name
        while name in found:
            name += " (again)"
        found[name] = item
    return found


def ranks_of(trace: Trace, kind: type[Record], version: int) -> list[int]:
    """Recorders that have anything of this kind."""
    return sorted({item.rank for item in trace.of(kind, version=version)})


def compare_moments(trace: Trace, after: Moment, before: Moment, **says: str) -> Iterator[Comparison]:
    """Everything that each rank held at one moment against what it held at an earlier one.

    Args:
        trace: of the run.
        after: the later moment, where a mismatch arose.
        before: the earlier moment.
        says: the texts of `compare_contents`.
    """
    kind, version = after
    for rank in ranks_of(trace, kind, version):
        yield from compare_contents(
            by_name(trace.of(kind, version=version, rank=rank)),
            by_name(trace.of(before[0], version=before[1], rank=rank)),
            stage=kind.stage, version=version, **says,
        )  # fmt: skip
