"""What another trainer's loop needs in its process: stand-ins for what is imported and never called, and a group."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import socket
import sys
from typing import Any
from unittest.mock import MagicMock

import torch


class Uncalled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that stand empty where they are not installed, from the call on until `end`: what only imports need."""

    def __init__(self, *names: str) -> None:
        self._names = names
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Only of these."""
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: Any) -> Any:
        """Anything."""
        return MagicMock(__path__=[])

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""

    def end(self) -> None:
        """Forget them."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.partition(".")[0] in self._names]:
            del sys.modules[name]


def join() -> None:
    """Join the group of torch.distributed's variables, or be one of its own."""
    if not torch.distributed.is_initialized():
        if "RANK" not in os.environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {**own, "MASTER_PORT": str(free.getsockname()[1])}
        torch.distributed.init_process_group("gloo")
