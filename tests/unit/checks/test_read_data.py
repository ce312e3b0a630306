"""DAT011: problems of the evaluation that are trained on, by their questions."""

from dataclasses import replace

import pytest
from msgspec import structs

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.check import REGISTRY, run_check
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.text_dataset import load_examples
from verifier.stages.data.probe_rollouts import record_held_out_read

TRAIN = load_examples("arithmetic", "sft", count=6)
HELD_OUT = load_examples("arithmetic", "sft", split="held-out", count=3)


class Kept:
    """A probe that keeps what it is given."""

    def __init__(self):
        self.records, self.arrays = [], {}

    def emit(self, record, array):
        self.records.append(structs.replace(record, array="trained"))
        self.arrays["trained"] = {"array": array}


def config(tmp_path):
    return load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path / 'run'}"])[0]


@pytest.mark.parametrize(
    ("held_out", "wrong"),
    [
        (HELD_OUT, []), (HELD_OUT[::-1], []), (TRAIN[:3], ["example 0", "example 1", "example 2"]),
        ((replace(HELD_OUT[0], prompt=TRAIN[4].prompt), *HELD_OUT), ["example 4"]),
    ],
)  # fmt: skip
def test_a_problem_that_is_trained_on_is_named(tmp_path, held_out, wrong):
    probe = Kept()
    assert record_held_out_read(probe, 1, config(tmp_path), TRAIN, held_out)
    found = run_check(REGISTRY["DAT011"], Trace(Manifest(), probe.records, lambda key: probe.arrays[key]))
    assert found.num_compared == len(held_out)
    assert [item.actual for item in found.finding.bad] == wrong if found.finding else not wrong


def test_no_problems_are_no_subject(tmp_path):
    assert not record_held_out_read(Kept(), 1, config(tmp_path), TRAIN, ())
