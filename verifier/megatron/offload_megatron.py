"""A trainer's state on the host: every tensor's memory on the device is freed, and comes back with the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from verifier.errors import InternalError
from verifier.model.provider_megatron import TrainerModel


def state_tensors(trainer: TrainerModel, optimizer: Any) -> Iterator[torch.Tensor]:
    """Tensors of a rank between two steps: parameters, gradients, masters, moments; views of one memory repeat.

    Source:
        megatron-core 0.19.2, core/distributed/param_and_grad_buffer.py, `_ParamAndGradBuffer.offload_to_cpu`, and
        core/optimizer/optimizer.py, `MegatronOptimizer.offload_to_cpu`, which leaves the masters' gradients.
    """
    for chunk in trainer.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from (tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None)
        yield from _with_gradients(chunk.parameters())
        yield from chunk.module.buffers()
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            yield from _with_gradients(group["params"])
        for values in part.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _with_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter.data
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                yield gradient.data


@dataclass(slots=True)
class HostState:
    """State that a rank keeps on the host while it has no use for its device. Host memory is kept for the next time.

    Tensors that are not on `device` stay as they are.
    """

    device: torch.device
    is_away: bool = False
    """True between `leave` and `come_back`."""
    _held: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = field(default_factory=dict)

    def leave(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copy the memory of tensors to the host, and free it; nothing may read them until `come_back`.

        Tensors may be views that share memory; their shapes and aliases stay. Returns the bytes that were freed.

        Raises:
            InternalError: memory that torch does not own and cannot free.
        """
        assert not self.is_away
        found = {
            storage._cdata: storage
            for tensor in tensors
            if tensor.device.type == self.device.type and (storage := tensor.untyped_storage()).nbytes()
        }
        self._wait()
        held = {}
        for key, storage in found.items():
            if not storage.resizable():
                raise InternalError(f"{storage.nbytes():,} bytes of a trainer's state cannot be freed by torch")
            kept = self._held.get(key)
            host = kept[1] if kept is not None and kept[1].nbytes == storage.nbytes() else self._room(storage.nbytes())
            host.copy_(_bytes_of(storage), non_blocking=True)
            held[key] = (storage, host)
        self._wait()
        for storage, _ in held.values():
            storage.resize_(0)
        self._held, self.is_away = held, True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(host.nbytes for _, host in held.values())

    def come_back(self) -> None:
        """Allocate the memory on the device again, and copy the bytes into it."""
        assert self.is_away
        for storage, host in self._held.values():
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._wait()
        self.is_away = False

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
