"""Libraries of the oracle and of the process that runs a round, without any patch: torch and transformers."""

from __future__ import annotations


def preload() -> None:
    """Import them, in a fork server."""
    import numba  # noqa: F401
    import rich.progress  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import typer  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(1)
