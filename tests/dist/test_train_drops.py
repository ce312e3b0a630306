"""Steps and mini-batches without a token in the loss: no update is taken, nothing is alarmed, counters go on.

What this does not exercise: a live engine, whose weights stay as they are through such a step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.recorded import write_recorded
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.data.recorded import read_recorded
from verifier.faults.training_trial import GRPO_KNOBS, DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline
from verifier.stages.train.records import TrainerStep
from verifier.trainer.controller import Trainer

KNOBS = (
    "model=tiny:add", "algorithm=grpo", "grpo.group_size=4", "grpo.mini_batches=2", "grpo.epochs=2",
    "grpo.drop_zero_variance=true", "optimizer.warmup_steps=9", "evaluation.num_problems=0", "checkpoint.every=1",
    "verify.steps=true", "verify.every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Three steps of the recorded rollouts; all rewards of the second, and half of the third's, are alike."""
    folder = tmp_path_factory.mktemp("drops")
    given = Path(GRPO_KNOBS[0].partition("=")[2])
    for step, file in enumerate(sorted(given.glob("*.jsonl"))[:3], start=1):
        rows = list(read_recorded(file, group_size=4))
        for index in range({1: 0, 2: len(rows), 3: len(rows) // 2}[step]):
            row = rows[index]
            if row.reward:
                wrong = next(item for item in rows if item.group == row.group and not item.reward)
                rows[index] = replace(wrong, id=row.id)
        write_recorded(folder / file.name, rows)
    return folder


@pytest.mark.slow
def test_updates_are_counted_as_they_are_taken(rollouts, resources, tmp_path):
    for steps in (2, 3):  # the second continues the first, from a step that took no update
        words = [*KNOBS, f"data.rollouts={rollouts}", f"steps={steps}", f"run={tmp_path / 'run'}"]
        config, _ = load(TrainConfig, overrides=words)
        launcher = resources.launcher(Deadline(300))
        Trainer(config, lambda text: None, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    found = sorted((tmp_path / "run" / "steps").iterdir())
    assert len(found) == 3
    numbers = []
    for path in found:
        trace = store.read(path)
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        judged = {item.code for item in report.outcomes}
        assert {"ADV002", "ADV003", "DAT004", "RWD001"} <= judged
        assert ({"TRN001", "TRN002", "TRN003", "LSS001"} <= judged) == (path.name != "000002")
        numbers.append([item.step for item in trace.of(TrainerStep)])
    assert numbers == [[1, 2, 3, 4], [], [5, 6]]  # two mini-batches of two epochs; one of the third step's is left
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["loss" in line for line in lines] == [True, False, True]
