"""Small generated checkpoints: the same bytes on every machine; no two tensors, rows, heads or experts are alike.

The hidden size is no power of two and every other size is divided by powers of two. So no matrix is square, whole or
cut by tensor parallelism, and a transpose never fits. Only q_proj and o_proj of Qwen2 are square by definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verifier.data.arithmetic import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, tokenizer_files
from verifier.model.families import JSON
from verifier.model.generated import generate, generated_config, rows_of, write_checkpoint

PREFIX = "tiny:"

TINY = rows_of("tiny")
"""Model id without "tiny:" -> (family, keys of config.json)."""
_TOKENIZER: dict[str, JSON] = {
    "vocab_size": len(VOCABULARY), "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID
}  # fmt: skip
TO_TRAIN = {name: (family, {**config, **_TOKENIZER}) for name, (family, config) in rows_of("to_train").items()}
"""Like `TINY`, models that learn a task from their generated weights; each has the character tokenizer.

They are no family of their own, so the round trip's table, noise floors and manifests do not hold them.
"""
PADDED = rows_of("padded")
"""Like `TINY`, a vocabulary that engines pad to a multiple of 64; no family of its own either."""
STRETCHED = rows_of("stretched")
"""Like `TINY`, plain attention with a rope that YaRN stretches; no family of its own either."""
KNOWN = TINY | TO_TRAIN | PADDED | STRETCHED
"""All of them."""
KNOWN_TINY = {PREFIX + item: row for item, row in KNOWN.items()}
"""Full model id -> (family, keys of config.json)."""


def write_tiny(
    name: str,
    directory: Path,
    dtype: str = "float32",
    seed: int = 1,
    *,
    changes: Mapping[str, JSON] | None = None,
) -> Path:
    """Write the tiny checkpoint `name`: a key of `KNOWN`, or an architecture that transformers and Megatron know.

    See `write_checkpoint`, and `write_scaled` for an architecture, which takes no `changes`.
    """
    if name not in KNOWN:
        from verifier.model.architectures_hf import write_scaled

        return write_scaled(name, directory, dtype, seed, others=KNOWN)
    return write_checkpoint(
        PREFIX + name, KNOWN_TINY, directory, dtype=dtype, seed=seed, values=generate, changes=changes,
        texts=tokenizer_files() if name in TO_TRAIN else None,
    )  # fmt: skip


def tiny_config(name: str, dtype: str) -> dict[str, JSON]:
    """Return the config.json that `write_tiny` gives a checkpoint, without writing one."""
    if name not in KNOWN:
        from verifier.model.architectures_hf import scaled_config

        return scaled_config(name, dtype, KNOWN)
    return generated_config(PREFIX + name, KNOWN_TINY, dtype)
