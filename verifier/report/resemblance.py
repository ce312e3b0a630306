"""Faults of the catalogue that violate the same checks, first in the same stage, by their last trials."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib.resources import files

import msgspec

MAX_NAMED = 3
"""Faults that the text names; the number of others is stated, and JSON holds all."""


class KnownFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks that the last trial of a re-enacted bug violated."""

    fault: str
    reproduces: str
    """Repository and issue of the bug that shipped."""
    link: str
    """Address of the issue; empty where the source is a commit or a file."""
    first_bad: str
    """Label of the first bad stage."""
    caught: tuple[str, ...]
    """Codes of the checks that it violated, sorted."""


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Read the table, ordered by id."""
    text = files("verifier.report").joinpath("known_faults.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[KnownFault, ...])


def resembling(violated: Collection[str], first_bad: str) -> tuple[KnownFault, ...]:
    """Look up the faults whose last trial violated exactly these checks, first in this stage.

    Args:
        violated: codes of checks.
        first_bad: label of a stage.
    """
    codes = tuple(sorted(violated))
    return tuple(item for item in known_faults() if (item.caught, item.first_bad) == (codes, first_bad))


def named(faults: Sequence[KnownFault]) -> str:
    """Return the first faults with their issues, and how many more there are."""
    shown = [f"`{item.fault}` ({item.link or item.reproduces})" for item in faults[:MAX_NAMED]]
    left = len(faults) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")
