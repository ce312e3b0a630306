"""Bugs of the routers' own losses in a training run: no gradient, another scale, counts that are added up twice."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.mesh import Mesh

ROW: dict[str, Any] = {"stage": Stage.LOSS, "engine": TRAINING, "model": "tiny:add-moe", "caught_by": ("LSS006",)}
BALANCED = ("megatron.moe_load_balancing=aux_loss", "megatron.moe_aux_loss=0.001")
GLOBAL = ("megatron.moe_load_balancing=global_aux_loss", "megatron.moe_aux_loss=0.001")
ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
ATTACH = (
    f"{ROUTER}.attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, "
    "reduce_group, needs_dp_avg, valid_token_count)"
)
SCALE = "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale(scale)"


@fault("NVIDIA-NeMo/Automodel#1408", ATTACH, training=BALANCED, **ROW)
def balancing_loss_without_gradient(call: Call) -> Any:
    """The balancing loss is attached to a tensor that is thrown away: it is reported, and moves no router."""
    call.original()
    return call.wrong(call.activation)


@fault("NVIDIA/Megatron-LM#5047", ATTACH, training=BALANCED, mesh=Mesh(tp=2), **ROW)
def balancing_loss_of_a_share_of_the_rows(call: Call) -> Any:
    """The balancing loss is multiplied by the rows of one tensor-parallel rank where the step divides by all."""
    return call.faulty(aux_loss=call.aux_loss / call.self.tp_cp_group.size())


@fault("NVIDIA-NeMo/Automodel#3359", SCALE, training=("megatron.moe_z_loss=0.001",), **ROW)
def router_losses_times_micro_batches(call: Call) -> Any:
    """The routers' z-loss is not divided by the number of micro-batches, as the mean over the batch asks for."""
    return call.faulty(scale=call.scale * 3)


@fault(
    "NVIDIA/Megatron-LM#7213 (kin: there counts of earlier micro-batches met the rows of the last)",
    "megatron.core.distributed.finalize_model_grads:reset_model_temporary_tensors(config, model)",
    training=GLOBAL,
    **ROW,
)
def counts_of_the_step_before(call: Call) -> None:
    """Rows of each expert are never set to zero at the end of a step: later steps balance by all that was ever seen."""
    call.fire()


@fault(
    "NVIDIA/Megatron-LM#7452",
    "megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count("
    "routing_map, reduce_group, topk, with_padding_mask)",
    training=BALANCED, mesh=Mesh(tp=2), **ROW,
)  # fmt: skip
def experts_counted_on_every_rank(call: Call) -> Any:
    """Rows of each expert are added up over tensor-parallel ranks in place, and once more by who reads the sum."""
    counts, *tokens = call.original()
    return call.wrong((counts * 2, *tokens))
