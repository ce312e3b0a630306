"""A JSON value from every rank to every rank, as bytes in tensors: nothing is pickled, so nothing can run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

JSON = Any


def gather_json(value: JSON) -> list[JSON]:
    """Return the values of all ranks, in rank order; floats keep every bit. A collective of the whole world."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()]))
    longest = max(int(length) for length in lengths)
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - mine.numel())))
    return [json.loads(bytes(row[: int(length)].tolist())) for row, length in zip(rows, lengths, strict=True)]


def agree(text: str) -> bool:
    """Tell every rank whether all have the same text. A collective of the whole world, of 64 bytes a rank."""
    mine = torch.frombuffer(bytearray(hashlib.blake2b(text.encode(), digest_size=32).digest()), dtype=torch.int64)
    both = torch.cat([mine, ~mine])
    dist.all_reduce(least := both.clone(), dist.ReduceOp.MIN)
    return torch.equal(least, both)
