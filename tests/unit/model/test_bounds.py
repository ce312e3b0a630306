"""Bounds in the forward pass of generated models: random tokens have values beyond each end, and between.

What this does not exercise: bounds of padding, of overflow, and of divisions by zero; windows, which are shorter than a
round trip's sequences.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from verifier.model.tiny import write_tiny

TOKENS = 128


class Bounded(TorchFunctionMode):
    """Kinds of bounds that a forward pass has, and where values of each lie."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond = defaultdict[str, set[str]](set)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "clamp":
            bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            self.note("clamp", args[0], bounds.get("min"), bounds.get("max"))
        elif name == "tanh":
            self.note("soft cap", args[0], -1.0, 1.0)
        elif name == "masked_fill" and args[2] == -torch.inf and args[0].ndim == 2 and args[1].any():
            self.note("scores of open groups", found.topk(4).values, 0.0, 0.0)
        return found

    def note(self, kind: str, values: torch.Tensor, least: float | None, most: float | None) -> None:
        """Add the ends beyond which there are values."""
        low, high = (
            (values < (least if least is not None else -torch.inf)),
            values > (torch.inf if most is None else most),
        )
        self.beyond[kind] |= {end for end, some in (("below", low), ("above", high)) if some.any()}
        self.beyond[kind] |= {"within"} if not (low | high).all() else set()


@pytest.mark.parametrize(
    ("name", "kind", "ends"),
    [
        ("gpt_oss", "clamp", {"below", "within", "above"}),
        ("gemma2", "soft cap", {"below", "within", "above"}),
        ("nemotron-h", "clamp", {"below", "within"}),  # `time_step_min`, which has no other end
        ("deepseek-v3", "scores of open groups", {"below", "above"}),
    ],
)
def test_values_lie_beyond_each_end(name: str, kind: str, ends: set[str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny(name, tmp_path), attn_implementation="eager").eval()
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), Bounded() as seen:
        model(ids)
    assert dict(seen.beyond).keys() == {kind}
    assert seen.beyond[kind] == ends


@pytest.mark.parametrize("name", ["llama", "qwen3-yarn", "deepseek-v3-yarn"])
def test_pairs_of_a_scaled_rope_lie_beyond_both_of_its_borders_and_between(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny(name, tmp_path))
    rope, found = model.config.rope_parameters, model.model.rotary_emb.inv_freq.double()
    plain = rope["rope_theta"] ** -(torch.arange(len(found), dtype=torch.float64) / len(found))
    stretched = plain / found
    assert torch.isclose(stretched, torch.ones(1).double(), rtol=1e-5).sum() > 1  # the first alone has no border
    assert torch.isclose(stretched, torch.full([1], rope["factor"]).double(), rtol=1e-5).sum() > 1
    assert ((stretched > 1.01) & (stretched < 0.99 * rope["factor"])).any()
