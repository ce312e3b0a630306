"""Published config.json, scaled down to a model of seconds: `tests/published_configs`, by the rules of `tiny:` models.

Every key stays. What `verifier.model.scaling` has a rule for is replaced: sizes, layers by their patterns, heads and
the part of them that is rotated, experts, windows, token ids. Ropes and positions, epsilons, tied heads, layers for
further tokens and keys that no library reads stay as published.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from verifier.config_json import hybrid_pattern
from verifier.model.architectures_hf import specs_of
from verifier.model.families import Content, TensorSpec, copies_of, family_of, tensors_of
from verifier.model.generated import generate, write_once
from verifier.model.scaling import scaled

FOLDER = Path(__file__).parent / "published_configs"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))
"""Published models, without their owners' names."""
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 96}
_KEPT = ("max_position_embeddings", "initial_context_length", "num_nextn_predict_layers")
"""Keys that stay although `verifier.model.scaling` has a rule for them."""
_QUANTIZED = "quantization_config"
_MTP_NORMS = ("enorm", "hnorm")


def published(name: str) -> dict[str, Any]:
    """Return a published config.json."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def scaled_down(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published config.json with the sizes of a tiny model."""
    if isinstance(inner := config.get("text_config"), Mapping):
        text = scaled_down(inner)
        tokens = {key: 500 + i for i, key in enumerate(key for key in config if key.endswith("_token_id"))}
        vision = {**config["vision_config"], **_VISION, "out_hidden_size": text["hidden_size"]}
        return {**config, "text_config": text, "vision_config": vision, **tokens}
    whole, pattern = dict(config), hybrid_pattern(config)
    unstated = CONFIG_MAPPING[config["model_type"]]().to_dict() if "num_attention_heads" not in config else {}
    counted = {**unstated, **whole, **({"num_hidden_layers": len(pattern)} if pattern else {})}
    if "hybrid_override_pattern" in whole:
        counted["hybrid_override_pattern"] = list(whole["hybrid_override_pattern"])
    found: dict[str, Any] = {**counted, **scaled(counted)}
    if pattern and isinstance(found.get("hybrid_override_pattern"), list):
        found["hybrid_override_pattern"] = "".join(found["hybrid_override_pattern"])
    if "attention_head_dim" in whole:  # no rule knows it: the width of a head stays, that of the model need not follow
        found["hidden_size"] = 96
    return {key: whole[key] if key in _KEPT else found[key] for key in whole}


def in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with another dtype where it names one, and without quantization, as after a conversion."""
    kept = {key: value for key, value in config.items() if key != _QUANTIZED}
    kept |= {key: in_dtype(value, dtype) for key, value in kept.items() if key == "text_config"}
    return kept | {key: dtype for key in ("dtype", "torch_dtype") if key in kept}


def write_scaled_down(name: str, directory: Path, dtype: str, *, quantized: bool = False) -> Path:
    """Write the checkpoint of a published model, scaled down; `quantized`: its config says of what kind."""
    config = in_dtype(scaled_down(published(name)), dtype)
    specs = _specs(config)
    if quantized:
        config |= {_QUANTIZED: published(name)[_QUANTIZED]}
    key = hashlib.blake2b(json.dumps(config).encode(), digest_size=6).hexdigest()
    return write_once(directory / f"{name}-{dtype}-{key}", lambda: specs, config, dtype, f"{name}/1", generate, {})


def _specs(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Tensors under their published names: those of the family's row, or as transformers writes them."""
    # Kimi-K2 and DeepSeek-V3.2 are named as DeepSeek-V3 is, and transformers has no class for them.
    as_deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    known = config["model_type"] in CONFIG_MAPPING
    config = {**config, **({} if known else as_deepseek)}
    if (family := family_of(config)) is not None:
        by_name = {spec.name: spec for spec in tensors_of(family, config)}
        copies = [replace(by_name[whole], name=copy) for copy, whole in copies_of(config).items()]
        return [*by_name.values(), *copies]
    if config["model_type"] != "nemotron_h":
        specs = specs_of(CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)), config)
        return _as_qwen35(config, specs) if "text_config" in config and "qwen3_5" in config["model_type"] else specs
    main = {**config, "num_nextn_predict_layers": 0}
    specs = [
        replace(spec, name=spec.name.replace("backbone.embedding.", "backbone.embeddings."))
        for spec in specs_of(CONFIG_MAPPING["nemotron_h"].from_dict(copy.deepcopy(main)), main)
    ]
    return [*specs, *_hybrid_further(config, specs)]


def _as_qwen35(config: Mapping[str, Any], specs: list[TensorSpec]) -> list[TensorSpec]:
    """All experts of a layer in one tensor, as published, and the layer `mtp` like the last one, expert by expert."""
    last, hidden = config["text_config"]["num_hidden_layers"] - 1, config["text_config"]["hidden_size"]
    like = f"model.language_model.layers.{last}."
    further = [replace(spec, name="mtp.layers.0." + spec.name[len(like) :]) for spec in specs if like in spec.name]
    for leaf in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        further.append(TensorSpec(name=f"mtp.{leaf}.weight", shape=(hidden,), content=Content.NORM))
    further.append(TensorSpec(name="mtp.fc.weight", shape=(hidden, 2 * hidden), content=Content.MATRIX))
    count, found = config["text_config"].get("num_experts"), list[TensorSpec]()
    for spec in specs:
        head, is_expert, leaf = spec.name.partition(".experts.")
        if leaf in ("0.gate_proj.weight", "0.down_proj.weight"):
            rows, columns = spec.shape
            gate = leaf == "0.gate_proj.weight"
            name, shape = ("gate_up_proj", (count, 2 * rows, columns)) if gate else ("down_proj", (count, *spec.shape))
            found.append(replace(spec, name=f"{head}.experts.{name}", shape=shape))
        elif not is_expert:
            found.append(spec)
    return [*found, *further]


def _hybrid_further(config: Mapping[str, Any], specs: list[TensorSpec]) -> list[TensorSpec]:
    """Tensors `mtp.layers.N` of Nemotron 3: a layer like one of the model's for each letter of the further pattern."""
    if not config.get("num_nextn_predict_layers"):
        return []
    kinds = {"attention": "*", "moe": "E"}
    letters = config.get("mtp_hybrid_override_pattern") or [kinds[item] for item in config["mtp_layers_block_type"]]
    pattern, hidden, found = hybrid_pattern(config) or "", config["hidden_size"], list[TensorSpec]()
    for layer, letter in enumerate(letters):
        like = f"backbone.layers.{pattern.index(letter)}."
        found += [
            replace(spec, name=re.sub(r"^backbone\.layers\.\d+", f"mtp.layers.{layer}", spec.name))
            for spec in specs if spec.name.startswith(like)
        ]  # fmt: skip
    names = [f"mtp.layers.0.{leaf}.weight" for leaf in _MTP_NORMS]
    names.append(f"mtp.layers.{len(letters) - 1}.final_layernorm.weight")
    found += [TensorSpec(name=name, shape=(hidden,), content=Content.NORM) for name in names]
    return [
        *found,
        TensorSpec(name="mtp.layers.0.eh_proj.weight", shape=(hidden, 2 * hidden), content=Content.MATRIX),
    ]
