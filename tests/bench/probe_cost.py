"""Time that a loop's step spends in the probe: `python probe_cost.py CHECKPOINT FOLDER PROMPTS TOKENS`.

It is counted where it is spent: in the recorder's calls and in those of the worker extension. What the worker records
inside a reload, one digest of all weights, is measured beside it. Medians over steps, and with copies every 8th step
the mean of 8 steps; one JSON line per way to record.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.dist import foreign_loop
from verifier import probe

CALLS = {
    "tokens": ("rollouts", "trainer_logprobs", "advantages", "loss", "step"),
    "weights": ("sending",),
    "copies": ("gradients",),
}
WAYS = ((0, False, 6), (0, True, 6), (8, True, 9), (1, True, 6))
"""`keep_every`, whether what the engine holds is read back, and the last step; the first warms up."""


class Timed:
    """A recorder whose calls are timed."""

    def __init__(self, record: probe.LoopRecorder, spent: dict[str, float]) -> None:
        self.record, self.spent, self.path = record, spent, record.path

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.record, name)
        kind = next(kind for kind, names in CALLS.items() if name in names)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            found = method(*given, **named)
            self.spent[kind] = self.spent.get(kind, 0.0) + time.perf_counter() - begin
            return self._drawn(found, kind) if isinstance(found, Iterator) else found

        return timed

    def _drawn(self, stream: Iterator[Any], kind: str) -> Iterator[Any]:
        """The stream, the time until each item counted."""
        while True:
            begin = time.perf_counter()
            item = next(stream, None)
            self.spent[kind] += time.perf_counter() - begin
            if item is None:
                return
            yield item


def received(path: Path, loop: foreign_loop.Loop) -> float:
    """Seconds that recording all weights as received takes, the median of five times."""
    found = []
    with probe.open(path) as record:
        for version in range(5):
            begin = time.perf_counter()
            record.weights_received(((name, value) for name, value in loop.model.named_parameters()), version)
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main(checkpoint: Path, folder: Path, prompts: int, tokens: int) -> None:
    foreign_loop.PROMPTS = [[1 + (7 * at + place) % 400 for place in range(8)] for at in range(prompts)]
    foreign_loop.MOST = tokens
    llm = foreign_loop.start(checkpoint)
    call = llm.collective_rpc
    for keep_every, held, last in WAYS:
        spent: dict[str, float] = {}

        def timed(method: str, *given: Any, held: bool = held, spent: dict[str, float] = spent, **named: Any) -> Any:
            if method == "verifier_received" and not held:
                named = {}
            begin = time.perf_counter()
            found = call(method, *given, **named)
            if method.startswith("verifier_"):
                spent["engine"] = spent.get("engine", 0.0) + time.perf_counter() - begin
            return found

        llm.collective_rpc = timed
        loop = foreign_loop.Loop(llm, checkpoint, folder, f"{keep_every} {held}")
        with probe.open(folder / f"trace {keep_every} {held}", model=checkpoint, keep_every=keep_every) as record:
            timing = Timed(record, spent)
            loop.sync(timing, 0)
            loop.train(timing, 1)
            loop.sync(timing, 1)  # kernels are compiled, caches are warm
            rows = []
            for step in range(2, last + 1):
                spent.clear()
                begin = time.perf_counter()
                loop.train(timing, step)
                loop.sync(timing, step)
                rows.append({"step": time.perf_counter() - begin, **spent})
        average = statistics.fmean if keep_every > 1 else statistics.median
        middle = {kind: average(row[kind] for row in rows) for kind in rows[0]}
        middle["received"] = received(folder / f"scratch {keep_every} {held}", loop)
        seconds = middle.pop("step")
        shares = {kind: value / (seconds - sum(middle.values())) for kind, value in middle.items()}
        said = {"keep_every": keep_every, "held": held, "step": seconds, "shares": shares}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
