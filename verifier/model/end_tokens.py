"""End tokens that a checkpoint names beside its tokenizer."""

from __future__ import annotations

import json

from verifier.model.checkpoint import Checkpoint


def end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ids of `eos_token_id` in config.json and generation_config.json: an engine stops there by itself."""
    file = checkpoint.path / "generation_config.json"
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = [source.get("eos_token_id") for source in (checkpoint.config, given) if isinstance(source, dict)]
    ids = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return frozenset(item for item in ids if isinstance(item, int))
