"""The checks. Importing this package imports its files, then plugins, which fill `core.check.REGISTRY`."""

from importlib import import_module
from pkgutil import iter_modules

from verifier.core.plugins import load_plugins

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
load_plugins()
