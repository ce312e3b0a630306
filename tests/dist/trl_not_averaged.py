"""`docs/examples/trl_grpo.py` with a bug: ranks' gradients are not averaged."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tests.meta.sources import ROOT


def local(*_: Any) -> bool:
    """Whether a backward pass averages over ranks."""
    return False


DistributedDataParallel.require_backward_grad_sync = property(local, lambda *_: None)  # type: ignore[assignment]
sys.path.insert(0, str(ROOT / "docs" / "examples"))
runpy.run_path(str(ROOT / "docs" / "examples" / "trl_grpo.py"), run_name="__main__")
