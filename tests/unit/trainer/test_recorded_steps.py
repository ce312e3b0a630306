"""Steps of recorded rollouts: each trains on its own file, with every field of its lines as plain JSON has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.second_reading import rows_of_step
from tests.unit.trainer.test_step_terms import Records
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.rollout import load_rollouts
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.stages.data.probe_rollouts import record_policy
from verifier.stages.data.records import Drops
from verifier.stages.reward.records import GivenRewards
from verifier.trainer.grpo_plan import GrpoPlan, RecordedRollouts
from verifier.trainer.observer import Observer, PolicyBatch

FOLDERS = Path(__file__).parent / "rollouts"
ROUTED = Path(__file__).parents[3] / "verifier" / "faults" / "rollouts" / "routed"

CASES = (
    (FOLDERS / "masked", "add", ("grpo.drop_overlong=true",)), (FOLDERS / "unpadded", "add", ()),
    (ROUTED, "add-moe", ("grpo.replay_routes=true",)),
)  # fmt: skip


class Batches(Observer):
    """Keeps the last batch."""

    last: PolicyBatch

    def on_batch(self, batch):
        self.last = batch


@pytest.mark.parametrize(("folder", "model", "words"), CASES, ids=["masked", "unpadded", "routed"])
def test_a_step_trains_on_its_file_field_by_field(tmp_path, folder, model, words):
    asked = [f"model=tiny:{model}", f"run={tmp_path}", "algorithm=grpo", "steps=3", f"data.rollouts={folder}",
             "grpo.group_size=4", "evaluation.num_problems=0", *words]  # fmt: skip
    config, _ = load(TrainConfig, overrides=asked)
    source = RecordedRollouts(config, open_checkpoint(write_tiny(model, tmp_path)))
    batches = Batches()
    plan = GrpoPlan(config, source, lambda step, number: tmp_path / f"{step}-{number}.safetensors", batches)
    for step in (1, 2, 3):
        rows, probe = rows_of_step(folder, step), Records()
        updates = plan.updates(
            step, step, lambda file, which: [np.full(len(item), -1.0, np.float32) for item in load_rollouts(file)[0]]
        )
        record_policy(probe, config, batches.last)
        found = [item for update in updates for item in load_rollouts(update.file)[0]]
        assert [item.id for item in found] == [row["id"] for row in rows]
        for item, row in zip(found, rows, strict=True):
            before, dropped = len(row["prompt"]), "grpo.drop_overlong=true" in words and bool(row.get("truncated"))
            drawn = item.sampled[before:]
            assert (item.group, item.reward) == (row["group"], row["reward"])
            assert item.tokens.tolist() == [*row["prompt"], *row["response"]]
            assert drawn.tolist() == row["sampled"]
            assert item.mask[before:].tolist() == [own and not dropped for own in row["mask"]]
            assert item.versions[before:][drawn].tolist() == np.array(row["versions"])[drawn].tolist()
            assert np.array_equal(item.logprobs[before:][drawn], np.array(row["logprobs"], np.float32)[drawn])
            assert (None if item.routes is None else item.routes.tolist()) == row.get("routes")
        (drops,) = (item for item in probe.records if isinstance(item, Drops))
        (given,) = (item for item in probe.records if isinstance(item, GivenRewards))
        assert list(drops.truncated) == [bool(row.get("truncated")) for row in rows]
        assert list(given.rewards) == [row["reward"] for row in rows]
        assert [*zip(given.texts, given.answers, strict=True)] == [(row.get("text"), row.get("answer")) for row in rows]
