"""Table of the knobs that go to Megatron: the field of its configs that each one reaches, and the value asked for.

The ranks are built from this table, and every step's trace has what was asked for and what the live objects hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from verifier.config.megatron import MegatronOptions
from verifier.config.training import TrainConfig

Part = Literal["model", "ddp", "optimizer", "adam", "scheduler", "adapter"]
"""Upstream's object: TransformerConfig, DistributedDataParallelConfig, OptimizerConfig, Adam's groups of parameters,
OptimizerParamScheduler, megatron-bridge's adapters."""


UPSTREAM = object()
"""Sign of a knob that leaves upstream's own value."""


@dataclass(frozen=True, slots=True)
class UpstreamField:
    """One row: where a knob ends up."""

    knob: str
    part: Part
    field: str
    value: Callable[[TrainConfig], Any] | None = None
    """Value of the field that a config asks for, or `UPSTREAM`; None: the knob's own, where it has one."""

    def asked(self, config: TrainConfig) -> Any:
        """Value of the field that a config asks for, or `UPSTREAM`."""
        if self.value is not None:
            return self.value(config)
        return UPSTREAM if (own := attrgetter(self.knob)(config)) is None else own


def _with_full(value: Callable[[MegatronOptions], Any]) -> Callable[[TrainConfig], Any]:
    """A field of full recomputation: upstream refuses it beside selective, and nothing reads it beside none."""

    def asked_of(config: TrainConfig) -> Any:
        kind = config.megatron.recompute
        return value(config.megatron) if kind == "full" else None if kind == "selective" else UPSTREAM

    return asked_of


def _with_fsdp(knob: str, field: str) -> UpstreamField:
    """A field of Megatron-FSDP, which nothing reads without it."""
    own = UpstreamField(f"megatron.{knob}", "ddp", field)
    return replace(own, value=lambda config: own.asked(config) if config.megatron.use_fsdp else UPSTREAM)


