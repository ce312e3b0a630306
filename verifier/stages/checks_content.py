"""Comparing recorded contents by name: the one comparison of two sets of tensor evidence, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from verifier.core.compare import At, compare_value, owner_of
from verifier.core.comparison import Comparison
from verifier.core.record import Record, TensorRecord
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.engine.records import ExpectedView
from verifier.stages.load.records import SourceTensor

R = TypeVar("R", bound=Record)
Moment = tuple[type[TensorRecord], int]
"""Class and version of what each rank recorded of all that it held."""


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
    says: tuple[str, str],
    stage: Stage,
    version: int = 0,
    **texts: str,
) -> Iterator[Comparison]:
    """Names as sets both ways, then dtype, shape and digest of every common name.

    `expected` is what the predecessor of a stage handed over; `says` names who reports the actual and the expected side
    ("the export"); `texts` are `allowed` and `hint` where they are not those of the check's page.
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
            what = f"is absent from {says[0]}"
        elif want is None:
            what = f"is in {says[0]} but not in {says[1]}"
        elif wide and got.shape == want.shape:
            what = f"holds other values in {says[0]}, in {got.dtype}, than in {says[1]}, in {want.dtype}"
        elif got.dtype != want.dtype:
            what = f"has dtype {got.dtype} in {says[0]}, {want.dtype} in {says[1]}"
        elif got.shape != want.shape:
            what = f"has shape {list(got.shape)} in {says[0]}, {list(want.shape)} in {says[1]}"
        elif twin:
            what = f"holds in {says[0]} what `{twin}` should hold"
        else:
            what = f"holds other bits in {says[0]} than in {says[1]}"
        absent, at = got is None or want is None, At(stage, version, owner_of(present))
        equals = f"{says[0]}; equals what `{twin}` should hold" if twin else says[0]
        found = compare_value(
            at, name, describe(got), describe(want), same=False, says=(equals, says[1]), sentence=f"`{name}` {what}",
            absent=absent, badness=1.0 if absent else 0.5,
        )  # fmt: skip
        yield replace(found, **texts)  # type: ignore[arg-type]


def compare_ranks(
    trace: Trace, actual: Moment, expected: Moment, says: tuple[str, str], ranks: Iterable[int] | None = None
) -> Iterator[Comparison]:
    """Records of each rank at one moment against its records of another, in the stage of the first.

    `ranks` are by default those that recorded the actual side.
    """
    kind, version = actual
    for rank in sorted({item.rank for item in trace.of(kind, version=version)}) if ranks is None else ranks:
        held, wanted = (trace.of(each, version=at, rank=rank) for each, at in (actual, expected))
        yield from compare_contents(held, wanted, says, kind.stage, version)


def compare_moments(
    trace: Trace, kind: type[TensorRecord], before: Callable[[int], Moment], says: tuple[str, str]
) -> Iterator[Comparison]:
    """Everything that each rank held at the moments of one kind, against what it held at the one before each version's.

    A mismatch arose at the later moment.
    """
    for version in trace.versions(kind):
        yield from compare_ranks(trace, (kind, version), before(version), says)
