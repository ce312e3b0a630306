"""Knobs of Megatron in a training run: data parallelism, recomputation, mixtures, the optimizer on the host."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.errors import UsageError
from verifier.knob import check, knob

SHARDINGS = ("optim", "optim_grads", "optim_grads_params")
"""Parts that Megatron-FSDP divides over data-parallel ranks: masters and moments, gradients too, weights too."""
RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules of which selective recomputation drops the activations; those of megatron-core that have a use here."""
BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """Settings of megatron-core besides the mesh.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the keys.
    """

    distributed_optimizer: bool = knob("Shard masters and moments over data-parallel ranks.", True)
    overlap_grad_reduce: bool = knob("Reduce gradients while the backward pass runs.", True)
    overlap_param_gather: bool = knob("Gather updated parameters while the next forward pass runs.", True)
    grad_reduce_in_fp32: bool = knob("Accumulate and reduce gradients in fp32, or in the weights' type.", True)
    bucket_size: int | None = knob(
        "Elements of a gradient bucket; by default Megatron's, and 40,000 on a CPU.", None, least=1
    )  # fmt: skip
    use_fsdp: bool = knob(
        "Shard over data-parallel ranks by Megatron-FSDP, in place of its buckets; needs GPUs.", False
    )
    fsdp_sharding: str = knob(
        "Megatron-FSDP: what is sharded, masters and moments alone, gradients too, or weights too.",
        "optim_grads_params", choices=SHARDINGS,
    )  # fmt: skip
    fsdp_prefetch: bool = knob("Megatron-FSDP: gather the first weights as soon as a step ends.", True)
    fsdp_unit_elements: int | None = knob(
        "Megatron-FSDP: elements that are gathered ahead; by default Megatron's.", None, least=1
    )  # fmt: skip
    rope_fusion: bool | None = knob(
        "Rotary embeddings of all packed sequences in one kernel; by default where the model has plain ones.", None
    )  # fmt: skip
    recompute: str = knob(
        "Recompute activations in the backward pass.", "none", choices=("none", "full", "selective")
    )  # fmt: skip
    recompute_method: str | None = knob(
        "Full: keep the input of every so many layers, or recompute the first so many; default uniform.", None,
        choices=("uniform", "block"),
    )  # fmt: skip
    recompute_layers: int | None = knob("Full: layers of that count; by default 1.", None, least=1)
    recompute_modules: tuple[str, ...] = knob(f"Selective: {', '.join(RECOMPUTABLE)}; default core_attn.", ())
    moe_load_balancing: str = knob(
        "Balancing loss of routers; bridges ask for one, here it is off unless asked for.", "none", choices=BALANCING
    )  # fmt: skip
    moe_aux_loss: float = knob("Coefficient of the balancing loss; bridges have up to 1e-3.", 0.0)
    moe_z_loss: float = knob("Coefficient of the routers' z-loss.", 0.0)
    moe_bias_update_rate: float = knob("Change of a router's score bias in a step; Megatron has 1e-3.", 0.0)
    moe_router_dtype: str | None = knob(
        "Type of the routers' scores; by default the bridge's.", None, choices=("fp32", "fp64")
    )  # fmt: skip
    optimizer_offload: float = knob("Share of masters and moments on the host, which steps there; needs GPUs.", 0.0)
    overlap_optimizer_offload: bool = knob("Copy to and from the host while other parts are stepped.", False)

    def __post_init__(self) -> None:
        check(self)
        for name in ("moe_aux_loss", "moe_z_loss", "moe_bias_update_rate", "optimizer_offload"):
            value, most = getattr(self, name), 1 if name == "optimizer_offload" else float("inf")
            if not 0 <= value <= most or value == float("inf"):
                bound = f" and at most {most}" if most == 1 else " and finite"
                raise UsageError(f"megatron.{name} is {value:g}, it must be at least 0{bound}")
        self._refuse_data_parallel()
        self._refuse_fsdp()
        self._refuse_recompute()
        self._refuse_balancing()

    def _refuse_data_parallel(self) -> None:
        if self.overlap_param_gather:
            for name in ("distributed_optimizer", "overlap_grad_reduce"):
                if not getattr(self, name):
                    raise UsageError(
                        f"megatron.overlap_param_gather needs megatron.{name}, which is false: "
                        "turn both on, or both off"
                    )
        if self.bucket_size is not None and not self.overlap_grad_reduce:
            raise UsageError(
                f"megatron.bucket_size is {self.bucket_size:,} and megatron.overlap_grad_reduce is false, without "
                "which Megatron has one bucket: leave one of the two out"
            )
        if self.optimizer_offload and not self.distributed_optimizer:
            raise UsageError(
                f"megatron.optimizer_offload is {self.optimizer_offload:g} and needs megatron.distributed_optimizer, "
                "which is false: turn it on"
            )
        if self.overlap_optimizer_offload and not self.optimizer_offload:
            raise UsageError(
                "megatron.overlap_optimizer_offload is on and megatron.optimizer_offload is 0: nothing is offloaded"
            )

    def _refuse_fsdp(self) -> None:
        """Refuse knobs of Megatron-FSDP without it, and what it does not do without."""
        if not self.use_fsdp:
            turned = {
                "fsdp_sharding": self.fsdp_sharding if self.fsdp_sharding != SHARDINGS[-1] else None,
                "fsdp_prefetch": None if self.fsdp_prefetch else "false", "fsdp_unit_elements": self.fsdp_unit_elements,
            }  # fmt: skip
            for name, value in turned.items():
                if value is not None:
                    raise UsageError(f"megatron.{name} is {value} and megatron.use_fsdp is false: turn it on")
            return
        needed = {
            "distributed_optimizer": self.distributed_optimizer,
            "overlap_grad_reduce": self.overlap_grad_reduce or self.fsdp_sharding == "optim",
            "overlap_param_gather": self.overlap_param_gather or self.fsdp_sharding != "optim_grads_params",
        }
        for name, is_on in needed.items():
            if not is_on:
                raise UsageError(
                    f"megatron.use_fsdp is true, megatron.fsdp_sharding is {self.fsdp_sharding} and megatron.{name} is "
                    "false, without which Megatron-FSDP does not run so: turn it on"
                )
        if self.optimizer_offload:
            raise UsageError(
                f"megatron.use_fsdp is true and megatron.optimizer_offload is {self.optimizer_offload:g}: "
                "Megatron-FSDP holds masters and moments itself, leave one of the two out"
            )

    def _refuse_recompute(self) -> None:
        asked = {
            "recompute_method": ("full", self.recompute_method), "recompute_layers": ("full", self.recompute_layers),
            "recompute_modules": ("selective", ",".join(self.recompute_modules)),
        }  # fmt: skip
        for name, (kind, value) in asked.items():
            if value and self.recompute != kind:
                raise UsageError(
                    f"megatron.{name} is {value} and megatron.recompute is {self.recompute}: "
                    f"give megatron.recompute={kind}, or leave megatron.{name} out"
                )
        for module in self.recompute_modules:
            if module not in RECOMPUTABLE:
                raise UsageError(
                    f"megatron.recompute_modules has `{module}`, it must be one of {', '.join(RECOMPUTABLE)}"
                )

    def _refuse_balancing(self) -> None:
        kind, coefficient = self.moe_load_balancing, self.moe_aux_loss
        if coefficient and kind == "none":
            raise UsageError(
                f"megatron.moe_aux_loss is {coefficient:g} and megatron.moe_load_balancing is none: choose one of "
                f"{', '.join(BALANCING[1:])}"
            )
        if kind != "none" and not coefficient:
            raise UsageError(
                f"megatron.moe_load_balancing is {kind} and megatron.moe_aux_loss is 0: give a coefficient"
            )

    @property
    def mixture_knobs(self) -> dict[str, object]:
        """Knobs that only a model with experts has and that were turned, by key."""
        turned = {
            "moe_load_balancing": self.moe_load_balancing if self.moe_load_balancing != "none" else None,
            "moe_z_loss": self.moe_z_loss or None, "moe_bias_update_rate": self.moe_bias_update_rate or None,
            "moe_router_dtype": self.moe_router_dtype,
        }  # fmt: skip
        found: dict[str, object] = {f"megatron.{name}": value for name, value in turned.items() if value is not None}
        modules = [name for name in self.recompute_modules if name in ("moe", "moe_act", "shared_experts")]
        return found | ({"megatron.recompute_modules": modules[0]} if modules else {})
