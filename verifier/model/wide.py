"""Generated checkpoints with the widths of published models and a few of their layers, in bf16.

Widths, head counts and vocabularies are those of the published config.json. Layers are left out, and experts where a
comment in models.yaml says so. Values come from integer hashing of whole tensors, which takes seconds for ten
gigabytes.

Source:
    config.json of Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V3 and nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.errors import UsageError
from verifier.model.families import Content, TensorSpec
from verifier.model.generated import generate, rows_of, write_checkpoint

if TYPE_CHECKING:
    import torch

PREFIX = "wide:"
DTYPE = "bfloat16"
_PIECE = 1 << 22
"""Number of values generated at once; intermediate results then stay in the caches."""

WIDE = rows_of("wide")
"""Model id without "wide:" -> (family, keys of config.json)."""
WIDE_MODELS = {PREFIX + item: row for item, row in WIDE.items()}
"""The same by their full ids."""


def require_published_dtype(name: str, dtype: str) -> None:
    """Raise a UsageError for a wide checkpoint in another dtype than bfloat16."""
    if name in WIDE and dtype != DTYPE:
        raise UsageError(f"`{PREFIX}{name}` has the published dtype, so it takes --dtype bf16")


def write_wide(name: str, directory: Path, dtype: str = DTYPE) -> Path:
    """Write the wide checkpoint `name`, a key of `WIDE`; see `write_checkpoint`.

    Raises:
        UsageError: as there, and another dtype than bfloat16.
    """
    require_published_dtype(name, dtype)
    return write_checkpoint(PREFIX + name, WIDE_MODELS, directory, dtype=dtype, seed=1, values=hashed)


def hashed(spec: TensorSpec, dtype: str, stream: str) -> torch.Tensor:
    """Generate one tensor with the distribution of `generated.generate`, fast for matrices.

    A matrix element is its index, hashed together with the tensor's name in 32-bit integer arithmetic and rounded once
    to float32 and once to bf16. So it is the same on every machine.
    """
    if spec.content is not Content.MATRIX:
        return generate(spec, dtype, stream)
    import torch

    digest = hashlib.blake2b(f"{stream}/{spec.name}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
    values = torch.empty(math.prod(spec.shape), dtype=getattr(torch, dtype))
    scale = math.sqrt(3.0 / spec.shape[-1]) / 2.0**31
    for begin in range(0, values.numel(), _PIECE):
        piece = values[begin : begin + _PIECE]
        number = torch.arange(begin, begin + piece.numel(), dtype=torch.int32)
        for key, factor in ((first, 0x2C1B3C6D), (second, 0x297A2D39)):
            number.bitwise_xor_(key)
            number.bitwise_xor_(number.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
            number.mul_(factor)
        number.bitwise_xor_(number.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
        piece.copy_(number.to(torch.float32).add_(0.5).mul_(scale))
    return values.view(spec.shape)
