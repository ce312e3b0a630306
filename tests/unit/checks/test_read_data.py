"""Data as they were read: which part of which row differs, overlaps, and recorded rollouts field by field."""

import json
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from msgspec import structs

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_policy import Advantages, Drops, PolicyColumns
from verifier.core.records_tokens import GivenRoutes
from verifier.core.trace import Trace
from verifier.data.recorded import RolloutRow, rollout_of, write_recorded
from verifier.data.rollout import route_rows
from verifier.data.second_reading import digest_of_examples
from verifier.data.text_dataset import load_examples
from verifier.probes.trainer import record_of_rollouts
from verifier.probes.training.data_as_read import DataAsRead, record_rollouts
from verifier.probes.training.rollout_evidence import rewards_of
from verifier.trainer.run_data import load_train


class Kept:
    """A probe that keeps what it is given."""

    def __init__(self):
        self.records, self.arrays = [], {}

    def emit(self, record, array=None):
        if array is not None:
            record = structs.replace(record, array=f"{len(self.arrays)}")
            self.arrays[record.array] = array
        self.records.append(record)

    def judged(self, code):
        return run_check(REGISTRY[code], Trace(Manifest(), self.records, lambda key: self.arrays[key]))


def config(tmp_path, *overrides):
    return load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path / 'run'}", *overrides])[0]


TRAIN = load_examples("arithmetic", "sft", count=6)
HELD_OUT = load_examples("arithmetic", "sft", split="held-out", count=3)
KNOBS = ("data.num_examples=6", "data.batch_size=2", "evaluation.num_problems=3")


def of_step(tmp_path, train, indices=(4, 1)):
    probe = Kept()
    data = DataAsRead(config(tmp_path, *KNOBS), "sft", train, HELD_OUT)
    data.record(probe, 1, indices, [train[index] for index in indices])
    return probe.judged("DAT010")


def test_rows_of_the_source_hold(tmp_path):
    found = of_step(tmp_path, TRAIN)
    assert (found.verdict, found.num_compared) == (Verdict.HOLDS, 3)


def test_a_part_of_another_row_is_named(tmp_path):
    other = [replace(item, answer=next_.answer) for item, next_ in zip(TRAIN, [*TRAIN[1:], TRAIN[0]], strict=True)]
    found = of_step(tmp_path, other)
    assert found.finding.count == 2
    assert found.finding.first.sentence == f"`{TRAIN[4].id}` does not have the answer of row 4 of its source"
    assert found.finding.first.actual == "answer of row 5"
    found = of_step(tmp_path, [replace(item, response="####", prompt="1") for item in TRAIN])
    assert found.finding.first.sentence.startswith(
        f"`{TRAIN[4].id}` does not have the question, prompt and response of row"
    )
    assert found.finding.first.actual == "question of no row, prompt of no row, response of no row"


PROBLEMS = [
    {"question": f"{at}+1=", "solution": {"final": f"{at + 1}"}, "level": at} for at in range(4)
]  # fmt: skip
OWN = ("data.prompt_key=question", "data.answer_key=solution.final", "data.batch_size=2", "evaluation.num_problems=0")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda own: own, ""),
        (lambda own: [replace(own[0], metadata=own[1].metadata), *own[1:]], "metadata"),
        (lambda own: [replace(own[0], answer="####"), *own[1:]], "answer"),
        (lambda own: [replace(own[0], prompt=own[1].prompt), *own[1:]], "question and prompt"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_own_columns_are_read_by_both(form, wrong, said, tmp_path):
    file = tmp_path / f"rows.{form}"
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PROBLEMS), file)
    asked = config(tmp_path, "algorithm=grpo", f"data.source={file}", *OWN)
    train, probe = wrong(list(load_train(asked, "grpo"))), Kept()
    DataAsRead(asked, "grpo", train, ()).record(probe, 1, (0, 1), train[:2])
    found = probe.judged("DAT010")
    assert found.verdict is (Verdict.VIOLATED if said else Verdict.HOLDS)
    if said:
        assert f"does not have the {said} of row 0" in found.finding.first.sentence


