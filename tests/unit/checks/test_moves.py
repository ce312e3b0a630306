"""WGT008: how much each kind of update has to move, from the digests of two versions."""

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.stages.load.records import SourceTensor
from verifier.stages.train.records import JoinedTensor, LiveAdapterMatrix, Update

OUTWARD = "layers.0.q_proj.lora_B.weight"


def named(kind, name, version, content):
    """A tensor with contents that are told apart by one digit."""
    return kind(name=name, version=version, digest="vd1:" + content * 32, dtype="float32", shape=(2,))


def verdict(how, *records):
    outcome = run_check(REGISTRY["WGT008"], make_trace([Update(name="version 1", version=1, how=how), *records]))
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


@pytest.mark.parametrize(
    ("how", "contents", "found"),
    [
        ("step", "01", (Verdict.HOLDS, None)),
        ("step", "00", (Verdict.VIOLATED, "the update changed 0 of the model's 2 tensors, at least 1 had to change")),
        ("noise", "11", (Verdict.HOLDS, None)),
        ("noise", "01", (Verdict.VIOLATED, "the update changed 1 of the model's 2 tensors, at least 2 had to change")),
    ],
)
def test_a_step_moves_something_and_noise_everything(how, contents, found):
    source = [named(SourceTensor, name, 0, "0") for name in "ab"]
    joined = [named(JoinedTensor, name, 1, content) for name, content in zip("ab", contents, strict=True)]
    assert verdict(how, *source, *joined) == found


def test_noise_leaves_integers_alone():
    records = [named(SourceTensor, "a", 0, "0"), named(JoinedTensor, "a", 1, "0")]
    whole = [
        type(item)(**{**{f: getattr(item, f) for f in item.__struct_fields__}, "dtype": "int64"}) for item in records
    ]
    assert verdict("noise", *whole)[0] is Verdict.HOLDS


@pytest.mark.parametrize(("content", "found"), [("1", Verdict.HOLDS), ("0", Verdict.VIOLATED)])
def test_a_step_of_an_adapter_moves_every_outward_matrix(content, found):
    """The inward matrix does not count, and neither does the base."""
    inward = [named(LiveAdapterMatrix, "layers.0.q_proj.lora_A.weight", version, str(version)) for version in (0, 1)]
    outward = [named(LiveAdapterMatrix, OUTWARD, 0, "0"), named(LiveAdapterMatrix, OUTWARD, 1, content)]
    base = [named(SourceTensor, "a", 0, "0"), named(JoinedTensor, "a", 1, "1")]
    assert verdict("adapter step", *inward, *outward, *base)[0] is found


def test_an_update_whose_weights_nobody_joined_is_inconclusive():
    assert verdict("step")[0] is Verdict.INCONCLUSIVE
