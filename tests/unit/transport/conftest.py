"""The host as the rings of CUDA IPC see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.transport.ring_case import Event, Stream
from verifier.transport import cuda_ipc


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """GPUs that are names of threads; `released` lists whose rings were given up unread."""
    found: dict[str, Any] = {"memory": {}, "released": [], "released_by": [], "gpu_of": {}}

    def gpu() -> str:
        name = threading.current_thread().name
        return found["gpu_of"].get(name, "GPU-" + ("0" if name == "MainThread" else name.split("_")[0][-1]))

    def describe(memory: torch.Tensor) -> dict[str, Any]:
        found["memory"][memory.data_ptr()] = memory
        return {"gpu": gpu(), "num_bytes": memory.numel(), "values": memory.data_ptr()}

    def release(record: dict[str, Any]) -> None:
        found["released"].append(record["gpu"])
        found["released_by"].append(threading.current_thread().name)

    monkeypatch.setattr(cuda_ipc, "gpu_uuid", gpu)
    monkeypatch.setattr(cuda_ipc, "allocate", lambda n: torch.full((n + 16,), 255, dtype=torch.uint8)[:n])
    monkeypatch.setattr(cuda_ipc, "describe", describe)
    monkeypatch.setattr(
        cuda_ipc, "open_buffer", lambda record: torch.from_numpy(found["memory"][record["values"]].numpy())
    )
    monkeypatch.setattr(cuda_ipc, "release", release)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield found
    Event.known.clear()
