"""Comparisons of two values, texts, arrays or sets: the sentence follows from subject, both sides and what is allowed.

What a call leaves out of `allowed` and `hint` a finding takes from the page of its check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from unicodedata import normalize

from verifier.core.comparison import Comparison, Tolerance, describe_difference
from verifier.core.record import Record
from verifier.core.stage import Stage

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

TAIL = 60
"""Last characters of a text that a finding shows."""


class At(NamedTuple):
    """Place of a comparison that is of no single record."""

    stage: Stage
    version: int = 0
    owner: str = ""


class Given(TypedDict, total=False):
    """Texts and facts of a comparison that do not follow from its two sides."""

    subject: str
    """Beginning of the sentence; by default the name, or "the" and the noun phrase."""
    says: tuple[str, str]
    """Sources of the actual and of the expected side, such as "the trainer"."""
    stage: Stage
    """Stage of the mismatch; by default the record's."""
    owner: str
    """Holder of the actual side; by default the rank of trainer or engine that recorded it."""
    badness: float
    hint: str
    absent: bool
    mismatched: str


def owner_of(item: Record) -> str:
    """Recorder's name in the failure text."""
    where = getattr(item, "coordinate", "")
    return f"{item.role} rank {item.rank}" + (f" ({where})" if where else "")


def times(value: float, allowed: float) -> float:
    """Return the ratio to what is allowed, 0 for a value of 0; infinite where none is allowed or it is not finite."""
    return 0.0 if value == 0 else value / allowed if allowed > 0 and math.isfinite(value) else math.inf


def compare_value(
    of: Record | At,
    what: str,
    actual: Any,
    expected: Any,
    *,
    same: bool | None = None,
    sentence: str = "",
    allowed: Tolerance | str = "",
    bound: float | None = None,
    gap: float | None = None,
    **given: Unpack[Given],
) -> Comparison:
    """Compare two values: exactly, or two numbers within a bound.

    Args:
        of: record that the actual side is of, or place of the comparison: stage, version and owner are its own.
        what: noun phrase, or name of a tensor or a sequence.
        actual: number, text, or sequence of these.
        expected: of the same type, or any text where `same` or `gap` is given; None of a distance, which has a bound.
        same: result of a comparison that equality does not make.
        sentence: in place of "SUBJECT is ACTUAL, it should be EXPECTED".
        allowed: tolerance, or what a finding says of it.
        bound: greatest gap; by default that of the tolerance.
        gap: distance of the two; by default of two numbers.
        given: see `Given`.
    """
    share, subject, says = None, given.pop("subject", ""), given.pop("says", ("", ""))
    if isinstance(allowed, Tolerance):
        allowed, bound = (str(allowed), allowed.absolute) if bound is None else (f"{bound:.3g}, {allowed}", bound)
    if bound is not None:
        if expected is None:
            gap, expected = actual, f"at most {bound:.3g}"
        gap = abs(actual - expected) if gap is None else gap
        same, share = (math.isfinite(gap) and gap <= bound) if same is None else same, times(gap, bound)
    if actual == expected if same is None else same:
        return _of(of, what, same=True, share=share, allowed=allowed, **given)
    left, right = (_shown(side) + (f" ({by})" if by else "") for side, by in zip((actual, expected), says, strict=True))
    sentence = sentence or f"{subject or _subject(what)} is {left}, it should be {right}"
    texts = {"sentence": sentence, "actual": left, "expected": right, "allowed": allowed}
    return _of(of, what, same=False, share=share, **{"badness": 1.0, **texts, **given})


def compare_text(of: Record | At, what: str, actual: str, expected: str, **given: Unpack[Given]) -> Comparison:
    """Compare two texts in composed form (Unicode's NFC); a finding shows the end of either."""
    same = normalize("NFC", actual) == normalize("NFC", expected)
    left, right = (f"`{text[-TAIL:]}`" for text in (actual, expected))
    return compare_value(of, what, left, right, same=same, **given)


def compare_array(
    of: Record | At,
    what: str,
    actual: np.ndarray,
    expected: np.ndarray,
    unit: str = "element",
    first: int = 0,
    **given: Unpack[Given],
) -> Comparison:
    """Compare two vectors of one dtype bit by bit; a finding names the first element that differs.

    `unit` is the noun of an element, `first` the number of the first one.
    """
    import numpy as np

    bits = f"u{actual.dtype.itemsize}"
    bad = np.flatnonzero(np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits))
    at, subject = int(bad[0]) if bad.size else 0, given.pop("subject", _subject(what))
    given |= {"badness": bad.size / max(len(actual), 1), "subject": f"{subject} at {unit} {first + at:,}"}
    given |= {"mismatched": describe_difference(actual, expected).text if bad.size else ""}
    left, right = (f"{side[at]:.9g}" if bad.size else "" for side in (actual, expected))
    return compare_value(of, what, left, right, same=not bad.size, **given)


def compare_set(
    of: Record | At,
    what: str,
    actual: Collection[str],
    expected: Collection[str] = (),
    total: int = 0,
    **given: Unpack[Given],
) -> Comparison:
    """Compare names, each of which may stand once, with others; by default there should be none, of `total`.

    A finding names the first that is missing, the first that is surplus and the first that is repeated.
    """
    counts, wanted = Counter(actual), {*expected}
    kinds = {
        " missing": [name for name in expected if name not in counts],
        " surplus" if wanted else "": [name for name in counts if name not in wanted],
        " repeated": [name for name, count in counts.items() if count > 1 and name in wanted],
    }
    more = {kind: f" and {len(names) - 1:,} more" * (len(names) > 1) for kind, names in kinds.items()}
    parts = [f"`{names[0]}`{more[kind]}{kind}" for kind, names in kinds.items() if names]
    number = f"{len(actual):,}" + (f" of {total:,}" if total else "")
    found, right = f"{number} ({'; '.join(parts)})", f"{len(wanted):,}" if wanted else "none"
    sentence = f"{given.get('subject') or _subject(what)}: {found}, there should be {right}"
    return compare_value(of, what, found, right, same=not parts, sentence=sentence, **given)


def _of(of: Record | At, what: str, **fields: Any) -> Comparison:
    owner = of.owner if isinstance(of, At) else owner_of(of) if of.role in ("trainer", "engine") else ""
    return Comparison(what=what, **{"stage": of.stage, "version": of.version, "owner": owner, **fields})


def _subject(what: str) -> str:
    return f"the {what}" if " " in what else f"`{what}`"


def _shown(value: Any) -> str:
    """A value in a failure text: nine digits of a number that is not whole are noise, six tell it."""
    if value is None:
        return "absent"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
