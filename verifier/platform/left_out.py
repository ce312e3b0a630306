"""Packages that the stack goes on without: their import starts CUDA in a process that others are forked from."""

from __future__ import annotations

import sys

FLASHINFER = "flashinfer"
"""flashinfer-python. Asks the GPU for its number of multiprocessors when it is imported (0.6.8.post1)."""
CUTLASS = "cutlass"
"""nvidia-cutlass-dsl. Asks the GPU for its compute capability when it is imported (4.4.2)."""


def leave_out(*packages: str) -> None:
    """Let every later import of these here, and in what is forked from here, raise ModuleNotFoundError.

    Megatron, mamba-ssm and vLLM take that for a package that is not installed, and use kernels of their own (ADR 0056).
    One that was imported before stays.
    """
    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
