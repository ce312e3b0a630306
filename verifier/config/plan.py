"""Config of `verifier plan`."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.config.commands import DTYPES, CommandConfig, dtype_knob, fixes_knob
from verifier.config.stored_dtype import stored_dtype
from verifier.knob import group, knob
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import MEGATRON_DECAY, require_known, selected


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(CommandConfig):
    """Config of `verifier plan`."""

    model: str = knob(
        "A config.json, the directory that has it, tiny:NAME or wide:NAME; no weights are read.", flag="--model",
        metavar="MODEL",
    )  # fmt: skip
    mesh: Mesh = group(Mesh, make=Mesh.fitting)
    dtype: str = dtype_knob()
    fixes: tuple[str, ...] = fixes_knob()
    gpu_gib: float = knob("Memory of a GPU.", 80.0, flag="--gpu-gib", metavar="GIB", unit="GiB", above=0)
    tokens: int = knob(
        "Tokens of a micro-batch of one data-parallel rank.", 4096, flag="--tokens", least=1, unit="tokens"
    )  # fmt: skip
    recompute: str = knob(
        "Recompute activations in the backward pass.", "none", flag="--recompute", choices=("none", "full")
    )  # fmt: skip
    distributed_optimizer: bool = knob(
        "Shard masters and moments over data-parallel ranks.", True,
        flag="--distributed-optimizer/--no-distributed-optimizer",
    )  # fmt: skip
    grad_reduce_in_fp32: bool = knob("Gradients are kept in fp32, or in the weights' type.", True)
    transport: str = knob("From rank 0 to the engine.", "nccl", flag="--transport", choices=("nccl", "ipc"))
    max_chunk_mib: int = knob(
        "Largest chunk: 1024 in a round trip on GPUs, 64 in training and on a CPU.", 1024, flag="--max-chunk", least=1,
        metavar="MIB", unit="MiB",
    )  # fmt: skip
    transfer_gb_s: float | None = knob(
        "Bandwidth from rank 0 to the engine; by default the one measured for --transport.", None,
        flag="--transfer-gb-s", metavar="GB_S", unit="GB/s", above=0,
    )  # fmt: skip
    gather_gb_s: float | None = knob(
        "Bandwidth from the other ranks to one; by default the one measured for NCCL within a host.", None,
        flag="--gather-gb-s", metavar="GB_S", unit="GB/s", above=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", stored_dtype(self.model, DTYPES.values()))
        CommandConfig.__post_init__(self)
        require_known(self.fixes)

    @property
    def rounds_decay(self) -> bool:
        """True if decay rates of state-space layers have the weights' dtype in the trainer, as shipped."""
        return MEGATRON_DECAY not in selected(self.fixes)
