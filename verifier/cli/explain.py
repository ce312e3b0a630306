"""Checks and faults as the user names them: lookup by code, name or id, and their pages."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.contracts.table import CONTRACTS
from verifier.core.check import REGISTRY, Check, needed
from verifier.errors import UsageError

if TYPE_CHECKING:
    from verifier.faults.fault import Fault


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
    """Page of a check, which is its docstring under its code and name, or of a fault by its id."""
    from verifier.faults.catalog import CATALOG

    if text.lower() in CATALOG:
        return _page_of_fault(CATALOG[text.lower()])
    item = find_check(text)
    needs = ", ".join(map(needed, item.needs))
    caught = [f"{fault.id} ({fault.reproduces})" for fault in CATALOG.values() if item.code in fault.caught_by]
    contracts = ", ".join(f"{row.name} ({row.package})" for row in CONTRACTS if item.code in row.checks)
    parts = [
        f"{item.code} {item.name}",
        inspect.cleandoc(item.page),
        f"Caught faults: {'; '.join(caught) or 'none in the catalogue'}.",
        *([f"Contracts with upstream that it rests on: {contracts}."] if contracts else []),
        f"Needs: {needs}. Judges: {item.applies}.",
    ]
    return "\n\n".join(parts) + "\n"


def _page_of_fault(item: Fault) -> str:
    from verifier.faults.fault import NO_ENGINE

    checks = ", ".join(f"{code} {REGISTRY[code].name}" for code in item.caught_by)
    engine = "no engine" if item.engine == NO_ENGINE else f"engine {item.engine}"
    adapter = f", an adapter of rank {item.lora_rank}" if item.lora_rank else ""
    run = f"ci/gpu -k {item.id}" if item.gpus else f"verifier faults run {item.id}"
    parts = [
        f"{item.id}, a re-enacted bug",
        item.summary,
        f"Shipped as: {item.reproduces}.",
        f"Stage: {item.stage.label}. Checks that must catch it: {checks}.",
        f"Trial: {item.model} on {item.mesh.label()}, {item.dtype}, {engine}, {item.cycles} cycles{adapter}.",
        f"Run it: `{run}`",
    ]
    return "\n\n".join(parts) + "\n"


def list_of_checks() -> str:
    """Code, name and first line of every check."""
    wide = max(len(item.name) for item in REGISTRY.values())
    firsts = {code: inspect.cleandoc(item.page).splitlines()[0] for code, item in sorted(REGISTRY.items())}
    return "".join(f"{code}  {REGISTRY[code].name:<{wide}}  {first}\n" for code, first in firsts.items())