FIELDS: tuple[UpstreamField, ...] = (
    UpstreamField("dtype", "model", "params_dtype"),
    UpstreamField("mesh.tp", "model", "tensor_model_parallel_size"),
    UpstreamField("mesh.pp", "model", "pipeline_model_parallel_size"),
    UpstreamField("mesh.vpp", "model", "virtual_pipeline_model_parallel_size",
                  lambda c: c.mesh.vpp if c.mesh.vpp > 1 else None),
    UpstreamField("mesh.ep", "model", "expert_model_parallel_size"),
    UpstreamField("mesh.etp", "model", "expert_tensor_parallel_size"),
    UpstreamField("mesh.cp", "model", "context_parallel_size"),
    UpstreamField("megatron.rope_fusion", "model", "apply_rope_fusion"),
    UpstreamField("megatron.recompute", "model", "recompute_granularity",
                  lambda c: None if c.megatron.recompute == "none" else c.megatron.recompute),
    UpstreamField("megatron.recompute_method", "model", "recompute_method",
                  _with_full(lambda m: m.recompute_method or "uniform")),
    UpstreamField("megatron.recompute_layers", "model", "recompute_num_layers",
                  _with_full(lambda m: m.recompute_layers or 1)),
    UpstreamField("megatron.recompute_modules", "model", "recompute_modules",
                  lambda c: list(c.megatron.recompute_modules) or ["core_attn"]
                  if c.megatron.recompute == "selective" else UPSTREAM),
    UpstreamField("megatron.moe_load_balancing", "model", "moe_router_load_balancing_type"),
    UpstreamField("megatron.moe_aux_loss", "model", "moe_aux_loss_coeff"),
    UpstreamField("megatron.moe_z_loss", "model", "moe_z_loss_coeff", lambda c: c.megatron.moe_z_loss or None),
    UpstreamField("megatron.moe_bias_update_rate", "model", "moe_router_bias_update_rate"),
    UpstreamField("megatron.mtp_loss_scaling_factor", "model", "mtp_loss_scaling_factor"),
    UpstreamField("megatron.moe_router_dtype", "model", "moe_router_dtype"),
    UpstreamField("grpo.replay_routes", "model", "moe_enable_routing_replay"),
    UpstreamField("megatron.distributed_optimizer", "ddp", "use_distributed_optimizer"),
    UpstreamField("megatron.overlap_grad_reduce", "ddp", "overlap_grad_reduce"),
    UpstreamField("megatron.overlap_param_gather", "ddp", "overlap_param_gather"),
    UpstreamField("megatron.grad_reduce_in_fp32", "ddp", "grad_reduce_in_fp32"),
    UpstreamField("megatron.bucket_size", "ddp", "bucket_size"),
    UpstreamField("megatron.use_fsdp", "ddp", "use_megatron_fsdp"),
    _with_fsdp("fsdp_sharding", "data_parallel_sharding_strategy"),
    _with_fsdp("fsdp_prefetch", "fsdp_all_gather_in_start_param_sync"),
    _with_fsdp("fsdp_unit_elements", "suggested_communication_unit_size"),
    UpstreamField("megatron.optimizer_offload", "optimizer", "optimizer_offload_fraction"),
    UpstreamField("megatron.overlap_optimizer_offload", "optimizer", "overlap_cpu_optimizer_d2h_h2d"),
    UpstreamField("lora.rank", "adapter", "dim"),
    UpstreamField("lora.alpha", "adapter", "alpha", lambda c: c.lora.effective_alpha if c.lora.rank else UPSTREAM),
    UpstreamField("lora.targets", "adapter", "targets", lambda c: sorted(c.lora.targets) if c.lora.rank else UPSTREAM),
    UpstreamField("optimizer.clip_grad", "optimizer", "clip_grad"),
    UpstreamField("optimizer.beta_1", "adam", "beta_1"),
    UpstreamField("optimizer.beta_2", "adam", "beta_2"),
    UpstreamField("optimizer.epsilon", "adam", "eps"),
    UpstreamField("optimizer.learning_rate", "scheduler", "max_lr"),
    UpstreamField("optimizer.least_learning_rate", "scheduler", "min_lr"),
    UpstreamField("optimizer.schedule", "scheduler", "lr_decay_style"),
    UpstreamField("optimizer.warmup_steps", "scheduler", "lr_warmup_steps"),
    UpstreamField("optimizer.weight_decay", "scheduler", "end_wd"),
)  # fmt: skip


def provider_overrides(config: TrainConfig) -> dict[str, Any]:
    """Fields of the bridge's provider that the knobs set, besides the type and the mesh."""
    rows = [
        (row.field, row.asked(config))
        for row in FIELDS
        if row.part == "model" and row.knob.startswith(("megatron.", "grpo."))
    ]
    fused = {"moe_router_fusion": False} if config.grpo.replay_routes else {}  # it ignores routes
    return {field: value for field, value in rows if value is not UPSTREAM} | fused


def asked(config: TrainConfig) -> dict[str, str]:
    """Knob -> value that a config asks of the upstream field, as text; without those that it leaves to upstream."""
    values = {row.knob: row.asked(config) for row in FIELDS}
    return {knob: text_of([value]) for knob, value in values.items() if value is not UPSTREAM}


def found(parts: Mapping[Part, Iterable[Any]]) -> dict[str, str]:
    """Knob -> value that the live objects of each part hold, as text; all of them where they differ.

    Raises:
        AttributeError: an upstream object has lost a field of the table.
    """
    objects = {part: list(items) for part, items in parts.items()}
    return {row.knob: text_of([getattr(item, row.field) for item in objects[row.part]]) for row in FIELDS}


def text_of(values: Iterable[Any]) -> str:
    """Write equal values once, and different ones one after another."""
    return " | ".join(sorted({_text(value) for value in values}))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return repr(float(value)) if isinstance(value, int | float) else str(value).removeprefix("torch.")
