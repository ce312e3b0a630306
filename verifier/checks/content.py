"""Comparing recorded contents by name: the one comparison of two sets of tensor evidence, both ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from verifier.core.comparison import Comparison
from verifier.core.record import Record, TensorRecord
from verifier.core.records_weights import ExpectedView, SourceTensor
from verifier.core.stage import Stage
from verifier.core.trace import Trace

R = TypeVar("R", bound=Record)
Moment = tuple[type[TensorRecord], int]
"""Class and version of what each rank recorded of all that it held."""


def owner_of(item: Record) -> str:
    """Recorder's name in the failure text."""
    where = getattr(item, "coordinate", "")
    return f"{item.role} rank {item.rank}" + (f" ({where})" if where else "")


def describe(item: TensorRecord | None) -> str:
    """Digest, dtype and shape of one recorded tensor; the text renderer cuts the digest."""
    return f"{item.digest} {item.dtype} {list(item.shape)}" if item else "absent"


def facts_of(item: TensorRecord) -> tuple[str, str, tuple[int, ...]]:
    """Digest, dtype and shape of one recorded tensor: what a copy has in common with it."""
    return item.digest, item.dtype, item.shape


def same_values(held: TensorRecord, expected: ExpectedView) -> bool:
    """Compare an engine's part of a tensor with what it is to be, which it may hold in a wider dtype."""
    wide = (expected.wider_digest, expected.wider_dtype, expected.shape)
    return facts_of(held) in (facts_of(expected), wide)


def left_out(source: Mapping[str, SourceTensor], taken: Iterable[Record]) -> dict[str, SourceTensor]:
    """Source tensors that repeat another one, and that nothing of `taken` has: the other stands for them."""
    names = {item.name for item in taken}
    return {name: item for name, item in source.items() if item.copy_of and name not in names}


def times(value: float, allowed: float) -> float:
    """Return the ratio to what is allowed, 0 for a value of 0; infinite where none is allowed or it is not finite."""
    return 0.0 if value == 0 else value / allowed if allowed > 0 and math.isfinite(value) else math.inf


def by_name(items: Iterable[R]) -> dict[str, R]:
    """Records by name; a name that stands twice keeps its first place and is renamed so that it cannot hide."""
    found: dict[str, R] = {}
    for item in items:
        name = item.name
        while name in found:
            name += " (again)"
        found[name] = item
    return found


def compare_contents(
    actual: Iterable[TensorRecord],
    expected: Iterable[TensorRecord],
    *,
    stage: Stage,
    version: int,
    actual_says: str,
    expected_says: str,
    allowed: str,
    hint: str,
) -> Iterator[Comparison]:
    """Names as sets both ways, then dtype, shape and digest of every common name.

    `expected` is what the predecessor of a stage handed over; the texts say who reports each side ("the export"), the
    tolerance with its source, and what to look at next.
    """
    held, wanted = by_name(actual), by_name(expected)
    rightful: dict[str, list[str]] = {}
    for name, item in wanted.items():
        rightful.setdefault(item.digest, []).append(name)
    for name, present in (wanted | held).items():
        got, want = held.get(name), wanted.get(name)
        wide = want if got and isinstance(want, ExpectedView) and got.dtype == want.wider_dtype else None
        if got and want and (facts_of(got) == facts_of(want) or (wide and same_values(got, wide))):
            widened = f"{want.dtype} as {got.dtype}" if wide else ""
            yield Comparison(what=name, same=True, stage=stage, version=version, widened=widened)
            continue
        twin = next((other for other in rightful.get(present.digest, ()) if got and want and other != got.name), "")
        if got is None:
            what = f"is absent from {actual_says}"
        elif want is None:
            what = f"is in {actual_says} but not in {expected_says}"
        elif wide and got.shape == want.shape:
            what = f"holds other values in {actual_says}, in {got.dtype}, than in {expected_says}, in {want.dtype}"
        elif got.dtype != want.dtype:
            what = f"has dtype {got.dtype} in {actual_says}, {want.dtype} in {expected_says}"
        elif got.shape != want.shape:
            what = f"has shape {list(got.shape)} in {actual_says}, {list(want.shape)} in {expected_says}"
        elif twin:
            what = f"holds in {actual_says} what `{twin}` should hold"
        else:
            what = f"holds other bits in {actual_says} than in {expected_says}"
        absent = got is None or want is None
        yield Comparison(
            what=name, same=False, stage=stage, version=version, badness=1.0 if absent else 0.5,
            sentence=f"`{name}` {what}", owner=owner_of(present), expected=f"{describe(want)} ({expected_says})",
            actual=f"{describe(got)} ({actual_says}" + (f"; equals what `{twin}` should hold)" if twin else ")"),
            allowed=allowed, hint=hint, absent=absent,
        )  # fmt: skip


def compare_moments(
    trace: Trace, kind: type[TensorRecord], before: Callable[[int], Moment], **says: str
) -> Iterator[Comparison]:
    """Everything that each rank held at the moments of one kind, against what it held at the one before each version's.

    A mismatch arose at the later moment; `says` are the texts of `compare_contents`.
    """
    for version in trace.versions(kind):
        earlier, then = before(version)
        for rank in sorted({item.rank for item in trace.of(kind, version=version)}):
            yield from compare_contents(
                trace.of(kind, version=version, rank=rank), trace.of(earlier, version=then, rank=rank),
                stage=kind.stage, version=version, **says,
            )  # fmt: skip