@pytest.mark.parametrize("train", [TRAIN[:5], (*TRAIN, *HELD_OUT[:1])])
def test_rows_that_are_left_out_or_added_are_violated(tmp_path, train):
    found = of_step(tmp_path, train)
    assert found.finding.first.sentence == f"{len(train)} examples of `arithmetic` were read, it has 6"
    assert of_step(tmp_path, (*TRAIN, *HELD_OUT[:1]), (6,)).finding.count == 2


@pytest.mark.parametrize(("held_out", "count"), [(HELD_OUT, 0), (TRAIN[:3], 6), (HELD_OUT[::-1], 2), (HELD_OUT[:2], 1)])
def test_problems_are_those_of_their_source_and_of_no_other(tmp_path, held_out, count):
    probe = Kept()
    data = DataAsRead(config(tmp_path, *KNOBS), "sft", TRAIN, held_out)
    assert data.record_held_out(probe, 1)
    found = probe.judged("DAT011")
    assert (0 if found.finding is None else found.finding.count) == count


def test_a_problem_that_both_sources_have_is_violated(tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text(f'{{"prompt": "{TRAIN[2].prompt}", "response": "x"}}\n')
    held_out = load_examples(str(file), "sft", count=1)
    probe = Kept()
    knobs = ("data.num_examples=6", "data.batch_size=2", "evaluation.num_problems=1", f"data.held_out={file}")
    DataAsRead(config(tmp_path, *knobs), "sft", TRAIN, held_out).record_held_out(probe, 1)
    found = probe.judged("DAT011")
    assert found.finding.count == 1
    assert found.finding.first.actual == "row 2"


def test_no_problems_are_no_subject(tmp_path):
    assert not DataAsRead(config(tmp_path, *KNOBS), "sft", TRAIN, ()).record_held_out(Kept(), 1)


def test_the_digest_of_a_data_set_has_its_order():
    of = [
        digest_of_examples(train)
        for train in (TRAIN, TRAIN, TRAIN[::-1], TRAIN[:5], (replace(TRAIN[0], answer="1"), *TRAIN[1:]))
    ]  # fmt: skip
    assert len(set(of)) == 4
    assert of[0] == of[1]


ROWS = [
    RolloutRow(
        id=f"r{at}", group="g", prompt=(1, 2), response=(3, 4, 5), sampled=(True, False, True),
        mask=(at == 0, False, True), logprobs=(-0.1, float("nan"), -2.5), versions=(0, 0, 0), reward=float(at),
        text=f"{at}", answer="1",
    )
    for at in range(2)
]  # fmt: skip


def of_recorded(tmp_path, rows, *, reasons=("", ""), packed=None, truncated=False):
    """Outcome of a step that trains on these rows, where the file has `ROWS`."""
    write_recorded(tmp_path / "1.jsonl", ROWS)
    probe, given = Kept(), [rollout_of(row) for row in rows]
    ids, lengths = tuple(row.id for row in rows), tuple(map(len, given))
    record_rollouts(probe, 1, tmp_path)
    probe.emit(rewards_of("rewards", 1, "", rows))
    probe.emit(
        Advantages(
            name="advantages", version=1, estimator="grpo", ids=ids, groups=tuple(row.group for row in rows),
            trajectories=ids, rewards=tuple(row.reward for row in rows), penalties=(0.0,) * len(ids),
            token_counts=(1,) * len(ids), advantages=(0.0,) * len(ids),
        )
    )  # fmt: skip
    columns = {"own": "mask", "engine": "logprobs", "version": "versions"}
    probe.emit(
        PolicyColumns(
            name="policy inputs", version=1, ids=ids, lengths=lengths, ratio_over="old", weight_level="",
            weight_cap=2.0, mask_level="", mask_low=0.5, mask_high=2.0, max_staleness=1, trained_version=1,
        ),
        {name: np.concatenate([getattr(item, field) for item in given]) for name, field in columns.items()},
    )  # fmt: skip
    probe.emit(
        Drops(
            name="batch", version=1, ids=ids, truncated=(truncated,) * len(ids), reasons=reasons, drop_overlong=False,
            drop_zero_variance=False,
        )
    )  # fmt: skip
    probe.emit(*record_of_rollouts("update 1", 1, given if packed is None else packed))
    return probe.judged("DAT012")


def test_rollouts_of_the_file_hold(tmp_path):
    found = of_recorded(tmp_path, ROWS)
    assert (found.verdict, found.num_compared) == (Verdict.HOLDS, 10)
    out = replace(rollout_of(ROWS[0]), mask=np.zeros(5, bool))
    dropped = [out, rollout_of(ROWS[1])]
    assert of_recorded(tmp_path, ROWS, reasons=("overlong", ""), packed=dropped).verdict is Verdict.HOLDS
    assert of_recorded(tmp_path, ROWS, packed=dropped).verdict is Verdict.VIOLATED


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"mask": (True, False, True)}, 2), ({"reward": 0.5}, 2), ({"group": "h"}, 2), ({"text": None}, 1),
        ({"answer": "2"}, 1), ({"logprobs": (-0.1, 0.0, -2.0)}, 1), ({"versions": (0, 0, 1)}, 1),
        ({"response": (3, 4, 6)}, 1), ({"prompt": (1, 1)}, 1), ({"sampled": (True, True, True)}, 1),
        ({"prompt": (1, 2, 3), "response": (4, 5), "sampled": (False, True), "mask": (False, True),
          "logprobs": (0.0, -2.5), "versions": (0, 0)}, 2),
    ],
)  # fmt: skip
def test_each_field_of_a_rollout_is_the_files(tmp_path, change, count):
    assert of_recorded(tmp_path, [ROWS[0], structs.replace(ROWS[1], **change)]).finding.count == count


