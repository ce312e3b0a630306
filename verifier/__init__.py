"""Judge every hand-over of an RL post-training stack, on the real systems.

`read`, `judge`, `Report`, `UsageError` and `probe` are loaded when they are first used: docs/api.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifier import probe
    from verifier.api import judge, read
    from verifier.errors import UsageError
    from verifier.report import Report

__version__ = "0.2.0"
__all__ = ["Report", "UsageError", "__version__", "judge", "probe", "read"]
_HOMES = {"Report": "report", "UsageError": "errors", "judge": "api", "read": "api"}
"""Public name -> module of this package that has it."""


def __getattr__(name: str) -> Any:
    if name == "probe":
        return import_module(f"{__name__}.probe")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module `verifier` has no attribute `{name}`")
