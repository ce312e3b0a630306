"""A rank whose memory runs out ends the run with the peak, the knobs and the sweep to run.

What this does not exercise: memory of a GPU, whose allocator raises an error of the same words.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.meta.sources import ROOT
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.launch.rank import RankContext
from verifier.megatron.memory import limit_memory
from verifier.trainer import worker_megatron
from verifier.trainer.controller import Trainer
from verifier.trainer.fitting import refused_for_memory
from verifier.trainer.ranks import WorkerSpec

ROOM_GIB = 0.05


@contextlib.contextmanager
def little_room(spec: WorkerSpec, context: RankContext) -> Iterator[None]:
    """In a rank: a step may take little more memory than the rank has when it begins."""
    original = worker_megatron.TrainerWorker.train

    def limited(self, *arguments, **named):
        mapped = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
        limit_memory(int(mapped[1]) / 2**20 + ROOM_GIB, "cpu")
        return original(self, *arguments, **named)

    with mock.patch.object(worker_megatron.TrainerWorker, "train", limited):
        yield


def test_a_step_without_memory_is_one_sentence(trainer_launcher, tmp_path):
    knobs = ("data.batch_size=512", "batch.max_tokens=8192", "mesh.dp=1", "evaluation.num_problems=0", "steps=1")
    config, _ = load(TrainConfig, file=ROOT / "configs" / "add-sft.yaml", overrides=[*knobs, f"run={tmp_path / 'run'}"])
    within = ("tests.dist.test_train_memory:little_room",)
    with pytest.raises(UsageError) as found:
        Trainer(config, print, launcher=trainer_launcher, within=within).run()
    assert re.fullmatch(
        r"rank 0 ran out of memory in `\w+`, its peak is \d\.\d\d GiB: lower batch\.max_tokens, 8,192, "
        r"set megatron\.recompute=full in place of \w+, or raise mesh\.tp, mesh\.pp or mesh\.cp; "
        r"`verifier sweep --model tiny:add --ranks 1` finds the largest budget",
        str(found.value),
    )


def test_other_errors_stay_as_they_are():
    config, _ = load(TrainConfig, file=ROOT / "configs" / "add-sft.yaml", overrides=[])
    with pytest.raises(RuntimeError, match="shape"), refused_for_memory(config, "cpu", 0, "train"):
        raise RuntimeError("shape '[2]' is invalid")
