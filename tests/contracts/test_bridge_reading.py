"""What megatron-bridge ignores of config.json is named, for real configs of each bug that docs/upstream.md has."""

from __future__ import annotations

from importlib import metadata

import pytest

BRIDGE = f"megatron-bridge {metadata.version('megatron-bridge')}"
IGNORED = "transformers reads of config.json what megatron-bridge ignores"


@pytest.mark.slow
def test_configs_that_the_libraries_read_alike_get_no_note(trainer_launcher, tmp_path):
    """And the others the whole text of theirs."""
    (found,) = trainer_launcher.run("bridge_reading_functions:notes_on_configs", world_size=1, run_dir=tmp_path)
    assert found == {
        "qwen2, window": [
            False,
            f"{IGNORED}: `use_sliding_window` = true, `sliding_window` = 128, `max_window_layers` = 0",
        ],
        "qwen2, published": [False],
        "qwen2, numbers": [False],
        "llama, dynamic": [
            False,
            f'{IGNORED}: `rope_parameters.rope_type` = "dynamic", `rope_parameters.factor` = 2.0',
        ],
        "llama, llama3": [False],
        "gemma3, pattern": [
            False,
            f'{IGNORED}: `layer_types` = ["sliding_attention", "full_attention", "sliding_attention", '
            '"full_attention"]',
        ],
        "minimax_m2, rotary_dim": [
            False,
            "megatron-bridge reads of config.json what transformers ignores: `rotary_dim` = 64",
        ],
        "ernie, dropout": [False, f"{BRIDGE} sets attention_dropout to 0.1, and config.json has none"],
        "glm4_moe, defaults": [False],
        "qwen3, attn_factor": [False],
        "exaone4, untied": [
            True,
            f"{BRIDGE} has no mapping of 1 of 14 checkpoint tensors, so no export can hold them: `lm_head.weight`",
        ],
    }
