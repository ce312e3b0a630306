"""Imports of Megatron in the process that trainer ranks are forked from; they do not start CUDA."""

from __future__ import annotations

from verifier.platform import Tier, install_for
from verifier.platform.left_out import CUTLASS, FLASHINFER, leave_out


def import_megatron(tier: Tier) -> None:
    """Prepare this process for a tier and import all of Megatron that building, running and training a model needs."""
    leave_out(FLASHINFER, CUTLASS)  # Megatron's own inference and Mamba-3's decoding use them: no rank runs either
    install_for(tier)
    from megatron.bridge import AutoBridge  # noqa: F401
    from megatron.core.distributed import finalize_model_grads  # noqa: F401
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401
