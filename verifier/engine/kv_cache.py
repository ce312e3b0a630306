"""Keys and values that an engine keeps: bytes for sequences of a length, and blocks of a cache; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifier.config import EngineOptions
from verifier.config_json import keeps_states, text_model
from verifier.engine.api import LEAST_KV_CACHE_BYTES, Sampling
from verifier.errors import UsageError
from verifier.model.families import size_if_any

MOST_KV_CACHE_BYTES = 1 << 30
"""Greatest cache on a CPU that is taken where none is asked for, unless one sequence takes more."""
OWN_SHARE, LENT_SHARE = 0.8, 0.3
"""Greatest share of what the weights leave of a GPU, on an engine's own one, and beside a trainer that stays on it."""
_BLOCK = 128
"""Tokens to a multiple of which a sequence is counted: vLLM's blocks have 16, 32, 64 or 128."""
_BYTES = {"float32": 4, "bfloat16": 2}


def bytes_per_token(sizes: Mapping[str, Any], dtype: str, engine: EngineOptions) -> int | None:
    """Bytes of one token's keys and values, of the dtype of the weights, on the engine rank with most layers.

    None for a model whose layers keep states, or one that does not say its sizes.
    """
    layers, hidden, heads = (
        size_if_any(sizes, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if keeps_states(sizes) or layers is None or hidden is None or not heads:
        return None
    latent, layers = size_if_any(sizes, "kv_lora_rank"), -(-layers // engine.pp)
    if latent is not None:  # one vector for all heads, on every rank
        return layers * (latent + (size_if_any(sizes, "qk_rope_head_dim") or 0)) * _BYTES[dtype]
    kv_heads = max(1, (size_if_any(sizes, "num_key_value_heads") or heads) // engine.tp)
    return layers * 2 * kv_heads * (size_if_any(sizes, "head_dim") or hidden // heads) * _BYTES[dtype]


def cache_bytes(
    asked_gib: float | None, sizes: Mapping[str, Any], *, dtype: str, engine: EngineOptions, length: int, count: int,
    most: float = MOST_KV_CACHE_BYTES,
) -> int:  # fmt: skip
    """Bytes of an engine rank's cache.

    Without `asked_gib` there is room for all `count` sequences of `length` tokens at once, at least 128 MiB and at most
    `most` bytes, or for one sequence.

    Raises:
        UsageError: one sequence does not fit what is asked for; names the numbers.
    """
    each = bytes_per_token(sizes, dtype, engine)
    if asked_gib is not None:
        asked = int(asked_gib * 2**30)
        if each is not None and _keeps_all(sizes) and asked < each * length:
            raise UsageError(
                f"engine.kv_cache_gib is {asked_gib:g}, and one sequence of {length:,} tokens takes "
                f"{each * length / 2**30:.3g} GiB of an engine rank: raise it, or leave it out"
            )
        return asked
    if each is None:
        return LEAST_KV_CACHE_BYTES
    one = -(-length // _BLOCK) * _BLOCK * each
    return int(max(LEAST_KV_CACHE_BYTES, min(one * count, most), one + _BLOCK * each))


def holds_all(prompts: Sequence[Sequence[int]], requests: Sequence[Sampling], num_blocks: int, block_size: int) -> bool:
    """Tell whether no request of a batch can be preempted: one that is, within its prompt, finds its own blocks cached.

    A cache has `num_blocks` of `block_size` tokens, one of which vLLM keeps to itself.
    """
    sizes = ((asked.n, len(prompt) + asked.max_tokens) for prompt, asked in zip(prompts, requests, strict=True))
    return sum(n * -(-size // block_size) for n, size in sizes) < num_blocks


def most_on_gpu(share: float, device_bytes: int, weight_bytes: int, engine: EngineOptions) -> float:
    """Bytes of a cache on a GPU, at most: a share of what the weights of an engine rank leave of it."""
    return share * max(device_bytes - weight_bytes / engine.ranks, 0.0)


def _keeps_all(sizes: Mapping[str, Any]) -> bool:
    sizes = text_model(sizes)
    return sizes.get("sliding_window") is None and not {*(sizes.get("layer_types") or ())} - {"full_attention"}


def kept_keys(engine: Any) -> list[tuple[int, int]]:
    """Return what an engine keeps of the keys of its past, as it is asked in its own process.

    Source:
        vLLM 0.21, `BlockPool.cached_block_hash_to_block`, which a reset empties and every lookup reads, and
        `Request.num_computed_tokens`, from which a request goes on. An engine of transformers keeps nothing.

    Returns:
        Blocks that it would give to new prompts, and tokens of running requests whose keys it has; one pair.
    """
    model = getattr(engine, "_llm", None)
    if model is None:
        return [(0, 0)]
    scheduler = model.llm_engine.engine_core.engine_core.scheduler
    running = sum(item.num_computed_tokens for item in scheduler.requests.values())
    return [(len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block), running)]
