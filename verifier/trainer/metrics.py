"""Metrics of a training run: a line of JSON a step, and the same for TensorBoard, wandb and whoever looks."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from verifier.config.training import TrainConfig
from verifier.platform.provenance import gpu_names
from verifier.runs.model_under_test import ModelUnderTest
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.signs import WINDOW, mismatch_trend, signs_of
from verifier.trainer.throughput import utilisation_of
from verifier.trainer.wandb_offline import Log, wandb_log

EVENTS = "tensorboard"
"""Folder of TensorBoard's files in that of a run."""
BY_POSITION = "mismatch_by_position"
"""Metric that is a list, with None for a part that has no tokens."""
STAGES = {
    "reward": "rollout", "answer_tokens": "rollout", "truncated_share": "rollout", "mixed_groups": "rollout",
    "mismatch_max": "mismatch", "mismatch_p99": "mismatch", "mismatch_k3": "mismatch", "mismatch_floor": "mismatch",
    "mismatch_trend": "mismatch", "accuracy": "held-out", "held_out_reward": "held-out", "held_out_version": "held-out",
}  # fmt: skip
"""Metric -> group under which TensorBoard shows it; all others are of the step."""
RATES = {
    "rollout_tokens_per_s": ("sampled_tokens", "rollout_s"), "score_tokens_per_s": ("scored_tokens", "score_s"),
    "train_tokens_per_s": ("tokens", "train_s"), "transfer_gb_per_s": ("sent_gb", "transfer_s"),
}  # fmt: skip
"""Rate of a stage -> metrics that it is the quotient of."""


class View(Protocol):
    """Shows a run to somebody who looks."""

    def add(self, values: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""

    def judged(self, step: int, exit_code: int) -> None:
        """Show the verdict on a step."""


class Metrics:
    """Writer of a run's metrics; make one with `metrics_of`."""

    def __init__(
        self, folder: RunFolder, writer: Any, log: Log | None, view: View | None, config: TrainConfig,
        model: ModelUnderTest,
    ) -> None:  # fmt: skip
        self._folder, self._writer, self._log, self._view = folder, writer, log, view
        self._config, self._model = config, model
        self._last: deque[Mapping[str, Any]] | None = None
        self._restarted = False
        self._suspected: list[str] = []

    def add(self, values: Mapping[str, Any], lengths: Sequence[int] = ()) -> None:
        """Write the metrics of a step and what follows from them: rates, MFU, trend of the mismatch, signs.

        Args:
            values: metrics, with the key "step".
            lengths: tokens of each sequence that was trained on, of each pass.
        """
        if self._last is None:  # not before the folder was rewound, and the ranks have their GPUs
            self._last = deque(self._folder.last_metrics(WINDOW), WINDOW)
            gpus = gpu_names(self._model.tier)
            self._utilisation = utilisation_of(self._config, self._model.checkpoint.config, gpus)
        values = {**values, **_rates_of(values), **mismatch_trend(self._last, values)}
        if self._utilisation is not None:
            values |= self._utilisation.facts(lengths, values["train_s"])
        self._last.append(values)
        if signs := [*signs_of(list(self._last)), *self._suspected]:
            values["signs"] = signs
        self._suspected = []
        self._folder.add_metrics(values)
        numbers = dict(_numbers_of(values))
        if self._log is not None:
            self._log(int(values["step"]), {f"{_group(name)}/{name}": value for name, value in numbers.items()})
        if self._writer is not None:
            self._add_event(int(values["step"]), numbers)
        if self._view is not None:
            self._view.add(values)

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled texts of a step with their rewards: lines of samples.jsonl, and a table in TensorBoard."""
        self._folder.add_samples([{"step": step, **item} for item in samples])
        if self._writer is not None and samples:
            self._add_text(step, table_of(samples))

    def judged(self, step: int, exit_code: int, suspected: Iterable[str] = ()) -> None:
        """Show the verdict on a step where somebody looks; what is suspected is a sign on the next line of metrics."""
        self._suspected += [f"suspected in step {step}: {sentence}" for sentence in suspected]
        if self._view is not None:
            self._view.judged(step, exit_code)

    def _add_event(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._restarted:  # TensorBoard forgets what earlier files have of this step and later ones
            self._writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._restarted = True
        found = [Summary.Value(tag=f"{_group(name)}/{name}", simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(step=step, summary=Summary(value=found)))

    def _add_text(self, step: int, markdown: str) -> None:
        """Add a text to TensorBoard, as its text plugin reads it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        text = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        value = Summary.Value(tag="rollout/samples", metadata=plugin, tensor=text)
        self._writer.add_event(Event(step=step, summary=Summary(value=[value])))


def table_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """Sampled texts as a table in Markdown."""

    def cell(value: Any) -> str:
        shown = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
        return shown.replace("|", "\\|").replace("\n", " ")

    names = ("prompt", "completion", "answer", "reward")
    rows = [names, ["---"] * len(names), *([cell(item.get(name)) for name in names] for item in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rates_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens, or GB, a second of each stage that the step went through."""
    return {
        name: values[amount] / values[seconds]
        for name, (amount, seconds) in RATES.items()
        if amount in values and values.get(seconds)
    }


def _numbers_of(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics that are numbers, by name; the parts of a list are numbered from 1."""
    for name, value in values.items():
        if name == "signs":
            yield name, float(len(value))
        elif isinstance(value, list):
            yield from ((f"{name}_{at}", part) for at, part in enumerate(value, 1) if part is not None)
        elif name != "step":
            yield name, float(value)


def _group(name: str) -> str:
    if name.startswith(BY_POSITION):
        return "mismatch"
    return "time" if name.endswith("_s") else STAGES.get(name, "step")


@contextlib.contextmanager
def metrics_of(
    folder: RunFolder, config: TrainConfig, model: ModelUnderTest, view: View | None = None
) -> Iterator[Metrics]:
    """Open the metrics of a run until exit; a resumed run goes on in a further file of events."""
    with contextlib.ExitStack() as stack:
        writer = None
        if importlib.util.find_spec("tensorboard") is not None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            writer = EventFileWriter(str(folder.path / EVENTS))
            stack.callback(writer.close)
        log = stack.enter_context(wandb_log(config))
        yield Metrics(folder, writer, log, view, config, model)


def line_of(metrics: Mapping[str, Any]) -> str:
    """Line of progress on a step."""
    text = f"step {metrics['step']}: no token in the loss"
    if "loss" in metrics:
        text = f"step {metrics['step']}: loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.3f}"
    for name in ("reward", "held_out_reward", "accuracy"):
        if name in metrics:
            text += f", {name.replace('_', ' ')} {metrics[name]:.3f}"
    return text


def mean_of(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each number over the updates of a step; the greatest for what is a greatest, the sum for tokens."""
    found = {}
    for name in reports[0] if reports else ():
        values = [report[name] for report in reports]
        total = sum(values)
        if name in ("ratio_gap", "peak_memory_gib"):
            found[name] = max(values)
        else:
            found[name] = total if name in ("num_tokens", "tokens") else total / len(values)
    return found
