"""Modules that were changed after a fork server imported them: found there, and imported again in its children."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, ModuleType

from verifier.launch.channel import Channel
from verifier.launch.fork_server import be_server, call

_MOST = 12
"""Modules that are imported again at most. What more depend on holds state that others have taken from it."""
_OURS = "verifier"


def tell(channel: Channel, changed: list[str]) -> None:
    """Send the files of all modules that are loaded here, and if those of `changed` can be imported again."""
    channel.send({"loaded": sorted(_by_file()), "can_reload": to_reload(changed) is not None})


def serve(channel: Channel, preloads: list[str], changed: list[str]) -> None:
    """Be a fork server that was forked from another: import changed modules again, then load."""
    be_server(channel, [partial(reload, changed), *(partial(call, name) for name in preloads)])


def to_reload(changed: Collection[str]) -> list[ModuleType] | None:
    """Loaded modules with these files, and those that took something from them, dependencies first.

    Returns:
        None where only a new process can have the change: a package's own module, one that we have patched, or one
        that many depend on.
    """
    by_file = _by_file()
    first = [by_file[file] for file in changed if file in by_file]
    users: dict[str, list[ModuleType]] = {}
    for module in _of({_package(module) for module in first}):
        for name in _sources(module):
            users.setdefault(name, []).append(module)
    ordered: list[ModuleType] = []
    seen: set[str] = set()

    def visit(module: ModuleType) -> None:
        seen.add(module.__name__)
        for user in users.get(module.__name__, ()):
            if user.__name__ not in seen and not hasattr(user, "__path__"):
                visit(user)
        ordered.append(module)

    for module in first:
        if module.__name__ not in seen:
            visit(module)
    if len(ordered) > _MOST or any(hasattr(module, "__path__") or _patched(module) for module in ordered):
        return None
    return ordered[::-1]


def reload(changed: Collection[str]) -> None:
    """Import the loaded modules with these files again, with what depends on them; packages show the new objects."""
    for module in to_reload(changed) or ():
        old = {id(value): name for name, value in vars(module).items() if _home(value) == module.__name__}
        kept = list(vars(module).values())  # so that no new object takes the place of an old one
        importlib.reload(module)
        for other in _of({_package(module)}):
            for name, value in list(vars(other).items()):
                if other is not module and id(value) in old and hasattr(module, old[id(value)]):
                    setattr(other, name, getattr(module, old[id(value)]))
        del kept


def _by_file() -> dict[str, ModuleType]:
    """Loaded modules by their files, links resolved."""
    return {os.path.realpath(file): module for module in _modules() if (file := getattr(module, "__file__", None))}


def _modules() -> Iterator[ModuleType]:
    return (module for module in list(sys.modules.values()) if isinstance(module, ModuleType))


def _package(module: ModuleType) -> str:
    return module.__name__.split(".")[0]


def _of(packages: Collection[str]) -> Iterator[ModuleType]:
    """Loaded modules of these outermost packages."""
    return (module for module in _modules() if _package(module) in packages)


def _home(value: object) -> str:
    """Name of the module that made a class, a function, or the class of any other value."""
    made = value if isinstance(value, type | FunctionType) else type(value)
    home = made.__module__
    return home if isinstance(home, str) else ""


def _sources(module: ModuleType) -> set[str]:
    """Names of other modules that have made something in the namespace of this one, or that are in it."""
    values = list(vars(module).values())
    named = {value.__name__ for value in values if isinstance(value, ModuleType)}
    return (named | {_home(value) for value in values}) - {module.__name__, ""}


def _patched(module: ModuleType) -> bool:
    """Test for something of ours in a module that is not ours, or in one of its classes; and for our own modules."""
    if _package(module) == _OURS:
        return True
    values = list(vars(module).values())
    classes = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
    inner = [item for cls in classes for item in vars(cls).values()]
    return any(_home(value).split(".")[0] == _OURS for value in (*values, *inner))
