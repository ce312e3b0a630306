"""Metrics of a training run: a line of JSON a step, and the same for TensorBoard, wandb and whoever looks.

Signs: bounds are rules of thumb: a sign says what was seen, with its numbers, and stops nothing.

Of the share of what GPUs can do (MFU), operations of a step, forward and backward, recomputation not counted:

    6 N T + sum over sequences of 6 L W n (n + 1) / 2

    N  elements of the matrices that a token is multiplied by: of the experts those that it visits, and the output head
    T  tokens;  n  tokens of a sequence;  L  layers with attention
    W  width of all heads' queries plus that of their values: scores and their use cost 2 W forward for each pair

With adapters the frozen weights have no gradient: 4 N T. Adapters themselves are not counted, nor is the scan of
state-space layers.

Source:
    Chowdhery et al., PaLM, arXiv:2204.02311, appendix B (6 N, and 12 L H Q T of attention that is not causal).
    NVIDIA H100 and H200 datasheets: bf16 dense, SXM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any, Protocol

import numpy as np

from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.knob import flat
from verifier.model.families import Content, Scope, family_of, layer_scopes, sizes_of
from verifier.platform.provenance import gpu_names
from verifier.runs.model_under_test import ModelUnderTest
from verifier.trainer.run_folder import RunFolder

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

        `lengths` are the tokens of each sequence that was trained on, of each pass.
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
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._writer.add_event(Event(step=step, summary=text_pb("rollout/samples", markdown)))


def table_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """Sampled texts as a table in Markdown."""

    def cell(value: Any) -> str:
        shown = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
        return shown.replace("|", "\\|").replace("\n", " ")

    names = ("prompt", "completion", "answer", "reward")
    rows = [names, ["---"] * len(names), *([cell(item.get(name)) for name in names] for item in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rates_of(values: Mapping[str, Any]) -> dict[str, float]:
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


WINDOW = 20
"""Steps that a sign looks at, at most."""
FEW = 5
"""Steps of a floor, and of an average."""
_STANDARD_ERRORS = 2.0
"""Difference of two means, in its standard errors, from which on they differ."""
_LEAST_ENTROPY = 0.5
"""Share of the window's first entropy below which it fell."""
_LEAST_MIXED = 0.2
"""Share of groups with several rewards below which there are too few; docs/metrics.md."""
_GREATEST_TREND = 3.0
"""Multiple of its floor above which the mismatch grew."""

Row = Mapping[str, Any]
"""Metrics of a step."""


def mismatch_trend(before: Sequence[Row], row: Row) -> dict[str, float]:
    """Floor of a run's mismatch, and how many times that it is now.

    The floor is the median `mismatch_p99` of the first `FEW` steps that have one. Their weights differ little from
    those that both sides loaded. `before` has the metrics of the last steps, the newest last.

    Returns:
        "mismatch_floor", nats, and "mismatch_trend", the median of the last `FEW` steps over the floor; empty where the
        step has no mismatch, without a trend where the floor is 0.
    """
    if "mismatch_p99" not in row:
        return {}
    own = [item for item in before if "mismatch_floor" in item]
    values = [*_column(own, "mismatch_p99"), float(row["mismatch_p99"])]
    floor = float(own[-1]["mismatch_floor"]) if len(own) >= FEW else median(values)
    found = {"mismatch_floor": floor}
    return found | {"mismatch_trend": median(values[-FEW:]) / floor} if floor else found


def signs_of(rows: Sequence[Row]) -> list[str]:
    """Signs in the metrics of the last steps, the newest last: of reward, entropy, equal groups and mismatch."""
    rows = rows[-WINDOW:]
    found = (_flat_reward(rows), _falling_entropy(rows), _equal_groups(rows), _growing_mismatch(rows))
    return [text for text in found if text is not None]


def _flat_reward(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "reward")
    if len(values) < WINDOW:
        return None
    half = WINDOW // 2
    first, last = values[:half], values[half:]
    noise = math.sqrt((variance(first) + variance(last)) / half)
    if abs(fmean(last) - fmean(first)) > _STANDARD_ERRORS * noise:
        return None
    return f"reward is flat over {WINDOW} steps: {fmean(first):.3g}, then {fmean(last):.3g}"


def _falling_entropy(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "entropy")
    if len(values) < WINDOW:
        return None
    first, last = fmean(values[:FEW]), fmean(values[-FEW:])
    if last >= _LEAST_ENTROPY * first:
        return None
    return f"entropy falls: {first:.3g} to {last:.3g} nats in {WINDOW} steps"


def _equal_groups(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "mixed_groups")[-FEW:]
    if len(values) < FEW or fmean(values) >= _LEAST_MIXED:
        return None
    return f"{1 - fmean(values):.0%} of the groups of {FEW} steps are without variance"


