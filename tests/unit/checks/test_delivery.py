"""What the checks of delivery take for wrong, beside what the snapshots show."""

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, MANIFEST, bits_of_b, change, clean, having, make_trace, rounded
from tests.snapshots.tensors import tensor
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.report import render_text, report_of
from verifier.stages.engine.records import CheckpointView, ColdTensor, EngineRestart, ExpectedView, SyncedTensor
from verifier.stages.export.records import ExportedTensor
from verifier.stages.rollout.records import DrawnTokens
from verifier.stages.transport.records import Handover


def test_buffers_of_one_name_are_compared_one_by_one() -> None:
    """Version 2 has no cold engine, so its buffers are held against those of version 1."""
    twice, first = (
        [replace(tensor(kind, "b", 1, role=role, sort="buffer"), name="rotary.inv_freq") for _ in range(2)]
        for kind, role in ((ColdTensor, "cold"), (SyncedTensor, "engine"))
    )
    held = [*first, *(replace(item, version=2) for item in first)]
    for state, verdict in ((held, Verdict.HOLDS), (held[:3], Verdict.VIOLATED)):
        records = [item for item in clean() if not isinstance(item, (ColdTensor, SyncedTensor))]
        outcome = run_check(REGISTRY["ENG002"], Trace(MANIFEST, [*records, *twice, *state], ARRAYS.__getitem__))
        assert outcome.verdict is verdict


@pytest.mark.parametrize(("changed", "verdict"), [(False, Verdict.HOLDS), (True, Verdict.VIOLATED)])
def test_a_training_run_knows_only_the_buffers_of_a_cold_engine(changed, verdict) -> None:
    """Its engine held other weights at its start, so that parameters are not held against them."""
    cold, held = (
        [
            replace(tensor(kind, "b", 1, role="engine", sort="buffer"), name="rotary.inv_freq", version=version)
            for version in (1, 2)
        ]
        for kind in (ColdTensor, SyncedTensor)
    )
    held[1] = replace(held[1], digest="vd1:" + "f" * 32) if changed else held[1]
    records = [item for item in clean() if not isinstance(item, ColdTensor)]
    outcome = run_check(REGISTRY["ENG002"], Trace(MANIFEST, [*records, *cold, *held], ARRAYS.__getitem__))
    assert outcome.verdict is verdict


WIDER = {
    "dtype": "bfloat16",
    "wider_dtype": "float32",
    "wider_digest": tensor(ColdTensor, "a", 1, sort="buffer").digest,
}


@pytest.mark.parametrize(
    ("held", "expected", "verdict", "widened"),
    [
        ({}, WIDER, Verdict.HOLDS, ("`a` (bfloat16 as float32)",)),
        ({"digest": "vd1:" + "f" * 32}, WIDER, Verdict.VIOLATED, ()),
        ({"shape": (2, 4)}, WIDER, Verdict.VIOLATED, ()),
        ({"dtype": "float64"}, WIDER, Verdict.VIOLATED, ()),
        ({}, {"dtype": "bfloat16"}, Verdict.VIOLATED, ()),
    ],
)
def test_the_same_values_in_a_wider_dtype_are_no_mismatch(held, expected, verdict, widened) -> None:
    changed = {CheckpointView: held, ExpectedView: expected}
    records = [
        replace(item, **changed[type(item)]) if type(item) in changed and item.name == "a" else item for item in clean()
    ]
    outcome = run_check(REGISTRY["ENG001"], Trace(MANIFEST, records, ARRAYS.__getitem__))
    assert (outcome.verdict, outcome.widened) == (verdict, widened)
    report = report_of(Trace(MANIFEST, records, ARRAYS.__getitem__), "t", only_codes=["ENG001"])
    said = "held in a wider dtype with the same values: `a` (bfloat16 as float32)"
    assert render_text(report).count(said) == len(widened)


@pytest.mark.parametrize(
    ("code", "records", "said"),
    [
        ("ENG001", change(CheckpointView, having(box=((0, 2), (0, 2))), name="a"), "the engine's ranks together hold"),
        ("ENG001", change(CheckpointView, bits_of_b, name="a"), "`a` holds in engine rank 0 what `b` should hold"),
        (
            "ENG001",
            [*clean(), EngineRestart(name="restart", version=5, restarts=1)],
            "nobody looked at engine rank 0 after its restart",
        ),
        ("TPT002", change(Handover, having(refused="tensor 1 is `b`")), "the transfer was refused: tensor 1 is `b`"),
        (
            "WGT006",
            change(ExportedTensor, rounded, name="b", rank=0, version=1),
            "has another `b` than that",
        ),
        ("LGP004", change(DrawnTokens, having(tokens=(0, 1, 0, 2) * 15)), "samples equal the one"),
    ],
)
def test_each_comparison_of_a_check_of_several_is_violated(code, records, said) -> None:
    outcome = run_check(REGISTRY[code], make_trace(records))
    assert outcome.verdict is Verdict.VIOLATED
    assert any(said in item.sentence for item in outcome.finding.bad), outcome.finding
