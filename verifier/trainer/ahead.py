"""Rollouts that are sampled while the step before theirs trains: whole, or up to where the new weights reach them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from verifier.config import TrainConfig
from verifier.data.recorded import RolloutRow
from verifier.errors import InternalError
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.sampled_batch import SampledBatch

if TYPE_CHECKING:
    from verifier.runs.resources import Deadline


class AheadRollouts:
    """A `RolloutSource` that is one step ahead: what is sampled depends on (seed, step) alone, not on who is faster.

    The thread that samples has the engine's client to itself from `rollouts` to `pause`. `pause` waits until the
    deadline `until`; each request to the engine and each reward has its own.
    """

    def __init__(self, config: TrainConfig, engine: EngineRollouts, until: Deadline) -> None:
        self._config, self._engine, self._until = config, engine, until
        self._inflight = config.grpo.mode == "inflight"
        self.facts: Mapping[str, float] = {}
        self._next: tuple[int, int, Future[SampledBatch | None]] | None = None

    @property
    def runs(self) -> bool:
        """True while the engine holds requests that are not at their end."""
        return self._inflight and self._next is not None

    def rollouts(self, step: int) -> tuple[Sequence[RolloutRow], str]:
        """Rollouts of a step, sampled before; the next step's are begun, from the weights that the engine holds."""
        batch = self._take(step)
        self.facts = batch.facts
        if step < self._config.steps:
            sample = (lambda: self._engine.begin(step + 1)) if self._inflight else (
                lambda: self._engine.sample(step + 1, step - 1)
            )  # fmt: skip
            self._next = step + 1, step - 1, _started(sample)
        return self._engine.handed_on(step, batch)

    def pause(self) -> None:
        """Wait until the engine computes nothing, before its weights are updated; raise the error of its thread."""
        if self._next is not None:
            self._result()

    def resume(self, held: int | None) -> None:
        """Sample what an update has interrupted to its end, once the step that made the new weights has held.

        The engine holds the version `held`; None if there was no update.
        """
        if self._next is not None and self._inflight:
            self.pause()
            step, version, _ = self._next
            done: Future[SampledBatch | None] = Future()
            done.set_result(self._engine.finish(step, version, version if held is None else held))
            self._next = step, version, done

    def saved(self) -> list[Any]:
        """The batch that was sampled ahead, as `restore` takes it; empty for none."""
        batch = None if self._next is None else self._result()
        return [] if batch is None else batch.saved()

    def restore(self, step: int, rollouts: Sequence[Any]) -> None:
        """Take the batch of a step that `saved` gave before a stop."""
        done: Future[SampledBatch | None] = Future()
        done.set_result(self._engine.restored(step, rollouts))
        self._next = step, step - 2, done

    def _take(self, step: int) -> SampledBatch:
        if self._next is None or self._next[0] != step:  # the first step, or the first after a last one
            return self._engine.sample_now(step)
        batch, self._next = self._result(), None
        if batch is None:
            raise InternalError(f"the rollouts of step {step} have not been sampled to their end")
        return batch

    def _result(self) -> SampledBatch | None:
        assert self._next is not None
        step, _, found = self._next
        left_s = self._until.left(f"the rollouts of step {step} were waited for")
        try:
            return found.result(left_s)
        except TimeoutError as problem:
            if found.done():
                raise  # of the sampler itself, which names what did not answer
            raise InternalError(
                f"the engine and the reward have not made the rollouts of step {step} before the end of --timeout, "
                f"{left_s:.0f} s after they were waited for"
            ) from problem


def _started(function: Callable[[], SampledBatch | None]) -> Future[SampledBatch | None]:
    """Call in a thread that nothing waits for at the end: what it waits for itself has deadlines, and may have died."""
    found: Future[SampledBatch | None] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="sampler", daemon=True).start()
    return found
