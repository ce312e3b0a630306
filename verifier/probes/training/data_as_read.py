"""Evidence of the data that a run trains and evaluates on, beside a second reading of their sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verifier.config import TrainConfig
from verifier.core.record import Probe
from verifier.core.records_data import ExamplesRead, HeldOutRead, RolloutsRead
from verifier.data.examples import Example
from verifier.data.second_reading import PARTS, Columns, Said, read_again, rows_of_step, used_digests
from verifier.data.text_dataset import Task
from verifier.trainer.run_data import held_out_split, options_of_source


class DataAsRead:
    """The examples of a run as its loader read them.

    Args:
        config: of the run.
        task: of the run.
        train: examples to train on, in order.
        held_out: problems of the evaluation.
        changes: tells by a second reader of the chat template whether it changes a conversation's earlier turns.
    """

    def __init__(
        self, config: TrainConfig, task: Task, train: Sequence[Example], held_out: Sequence[Example],
        changes: Callable[[Sequence[Said]], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self._config, self._task, self._train, self._held_out, self._changes = config, task, train, held_out, changes

    def record(
        self, probe: Probe, step: int, indices: Sequence[int] | np.ndarray, examples: Sequence[Example],
        sampling_round: int = 0,
    ) -> None:  # fmt: skip
        """Record the examples of a step, or of a round of it, beside the rows at their places in the source."""
        rows, used, places = self._rows, used_digests(examples), np.asarray(indices, np.int64)
        probe.emit(
            ExamplesRead(
                name="examples" if not sampling_round else f"examples of round {sampling_round}", version=step,
                source=self._config.data.source, num_examples=len(self._train), num_rows=len(rows), parts=PARTS,
                ids=tuple(example.id for example in examples),
            ),
            _beside(used, rows, places),
        )  # fmt: skip

    def record_held_out(self, probe: Probe, step: int) -> bool:
        """Record the problems of the evaluation, and which of them the source of training has; False for none."""
        if not self._held_out:
            return False
        used, question = used_digests(self._held_out), PARTS.index("question")
        trained = [_place(self._rows[:, question], value) for value in used[:, question]]
        probe.emit(
            HeldOutRead(
                name="held-out", version=step, source=self._config.data.held_out or self._config.data.source,
                num_examples=len(self._held_out), num_rows=len(self._held_out_rows), parts=PARTS,
                ids=tuple(example.id for example in self._held_out),
            ),
            _beside(used, self._held_out_rows, np.arange(len(used))) | {"trained": np.array(trained, np.int64)},
        )  # fmt: skip
        return True

    @cached_property
    def _rows(self) -> np.ndarray:
        data = self._config.data
        return read_again(
            data.source, self._task, split=data.split, count=data.num_examples, seed=self._config.seed,
            columns=self._columns, options=data.options,
        )  # fmt: skip

    @cached_property
    def _held_out_rows(self) -> np.ndarray:
        config = self._config
        source = config.data.held_out or config.data.source
        return read_again(
            source, self._task, split=held_out_split(config) or "", count=config.evaluation.num_problems,
            seed=config.seed, columns=self._columns, options=options_of_source(config, source),
        )  # fmt: skip

    @property
    def _columns(self) -> Columns:
        data = self._config.data
        keys = {
            "id": data.id_key, "prompt": data.prompt_key, "messages": data.messages_key, "response": data.response_key,
            "answer": data.answer_key,
        }  # fmt: skip
        return Columns(
            names={part: name for part, name in keys.items() if name != part},
            as_messages=data.apply_chat_template,
            changes=self._changes,
        )


def record_rollouts(probe: Probe, step: int, folder: Path) -> None:
    """Record the rollouts of a step as plain JSON has them."""
    rows = rows_of_step(folder, step)
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "sampled", "mask", "logprobs", "versions")}
    for row in rows:
        before = len(row["prompt"])
        columns["tokens"] += [*row["prompt"], *row["response"]]
        columns["sampled"] += [False] * before + row["sampled"]
        columns["mask"] += [False] * before + row["mask"]
        columns["logprobs"] += [math.nan] * before + [math.nan if nats is None else nats for nats in row["logprobs"]]
        columns["versions"] += [-1] * before + row["versions"]
    routes = [token for row in rows for token in row.get("routes") or ()]
    if len(routes) == len(columns["tokens"]):
        columns["routes"] = routes
    dtypes = {
        "tokens": np.int64,
        "sampled": bool,
        "mask": bool,
        "logprobs": np.float32,
        "versions": np.int32,
        "routes": np.int32,
    }
    probe.emit(
        RolloutsRead(
            name="recorded", version=step, ids=tuple(row["id"] for row in rows),
            groups=tuple(row["group"] for row in rows),
            trajectories=tuple(row.get("trajectory") or row["id"] for row in rows),
            prompt_lengths=tuple(len(row["prompt"]) for row in rows),
            lengths=tuple(len(row["prompt"]) + len(row["response"]) for row in rows),
            rewards=tuple(float(row["reward"]) for row in rows), texts=tuple(row.get("text") for row in rows),
            answers=tuple(row.get("answer") for row in rows),
            truncated=tuple(bool(row.get("truncated")) for row in rows),
        ),
        {name: np.array(values, dtypes[name]) for name, values in columns.items()},
    )  # fmt: skip


def _beside(used: np.ndarray, rows: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
    """Digests that were used, those of the rows at their places, and where the source has what was used."""
    read = np.zeros_like(used)
    there = places < len(rows)
    read[there] = rows[places[there]]
    found = np.repeat(places[:, None], used.shape[1], axis=1)
    found[~there] = -1
    for at, part in zip(*np.nonzero(used != read), strict=True):
        found[at, part] = _place(rows[:, part], used[at, part])
    return {"indices": places, "used": used.view(np.int64), "read": read.view(np.int64), "found": found}


def _place(column: np.ndarray, value: np.uint64) -> int:
    """First row of a column with a value; -1 for none."""
    there = np.flatnonzero(column == value)
    return int(there[0]) if len(there) else -1
