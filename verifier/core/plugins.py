"""Packages that bring checks and kinds of records of their own: the entry points of the group `verifier.checks`.

An entry point names a module; importing it registers what it has (`verifier.core.check.check`,
`verifier.core.schema.own_kind`). `verifier.checks` loads them all after its own checks.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from verifier.core.check import REGISTRY
from verifier.core.schema import OWN_KINDS
from verifier.errors import UsageError

GROUP = "verifier.checks"
LOADED: set[str] = set()
"""Names of the distributions whose entry points are loaded."""


def installed_plugins() -> dict[str, str]:
    """Name -> version of each distribution that declares checks; none of them is imported."""
    return {_owner(point): point.dist.version if point.dist else "" for point in entry_points(group=GROUP)}


def load_plugins() -> None:
    """Import every declared module.

    Raises:
        UsageError: one cannot be imported, or registers a code or a kind that is taken; nothing of it stays registered.
    """
    for point in entry_points(group=GROUP):
        before = {*REGISTRY, *OWN_KINDS}
        try:
            point.load()
        except (Exception, SystemExit) as problem:
            for registered in (REGISTRY, OWN_KINDS):
                for added in registered.keys() - before:
                    del registered[added]
            raise UsageError(
                f"the plugin `{_owner(point)}` cannot be loaded, module `{point.value}`: {type(problem).__name__}: "
                f"{problem}; mend or uninstall it"
            ) from problem
        LOADED.add(_owner(point))


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.name
