"""Metrics of a training run: a line of JSON a step, and the same numbers for TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from verifier.trainer.run_folder import RunFolder

STAGES = {
    "reward": "rollout", "answer_tokens": "rollout", "truncated_share": "rollout", "mixed_groups": "rollout",
    "mismatch_max": "mismatch", "mismatch_p99": "mismatch", "mismatch_k3": "mismatch", "accuracy": "held-out",
    "held_out_reward": "held-out",
}  # fmt: skip
"""Metric -> group under which TensorBoard shows it; all others are of the step."""
RATES = {
    "rollout_tokens_per_s": ("sampled_tokens", "rollout_s"), "score_tokens_per_s": ("scored_tokens", "score_s"),
    "train_tokens_per_s": ("tokens", "train_s"),
}  # fmt: skip
"""Rate of a stage -> metrics that it is the quotient of."""


class Metrics:
    """Writer of a run's metrics; make one with `metrics_of`."""

    def __init__(self, folder: RunFolder, writer: Any) -> None:
        self._folder, self._writer = folder, writer

    def add(self, values: Mapping[str, Any]) -> None:
        """Write the metrics of a step, which has the key "step", and the rates of its stages."""
        values = {**values, **_rates_of(values)}
        self._folder.add_metrics(values)
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [
            Summary.Value(tag=f"{_group(name)}/{name}", simple_value=float(value))
            for name, value in values.items()
            if name != "step"
        ]
        self._writer.add_event(Event(step=int(values["step"]), summary=Summary(value=found)))


def _rates_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens a second of each stage that the step went through."""
    return {
        name: values[tokens] / values[seconds]
        for name, (tokens, seconds) in RATES.items()
        if tokens in values and values.get(seconds)
    }


def _group(name: str) -> str:
    return "time" if name.endswith("_s") else STAGES.get(name, "step")


@contextlib.contextmanager
def metrics_of(folder: RunFolder) -> Iterator[Metrics]:
    """Open the metrics of a run until exit; a resumed run goes on in a further file of events."""
    if importlib.util.find_spec("tensorboard") is None:
        yield Metrics(folder, None)
        return
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder.path / "tensorboard"))
    try:
        yield Metrics(folder, writer)
    finally:
        writer.close()
