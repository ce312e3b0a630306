"""Attention in slices of queries: the numbers of transformers' whole attention, in less memory, and who has it.

transformers computes a softmax in float32 in a float64 model too; here in float64, so that numbers tell more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from verifier.model import attention_hf
from verifier.model.attention_hf import SLICED, attend_in_slices
from verifier.oracle.streaming_hf import StreamedModel, Tape

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "head_dim": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": [
        "sliding_attention", "full_attention",
    ]},
    "deepseek_v3": LATENT,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _softmax_of_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda values, dim, dtype=None: softmax(values, dim=dim))


def _model(family: str, **more: int) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | more)
    asked = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **asked).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks") or weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def _ids(count: int) -> torch.Tensor:
    return torch.randint(1, 40, (2, count), generator=torch.Generator().manual_seed(5))


def _both(model: Any, monkeypatch: pytest.MonkeyPatch, call: Any) -> Iterator[Any]:
    """What is found by the whole attention, and by slices of some 5 of 150 queries."""
    yield call(model)
    attend_in_slices(model)
    assert model.config._attn_implementation == SLICED
    monkeypatch.setattr(attention_hf, "SCORES_BYTES", 5 * 2 * 4 * 150 * 8)
    yield call(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_have_the_logits_and_gradients_of_the_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(model: Any) -> list[torch.Tensor]:
        logits = model(input_ids=_ids(150), use_cache=False).logits
        slopes = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6), dtype=logits.dtype)
        used = [weight for name, weight in model.named_parameters() if "rotary" not in name]
        found = torch.autograd.grad((logits * slopes).sum(), used, allow_unused=True)
        return [logits.detach(), *(slope for slope in found if slope is not None)]

    whole, sliced = _both(_model(family), monkeypatch, call)
    assert len(whole) == len(sliced) > 10
    for one, other in zip(whole, sliced, strict=True):
        assert (one - other).abs().max() <= 1e-12 * one.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_slices_go_on_from_keys_and_values_before_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.inference_mode()
    def call(model: Any) -> torch.Tensor:
        past = DynamicCache(config=model.config)
        first = model(input_ids=_ids(150)[:, :60], past_key_values=past).logits
        then = model(input_ids=_ids(150)[:, 60:], past_key_values=past).logits
        return torch.cat([first, then], dim=1)

    whole, sliced = _both(_model(family), monkeypatch, call)
    assert (whole - sliced).abs().max() <= 1e-12 * whole.abs().max()


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return found


def test_no_tensor_is_of_all_queries_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, limit = 8192, 2**24
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    _model("llama", **one).float().save_pretrained(tmp_path)
    monkeypatch.setattr(attention_hf, "SCORES_BYTES", limit)
    model = StreamedModel(tmp_path, torch.float32)
    tape = Tape(model)
    with _Largest() as seen:
        with tape.sequence():
            model.hidden(_ids(count)[:1]).square().sum().backward()
        tape.backward(1, lambda *_: None)
    assert 0 < seen.most <= limit < count * count
