"""Runs on a rank; see test_bridges.py."""

from __future__ import annotations

from verifier.launch.rank import RankContext


def bridges_are_those_that_its_source_registers(context: RankContext) -> None:
    """`bridged` reads files alone, and names what the registry of causal language models holds."""
    from megatron.bridge import AutoBridge

    from verifier.model.bridges import bridged

    registered = {name for name in AutoBridge.list_supported_models() if name.endswith("ForCausalLM")}
    found = {name for name in bridged() if name.endswith("ForCausalLM")}
    assert len(found) > 30
    assert registered == found
    assert "ExaoneMoEForCausalLM" in found, "a second spelling of ExaoneMoeForCausalLM, registered by a function"


def no_loss_but_the_policys_is_left_on(context: RankContext) -> None:
    """The bridge of EXAONE MoE asks for a balancing loss, a z-loss, updates of the score bias and a loss of MTP."""
    from megatron.bridge import AutoBridge
    from transformers import ExaoneMoeConfig

    from verifier.mesh import Mesh
    from verifier.model.provider_megatron import _configure

    config = ExaoneMoeConfig(architectures=["ExaoneMoeForCausalLM"])
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor")
    assert all(getattr(provider, name) for name in names)
    _configure(provider, Mesh(), "float32", "cpu")
    assert not any(getattr(provider, name) for name in names)
    assert provider.moe_router_load_balancing_type == "none"
