"""Rollouts that are sampled while steps before theirs train: whole, or in parts between which new weights come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifier.config import TrainConfig
from verifier.data.recorded import RolloutRow
from verifier.errors import InternalError
from verifier.launch.child import in_thread
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.sampled_batch import SampledBatch

if TYPE_CHECKING:
    from verifier.runs.resources import Deadline


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A batch of the queue."""

    step: int
    held: list[int]
    """Versions that the engine has held since the batch was begun, in order."""
    sampled: SampledBatch | None = None
    """None until it is sampled to its end."""


class AheadRollouts:
    """A `RolloutSource` with a queue of up to `grpo.max_staleness` batches, each of which a step takes once.

    A batch is begun when it comes within the bound of the step that trains, so what is sampled depends on (seed, step)
    alone, not on who is faster. The thread that samples has the engine's client to itself from `rollouts` to `pause`.
    `pause` waits until the deadline `until`; each request to the engine and each reward has its own.
    """

    def __init__(self, config: TrainConfig, engine: EngineRollouts, until: Deadline) -> None:
        self._config, self._engine, self._until = config, engine, until
        self._inflight = config.grpo.mode == "inflight"
        self.facts: Mapping[str, float] = {}
        self._queue = deque[_Batch]()
        self._thread: Future[None] | None = None

    @property
    def runs(self) -> bool:
        """True while the engine holds requests that are not at their end."""
        return self._inflight and any(batch.sampled is None for batch in self._queue)

    def rollouts(self, step: int) -> tuple[Sequence[RolloutRow], str]:
        """Rollouts of a step, sampled before; later ones are begun, from the weights that the engine holds."""
        batch = self._take(step)
        self.facts = batch.facts
        last = self._queue[-1].step if self._queue else step
        steps = range(last + 1, min(step + self._config.grpo.max_staleness, self._config.steps) + 1)
        begun = [_Batch(step=later, held=[step - 1]) for later in steps]
        self._queue += begun
        self._thread = in_thread(lambda: self._sample(begun), "sampler") if begun else None
        return self._engine.handed_on(step, batch)

    def pause(self) -> None:
        """Wait until the engine computes nothing, before its weights are updated; raise the error of its thread."""
        if self._thread is None:
            return
        step = self._queue[-1].step
        left_s = self._until.left(f"the rollouts of step {step} were waited for")
        try:
            self._thread.result(left_s)
        except TimeoutError as problem:
            if self._thread.done():
                raise  # of the sampler itself, which names what did not answer
            raise InternalError(
                f"the engine and the reward have not made the rollouts of step {step} before the end of --timeout, "
                f"{left_s:.0f} s after they were waited for"
            ) from problem

    def resume(self, held: int | None) -> None:
        """Sample what the next step takes to its end, once the step that made the new weights has held.

        The engine holds the version `held`; None if there was no update.
        """
        self.pause()
        for batch in self._queue:
            if batch.sampled is None and held is not None:
                batch.held.append(held)
        if self._queue:
            self._finish(self._queue[0])

    def saved(self) -> list[Any]:
        """The batches of the queue, as `restore` takes them; the engine first samples them all to their end."""
        self.pause()
        return [self._finish(batch).saved() for batch in self._queue]

    def restore(self, step: int, batches: Sequence[Any]) -> None:
        """Take the batches of a step and of those after it that `saved` gave before a stop."""
        for later, rounds in enumerate(batches, step):
            self._queue.append(_Batch(step=later, held=[], sampled=self._engine.restored(later, rounds)))

    def _take(self, step: int) -> SampledBatch:
        if not self._queue:  # the first step, or the first after a last one
            return self._engine.sample_now(step)
        self.pause()
        batch = self._queue.popleft()
        if batch.step != step or batch.sampled is None:
            raise InternalError(f"the rollouts of step {step} have not been sampled to their end")
        return batch.sampled

    def _sample(self, begun: Sequence[_Batch]) -> None:
        for batch in begun:
            if self._inflight:
                self._engine.begin(batch.step, last=batch is begun[-1])
            else:
                batch.sampled = self._engine.sample(batch.step, batch.held[0])

    def _finish(self, batch: _Batch) -> SampledBatch:
        if batch.sampled is None:
            batch.sampled = self._engine.finish(batch.step, batch.held)
        return batch.sampled
