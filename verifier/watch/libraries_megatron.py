"""Libraries of trainer ranks without any module that a row or a check stands in: Megatron on this machine's tier."""

from __future__ import annotations

from verifier.platform import install_for, select


def preload() -> None:
    """Import them, in a fork server; ranks import the rest of this package after the fork."""
    install_for(select())
    import numba  # noqa: F401
    from megatron.bridge import AutoBridge  # noqa: F401
    from megatron.core.distributed import finalize_model_grads  # noqa: F401
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401
