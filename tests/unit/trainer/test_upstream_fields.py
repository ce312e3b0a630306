"""The table of knobs that reach Megatron: complete, and every knob turned changes what is asked for.

What this does not exercise: that the values arrive (tests/dist/test_train_knobs.py, CFG001).
"""

from __future__ import annotations

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.knob import entries
from verifier.trainer.upstream_fields import FIELDS, asked, found, provider_overrides, text_of

TURNED = {
    "megatron.distributed_optimizer": "megatron.distributed_optimizer=false megatron.overlap_param_gather=false",
    "megatron.overlap_grad_reduce": "megatron.overlap_grad_reduce=false megatron.overlap_param_gather=false",
    "megatron.overlap_param_gather": "megatron.overlap_param_gather=false",
    "megatron.grad_reduce_in_fp32": "megatron.grad_reduce_in_fp32=false dtype=bf16",
    "megatron.bucket_size": "megatron.bucket_size=1000",
    "megatron.rope_fusion": "megatron.rope_fusion=false",
    "megatron.recompute": "megatron.recompute=full",
    "megatron.recompute_method": "megatron.recompute=full megatron.recompute_method=block",
    "megatron.recompute_layers": "megatron.recompute=full megatron.recompute_layers=2",
    "megatron.recompute_modules": "megatron.recompute=selective megatron.recompute_modules=[mlp,layernorm]",
    "megatron.moe_load_balancing": "megatron.moe_load_balancing=seq_aux_loss megatron.moe_aux_loss=0.001",
    "megatron.moe_aux_loss": "megatron.moe_load_balancing=aux_loss megatron.moe_aux_loss=0.001",
    "megatron.moe_z_loss": "megatron.moe_z_loss=0.001",
    "megatron.moe_bias_update_rate": "megatron.moe_bias_update_rate=0.001",
    "megatron.mtp_loss_scaling_factor": "megatron.mtp_loss_scaling_factor=0.3",
    "megatron.moe_router_dtype": "megatron.moe_router_dtype=fp64",
    "megatron.use_fsdp": "megatron.use_fsdp=true",
    "megatron.fsdp_sharding": "megatron.use_fsdp=true megatron.fsdp_sharding=optim",
    "megatron.fsdp_prefetch": "megatron.use_fsdp=true megatron.fsdp_prefetch=false",
    "megatron.fsdp_unit_elements": "megatron.use_fsdp=true megatron.fsdp_unit_elements=100000",
    "megatron.optimizer_offload": "megatron.optimizer_offload=0.5",
    "megatron.overlap_optimizer_offload": "megatron.optimizer_offload=1 megatron.overlap_optimizer_offload=true",
    "optimizer.learning_rate": "optimizer.learning_rate=2e-3",
    "optimizer.least_learning_rate": "optimizer.schedule=linear optimizer.least_learning_rate=1e-4",
    "optimizer.schedule": "optimizer.schedule=cosine",
    "optimizer.warmup_steps": "optimizer.warmup_steps=5",
    "optimizer.weight_decay": "optimizer.weight_decay=0.1",
    "optimizer.clip_grad": "optimizer.clip_grad=0.5",
    "optimizer.beta_1": "optimizer.beta_1=0.8",
    "optimizer.beta_2": "optimizer.beta_2=0.99",
    "optimizer.epsilon": "optimizer.epsilon=1e-6",
}


def config(*words: str) -> TrainConfig:
    return load(TrainConfig, overrides=["model=tiny:add", "run=r", *words])[0]


def knobs() -> list[str]:
    return [entry.key for entry in entries(TrainConfig) if entry.key.partition(".")[0] in ("megatron", "optimizer")]


def test_every_knob_of_megatron_and_the_optimizer_has_a_row():
    rows = [row.knob for row in FIELDS]
    assert len(set(rows)) == len(rows)
    assert set(knobs()) <= set(rows)
    assert set(knobs()) == TURNED.keys()


@pytest.mark.parametrize("knob", TURNED)
def test_a_knob_that_is_turned_asks_for_another_value(knob):
    assert asked(config(*TURNED[knob].split())).get(knob) != asked(config()).get(knob)


def test_the_provider_gets_what_the_run_had_before_there_were_knobs():
    assert provider_overrides(config()) == {
        "recompute_granularity": None, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None, "moe_router_bias_update_rate": 0.0, "mtp_loss_scaling_factor": 0.0,
        "moe_enable_routing_replay": False,
    }  # fmt: skip


def test_selective_recomputation_clears_the_fields_of_full():
    fields = provider_overrides(config("megatron.recompute=selective"))
    assert (fields["recompute_method"], fields["recompute_num_layers"]) == (None, None)
    assert fields["recompute_modules"] == ["core_attn"]


def test_objects_that_differ_show_all_their_values():
    assert text_of([1.0, 0.5, 1.0]) == "0.5 | 1.0"
    assert text_of([["mlp", "moe"], True, None]) == "mlp,moe | null | true"


def test_a_field_that_upstream_lost_is_an_error():
    with pytest.raises(AttributeError):
        found({part: [object()] for part in ("model", "ddp", "optimizer", "adam", "scheduler")})
