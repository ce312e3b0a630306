"""One engine driven through weight updates, as the tests of this folder and nobody else need it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.processes import alive
from verifier.engine.client import EngineClient
from verifier.engine.sender import Delivery, agree, connect, deliver
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan
from verifier.plan.digest import digest_tensor
from verifier.transport.gloo import GlooGroup, Listener


def sequences(count: int = 6, vocab_size: int = 512, seed: int = 5) -> list[list[int]]:
    """Random token sequences of 2 to 180 tokens: some fill more than one block of the engine's cache."""
    rng = random.Random(seed)
    lengths = [2, 3, 180, *(rng.randint(5, 60) for _ in range(count - 3))]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def write_perturbed(source: Path, target: Path, seed: int) -> Path:
    """A checkpoint of the same names, dtypes and shapes, every tensor moved by about a tenth of its size."""
    checkpoint = open_checkpoint(source)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        noise = torch.randn(tensor.shape, generator=generator) * 0.1 * tensor.float().std().clamp(min=1e-3)
        tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(checkpoint.config))
    return target


def plan_of(checkpoint: Checkpoint, chunk_bytes: int) -> ChunkPlan:
    """The checkpoint's tensors in an order that interleaves layers, so that no layer is complete within a chunk."""
    names = sorted(checkpoint.names(), key=lambda name: (name.rsplit(".", 2)[-2:], name))
    metas = [(name, checkpoint.meta(name)) for name in names]
    return build_plan(
        [TensorMeta(name=name, dtype=meta.dtype, shape=meta.shape) for name, meta in metas], chunk_bytes=chunk_bytes
    )


@dataclass
class Case:
    """An engine with its transfer group."""

    engine: EngineClient
    group: GlooGroup

    @classmethod
    def open(cls, engine: EngineClient, num_ranks: int) -> Case:
        return cls(engine, connect(engine, Listener(num_ranks, deadline_s=60)))

    def sync(self, path: Path, chunk_bytes: int = 60_000) -> list[Delivery]:
        """Send a whole checkpoint; every receipt must confirm every tensor."""
        checkpoint = open_checkpoint(path)
        plan = plan_of(checkpoint, chunk_bytes)
        agree(self.engine, self.group, plan)
        deliveries = list(deliver(self.engine, self.group, plan, read(checkpoint, plan)))
        self.engine.finish_update(1)
        expected = {name: digest_tensor(checkpoint.read(name)) for name in checkpoint.names()}
        for delivery in deliveries:
            for receipt in delivery.receipts:
                assert receipt.refused is None
                metas = delivery.packed.chunk.tensors
                assert [(item.name, item.dtype, item.shape) for item in receipt.received] == [
                    (meta.name, meta.dtype, meta.shape) for meta in metas
                ]
                assert [item.digest for item in receipt.received] == [expected[meta.name] for meta in metas]
                assert receipt.loaded
        return deliveries


def read(checkpoint: Checkpoint, plan: ChunkPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """The plan's tensors, from the checkpoint."""
    return ((meta.name, checkpoint.read(meta.name)) for meta in plan.tensors)


def worst_gap(actual: list[list[float]], expected: list[torch.Tensor]) -> float:
    """Greatest absolute difference in nats; NaN if anything is NaN."""
    return max(
        float((torch.tensor(row) - want).abs().max()) if not torch.tensor(row).isnan().any() else float("nan")
        for row, want in zip(actual, expected, strict=True)
    )


def slices_that_differ(engine: EngineClient, path: Path) -> list[str]:
    """Checkpoint tensors that some engine rank holds with other contents, or not at all."""
    checkpoint = open_checkpoint(path)
    wrong = []
    for rank, held in enumerate(engine.checkpoint_view()):
        for item in held:
            want = checkpoint.read(item.name)[tuple(slice(begin, end) for begin, end in item.box)]
            if digest_tensor(want.contiguous()) != item.digest or tuple(want.shape) != item.shape:
                wrong.append(f"rank {rank}: {item.name} in {item.holder}")
        wrong += [f"rank {rank}: {name}" for name in set(checkpoint.names()) - {item.name for item in held}]
    return wrong


def group_members(leader: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader and alive(int(entry.name)):
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members