def _growing_mismatch(rows: Sequence[Row]) -> str | None:
    trend = rows[-1].get("mismatch_trend", 0.0) if rows else 0.0
    return f"mismatch grows: {trend:.3g} times its floor" if trend > _GREATEST_TREND else None


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]


PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Name of a GPU -> bf16 dense operations a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Cost of training tokens of one model."""

    matrices: int
    """Elements that a token is multiplied by."""
    pair: int
    """Forward operations of attention for a pair of tokens, over all layers."""
    passes: int = 3
    """Matrix products of a weight: forward, gradient of its input, and of itself unless it is frozen."""

    def of(self, lengths: Iterable[int]) -> int:
        """Operations of sequences of these lengths, forward and backward."""
        lengths = list(lengths)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 2 * self.passes * self.matrices * sum(lengths) + 3 * self.pair * pairs


def training_flops(sizes: Mapping[str, Any], *, frozen: bool = False) -> TrainingFlops | None:
    """Cost of training the model of a config.json; None for a family that the table does not have.

    If `frozen`, only adapters are trained.
    """
    family = family_of(sizes)
    if family is None:
        return None
    named = sizes_of(sizes)
    visited = int(sizes.get("num_experts_per_tok") or 0)
    matrices, attention = named["vocab"] * named["hidden"], 0
    hybrid = any(row.scope is Scope.ATTENTION for row in family.tensors)
    for scopes in layer_scopes(sizes):
        attention += Scope.ATTENTION in scopes or not hybrid
        for row in family.tensors:
            if row.scope in scopes and row.content is Content.MATRIX:
                count = visited if row.scope is Scope.EXPERT else 1
                matrices += count * math.prod(named[dim] for dim in row.dims)
    width = named["mla_q"] + named["mla_out"] if "mla_q" in named else 2 * named["q"]
    return TrainingFlops(matrices=matrices, pair=2 * attention * width, passes=2 if frozen else 3)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Cost of a run's steps against what its GPUs can do."""

    flops: TrainingFlops
    peak: float
    """Operations a second of all GPUs that train."""

    def facts(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Metrics of a step's training: sequences of these lengths in so many seconds; empty for a step without."""
        if not lengths or not seconds:
            return {}
        return {"mfu": self.flops.of(lengths) / seconds / self.peak}


def utilisation_of(config: TrainConfig, sizes: Mapping[str, Any], gpus: Sequence[str]) -> Utilisation | None:
    """Utilisation of a run; None without GPUs, with one whose peak is not known, in fp32, or for an unknown family.

    `gpus` are the names of the GPUs, the trainer's first.
    """
    used = gpus[: config.mesh.world_size]
    if not used or config.dtype != "bfloat16" or any(name not in PEAKS for name in used):
        return None
    flops = training_flops(sizes, frozen=bool(config.lora.rank))
    return None if flops is None else Utilisation(flops, sum(PEAKS[name] for name in used))


NUM_POSITIONS = 8
"""Equal parts of the longest allowed answer."""


def mismatch_facts(differences: np.ndarray) -> dict[str, float]:
    """Greatest, 99th percentile and k3 of differences in nats, trainer minus engine; empty without tokens."""
    if not len(differences):
        return {}
    return {
        "mismatch_max": float(np.abs(differences).max()), "mismatch_p99": float(np.quantile(np.abs(differences), 0.99)),
        "mismatch_k3": float(np.mean(np.expm1(differences) - differences)),
    }  # fmt: skip


def by_position(differences: np.ndarray, positions: np.ndarray, longest: int) -> list[float | None]:
    """Mean magnitude of differences in each eighth of the longest answer; None for an eighth without tokens.

    Positions are among the sampled tokens of a rollout, from 0; tokens behind `longest` count to the last eighth.
    """
    part = np.minimum(positions * NUM_POSITIONS // longest, NUM_POSITIONS - 1)
    sizes = np.abs(differences)
    return [float(sizes[part == at].mean()) if (part == at).any() else None for at in range(NUM_POSITIONS)]


Log = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers."""


def require_wandb(config: TrainConfig) -> None:
    """Refuse a run that asks for wandb where it is not installed."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("wandb is true and the package wandb is not installed: install it, or leave it out")


@contextlib.contextmanager
def wandb_log(config: TrainConfig) -> Iterator[Log | None]:
    """Open an offline run of wandb until exit, None unless the config asks for it; a resumed run opens a further one.

    Source:
        https://docs.wandb.ai/ref/python/init: mode "offline" writes to `dir` alone; `wandb sync` sends it later.
    """
    if not config.wandb:
        yield None
        return
    import wandb

    run = wandb.init(
        project="verifier", name=config.run.name, dir=str(config.run), mode="offline", config=flat(config.to_dict())
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()
