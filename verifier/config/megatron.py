"""Knobs of Megatron in a training run: data parallelism, recomputation, mixtures, the optimizer on the host."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.knob import Knobs, knob

SHARDINGS = ("optim", "optim_grads", "optim_grads_params")
"""Parts that Megatron-FSDP divides over data-parallel ranks: masters and moments, gradients too, weights too."""
RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules of which selective recomputation drops the activations; those of megatron-core that have a use here."""
BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions(Knobs):
    """Settings of megatron-core besides the mesh."""

    place = "megatron."

    distributed_optimizer: bool = knob("Shard masters and moments over data-parallel ranks.", True)
    overlap_grad_reduce: bool = knob("Reduce gradients while the backward pass runs.", True)
    overlap_param_gather: bool = knob("Gather updated parameters while the next forward pass runs.", True)
    grad_reduce_in_fp32: bool = knob("Accumulate and reduce gradients in fp32, or in the weights' type.", True)
    bucket_size: int | None = knob(
        "Elements of a gradient bucket; by default Megatron's, and 40,000 on a CPU.", None, least=1
    )
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
    )
    rope_fusion: bool | None = knob(
        "Rotary embeddings of all packed sequences in one kernel; by default where the model has plain ones.", None
    )
    recompute: str = knob("Recompute activations in the backward pass.", "none", choices=("none", "full", "selective"))
    recompute_method: str | None = knob(
        "Full: keep the input of every so many layers, or recompute the first so many; default uniform.", None,
        choices=("uniform", "block"),
    )  # fmt: skip
    recompute_layers: int | None = knob("Full: layers of that count; by default 1.", None, least=1)
    recompute_modules: tuple[str, ...] = knob(f"Selective: {', '.join(RECOMPUTABLE)}; default core_attn.", ())
    moe_load_balancing: str = knob(
        "Balancing loss of routers; bridges ask for one, here it is off unless asked for.", "none", choices=BALANCING
    )
    moe_aux_loss: float = knob("Coefficient of the balancing loss; bridges have up to 1e-3.", 0.0, least=0)
    moe_z_loss: float = knob("Coefficient of the routers' z-loss.", 0.0, least=0)
    moe_bias_update_rate: float = knob("Change of a router's score bias in a step; Megatron has 1e-3.", 0.0, least=0)
    mtp_loss_scaling_factor: float = knob(
        "Factor of the loss of a layer for a further token (MTP); bridges have 0.1 to 0.3.", 0.0, least=0
    )
    moe_router_dtype: str | None = knob(
        "Type of the routers' scores; by default the bridge's.", None, choices=("fp32", "fp64")
    )
    optimizer_offload: float = knob(
        "Share of masters and moments on the host, which steps there; needs GPUs.", 0.0, least=0, most=1
    )
    overlap_optimizer_offload: bool = knob("Copy to and from the host while other parts are stepped.", False)

    def _contradictions(self) -> dict[str, object]:
        return self._of_data_parallel() | self._of_fsdp() | self._of_layers()

    def _of_data_parallel(self) -> dict[str, object]:
        needed = {
            f"megatron.overlap_param_gather needs megatron.{name}, which is false: turn both on, or both off": (
                self.overlap_param_gather and not getattr(self, name)
            )
            for name in ("distributed_optimizer", "overlap_grad_reduce")
        }
        return needed | {
            "{megatron.bucket_size} and {megatron.overlap_grad_reduce}, without which Megatron has one bucket: leave "
            "one of the two out": self.bucket_size is not None and not self.overlap_grad_reduce,
            "{megatron.optimizer_offload} and needs megatron.distributed_optimizer, which is false: turn it on": (
                self.optimizer_offload and not self.distributed_optimizer
            ),
            "megatron.overlap_optimizer_offload is on and {megatron.optimizer_offload}: nothing is offloaded": (
                self.overlap_optimizer_offload and not self.optimizer_offload
            ),
        }

    def _of_fsdp(self) -> dict[str, object]:
        """Knobs of Megatron-FSDP without it, and what it does not do without."""
        turned = {
            "fsdp_sharding": self.fsdp_sharding != SHARDINGS[-1],
            "fsdp_prefetch": not self.fsdp_prefetch,
            "fsdp_unit_elements": self.fsdp_unit_elements,
        }
        is_on = {
            "distributed_optimizer": self.distributed_optimizer,
            "overlap_grad_reduce": self.overlap_grad_reduce or self.fsdp_sharding == "optim",
            "overlap_param_gather": self.overlap_param_gather or self.fsdp_sharding != "optim_grads_params",
        }
        without = {
            f"{{megatron.{name}}} and {{megatron.use_fsdp}}: turn it on": not self.use_fsdp and value
            for name, value in turned.items()
        }
        needed = {
            f"{{megatron.use_fsdp}}, {{megatron.fsdp_sharding}} and {{megatron.{name}}}, without which Megatron-FSDP "
            "does not run so: turn it on": self.use_fsdp and not value
            for name, value in is_on.items()
        }
        return {
            **without,
            **needed,
            "{megatron.use_fsdp} and {megatron.optimizer_offload}: Megatron-FSDP holds masters and moments itself, "
            "leave one of the two out": self.use_fsdp and self.optimizer_offload,
        }

    def _of_layers(self) -> dict[str, object]:
        kinds = {"recompute_method": "full", "recompute_layers": "full", "recompute_modules": "selective"}
        recomputed = {
            f"{{megatron.{name}}} and {{megatron.recompute}}: give megatron.recompute={kind}, or leave megatron.{name} "
            "out": getattr(self, name) and self.recompute != kind
            for name, kind in kinds.items()
        }
        unknown = {
            f"megatron.recompute_modules has `{module}`, it must be one of {', '.join(RECOMPUTABLE)}": True
            for module in self.recompute_modules
            if module not in RECOMPUTABLE
        }
        kind = self.moe_load_balancing
        return {
            **recomputed,
            **unknown,
            "{megatron.moe_aux_loss} and {megatron.moe_load_balancing}: choose one of "
            f"{', '.join(BALANCING[1:])}": self.moe_aux_loss and kind == "none",
            "{megatron.moe_load_balancing} and {megatron.moe_aux_loss}: give a coefficient": (
                kind != "none" and not self.moe_aux_loss
            ),
        }

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
