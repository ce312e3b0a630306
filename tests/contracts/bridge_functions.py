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
    assert registered - {"ExaoneMoEForCausalLM"} == found, "the exception is a second spelling of ExaoneMoeForCausalLM"
