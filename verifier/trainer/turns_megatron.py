"""Turns of a trainer and an engine on the same GPUs.

The engine sleeps while the trainer steps, and the trainer's state is on the host while the engine samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from verifier.train.offload_megatron import HostState
from verifier.trainer.observer import RankObserver
from verifier.trainer.weight_sync_megatron import WeightSync

STEPS = ("score", "train", "sync")
"""Calls that begin or go on with a step: the engine sleeps until the next transfer."""
VISITS = ("save", "export")
"""Calls between steps: the engine keeps its weights on the host meanwhile, and goes on afterwards."""


class Turns:
    """Turns of trainer and engine on the GPUs of one rank, the engine's first. Every method is a collective.

    Args:
        sync: link to the engine.
        device: of this rank.
        tensors: the rank's state.
        observer: told when the state leaves the GPU and when it is back.

    Attributes:
        facts: metrics of the last time on the host.
    """

    def __init__(
        self, sync: WeightSync, device: torch.device, tensors: Callable[[], Iterable[torch.Tensor]],
        observer: RankObserver,
    ) -> None:  # fmt: skip
        self._sync, self._tensors, self._observer = sync, tensors, observer
        self._state, self._device = HostState(device), device
        self.facts: dict[str, float] = {}
        sync.before_caches = self.leave
        self.leave()

    def leave(self) -> None:
        """Move this rank's state to the host."""
        self._observer.on_offload()
        before = torch.cuda.memory_allocated(self._device)
        freed = self._state.leave(self._tensors())
        after = torch.cuda.memory_allocated(self._device)
        self.facts = {"offloaded_gib": freed / 2**30, "left_share": after / before}
        dist.barrier()

    def step(self) -> None:
        """Have the engine sleep until the next transfer, and bring the state back, unless it is there."""
        if self._state.is_away:
            self._sync.rest()
            self._come_back()

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Bring the state back for the body; the engine keeps its weights meanwhile."""
        if not self._state.is_away:
            yield
            return
        self._sync.rest(level=1)
        self._come_back()
        yield
        self.leave()
        self._sync.wake()

    def _come_back(self) -> None:
        self._state.come_back()
        self._observer.on_onload()

    @contextlib.contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Have the state here for the body, if a call of that name needs it."""
        if call in STEPS:
            self.step()
        with self.visit() if call in VISITS else contextlib.nullcontext():
            yield