def test_a_mark_of_having_been_cut_off_is_the_files(tmp_path):
    found = of_recorded(tmp_path, ROWS, truncated=True)
    assert [item.what for item in found.finding.bad] == [f"{row.id} (filters)" for row in ROWS]


def replayed(tmp_path, routes, *, layers=(1, 3), rows=None):
    """Outcome of a step whose routers are given these routes, where the file has `ROUTES`, or is of other rows."""
    write_recorded(tmp_path / "1.jsonl", rows or [structs.replace(row, routes=ROUTES) for row in ROWS])
    probe, given = Kept(), [rollout_of(structs.replace(row, routes=routes)) for row in ROWS]
    record_rollouts(probe, 1, tmp_path)
    ids = tuple(row.id for row in ROWS)
    probe.emit(GivenRoutes(name="000001-00", version=1, rollouts=ids), {"array": route_rows(given, layers)})
    trace = Trace(Manifest(), probe.records, lambda key: probe.arrays[key])
    return [item.same for item in REGISTRY["DAT012"].fn(trace) if "replay" in item.what]


ROUTES = (*(((at, at + 1), (5, at)) for at in range(4)), ((-1, -1), (-1, -1)))


def test_replayed_routes_are_the_files(tmp_path):
    assert replayed(tmp_path, ROUTES) == [True, True]
    assert replayed(tmp_path, (*ROUTES[:1], *ROUTES[:1], *ROUTES[2:])) == [False, False]
    assert replayed(tmp_path, tuple((first, first) for first, _ in ROUTES)) == [False, False]
    assert replayed(tmp_path, (*ROUTES[:3], ROUTES[4], ROUTES[4])) == [False, False]
    assert replayed(tmp_path, tuple(layers[:1] for layers in ROUTES), layers=(1,)) == [False, False]
    assert replayed(tmp_path, ROUTES, rows=ROWS) == [False, False]


def test_what_means_nothing_may_differ(tmp_path):
    other = structs.replace(ROWS[1], logprobs=(-0.1, -7.0, -2.5), versions=(0, 5, 0))
    assert of_recorded(tmp_path, [ROWS[0], other]).verdict is Verdict.HOLDS


def test_rollouts_are_named_both_ways(tmp_path):
    found = of_recorded(tmp_path, ROWS[:1], reasons=("",))
    assert found.finding.first.sentence == "rollout `r1` of the step's file is not in its batch"
    found = of_recorded(tmp_path, [ROWS[0], structs.replace(ROWS[1], id="other")])
    assert found.finding.count == 6  # five times one that the file has not, and one that the batch has not
    assert isinstance(found.finding.first.sentence, str)
