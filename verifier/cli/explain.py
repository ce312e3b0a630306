"""Checks as the user names them: lookup by code or name, and their pages."""

from __future__ import annotations

import difflib
import inspect

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, Check, needed
from verifier.errors import UsageError


def find_check(text: str) -> Check:
    """A check by its code or its name, in any case.

    Raises:
        UsageError: there is none; names the nearest.
    """
    by_text = {item.code.lower(): item for item in REGISTRY.values()} | {item.name: item for item in REGISTRY.values()}
    found = by_text.get(text.lower())
    if found is None:
        near = difflib.get_close_matches(text.lower(), by_text, n=1)
        hint = f"did you mean `{by_text[near[0]].code}`" if near else "`verifier explain` lists them"
        raise UsageError(f"there is no check `{text}`: {hint}")
    return found


def page_of(text: str) -> str:
    """Docstring of the check that `find_check` finds, under its code and name."""
    from verifier.faults.catalog import CATALOG

    item = find_check(text)
    needs = ", ".join(map(needed, item.needs))
    caught = [f"{fault.id} ({fault.reproduces})" for fault in CATALOG.values() if item.code in fault.caught_by]
    parts = [
        f"{item.code} {item.name}",
        inspect.cleandoc(item.page),
        f"Caught faults: {'; '.join(caught) or 'none in the catalogue'}.",
        f"Needs: {needs}. Scope: {item.scope}.",
    ]
    return "\n\n".join(parts) + "\n"


def list_of_checks() -> str:
    """Code, name and first line of every check."""
    wide = max(len(item.name) for item in REGISTRY.values())
    firsts = {code: inspect.cleandoc(item.page).splitlines()[0] for code, item in sorted(REGISTRY.items())}
    return "".join(f"{code}  {REGISTRY[code].name:<{wide}}  {first}\n" for code, first in firsts.items())
