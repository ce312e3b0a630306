"""Runs on a rank; see test_bridge_reading.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifier.launch.rank import RankContext

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}),
    "qwen2, published": ("Qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
    "qwen2, numbers": ("Qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}}),
    "llama, llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_theta": 5e5,
            }
        },
    ),
    "gemma3, pattern": (
        "Gemma3", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "minimax_m2, rotary_dim": ("MiniMaxM2", {"head_dim": 128, "rotary_dim": 64}),
    "ernie, dropout": ("Ernie4_5_Moe", {}),
    "glm4_moe, defaults": ("Glm4Moe", {}),
    "qwen3, attn_factor": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attn_factor": 0.9,
                "original_max_position_embeddings": 8192, "rope_theta": 1e6,
            }
        },
    ),
    "exaone4, untied": ("Exaone4", {}),
}  # fmt: skip
"""Case -> prefix of the architecture, and the keys of its config.json that are not the class's defaults."""


def notes_on_configs(context: RankContext) -> dict[str, Any]:
    """Notes on each config, for one layer of tensors that its mappings name, and an output layer."""
    import transformers

    from verifier.model.bridge_reading_megatron import bridge_of, names_in, notes_on, read_bridge

    found = {}
    for number, (case, (prefix, keys)) in enumerate(CONFIGS.items()):
        architecture = f"{prefix}ForCausalLM"
        kind = getattr(transformers, architecture).config_class
        folder = Path(context.run_dir) / str(number)
        folder.mkdir()
        config = {"model_type": kind.model_type, "architectures": [architecture], **keys}
        (folder / "config.json").write_text(json.dumps(config))
        registry = bridge_of(kind(architectures=[architecture]))._model_bridge.mapping_registry()
        names = {name.replace("*", "0") for item in registry for name in names_in(item.hf_param)}
        if prefix != "Gemma3":  # the others' are not tied
            names.add("lm_head.weight")
        reading = read_bridge(folder, names)
        found[case] = [reading.headless, *notes_on(reading, len(names))]
    return found
