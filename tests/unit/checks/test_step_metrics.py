"""MET001: the numbers that a step shows are those of all its answers and tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.checks.packing import POSITION_BITS
from verifier.checks.step_metrics import OPTIONAL
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import Real, Record
from verifier.core.records_policy import (
    Advantages,
    Drops,
    EpisodeTurns,
    LossRows,
    LossTerms,
    PolicyColumns,
    Runs,
    SamplingRound,
    StepMetrics,
    WrittenMetrics,
)
from verifier.core.records_trainer import LossColumns, TrainerStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace

IDS = ("a", "b", "c", "d")
RIGHT = {
    "reward": 0.25, "mixed_groups": 0.5, "truncated_share": 0.5, "num_tokens": 4.0, "entropy": 1.25, "kl": 0.0,
    "clipped_share": 0.5, "answer_tokens": 1.0, "loss": -0.5, "grad_norm": 2.0, "learning_rate": 1e-3,
    "staleness": 0.5, "dropped_stale": 2.0, "turns": 1.5, "sampling_rounds": 2.0, "replaced_groups": 1.0,
    "tokens": 8.0, "sampled_tokens": 4.0, "scored_tokens": 8.0, "ratio_gap": 0.5, "clamped_share": 0.0,
    "mismatch_max": 0.5, "mismatch_p99": 0.4975, "mismatch_k3": float(np.mean(np.expm1([0.5, 0.25]) - [0.5, 0.25])),
    "mismatch_by_position_1": 0.375, **{f"mismatch_by_position_{part}": float("nan") for part in range(2, 9)},
}  # fmt: skip
CONFIG = {"grpo": {"max_answer_tokens": 8, "max_turns": 1}}
RATIOS = np.array([1.5, 1.0, 0.5, 1.0])
"""Of the last token of each rollout: the first is clipped above, the third below."""


def trace(trajectories: tuple[str, ...] = IDS, without: str = "", **shown: float) -> Trace:
    """One update over two groups of two rollouts, of a prompt's token and one answer's."""
    lengths, tokens = (2, 2, 2, 2), 8
    answer = np.arange(tokens) % 2 == 1
    policy = {
        "divisor": np.where(answer, -1.0, np.nan), "advantage": np.repeat([1.0, 1.0, -1.0, -1.0], 2),
        "version": np.where(answer, np.repeat([2, 2, 1, 1], 2), -1), "old": np.where(answer, -1.0, np.nan),
        "engine": np.where(answer, np.repeat([-1.5, -1.25, -9.0, -9.0], 2), np.nan), "mask": answer,
    }  # fmt: skip
    rows = {
        "sentinel": (np.arange(1, 5) << POSITION_BITS) + 1, "mask": np.ones(4, bool), "current": -1.0 + np.log(RATIOS),
        "entropy": np.array([1.0, 1.0, 1.0, 2.0]), "loss": np.zeros(4), "weight": np.ones(4),
    }  # fmt: skip
    arrays = {"policy": policy, "rows": rows, "columns": {"mask": answer, "weight": answer / 4}}
    records: list[Record] = [
        LossTerms(name="loss", version=1, loss="clipped", clip_low=0.2, clip_high=0.2),
        StepMetrics(
            name="step", version=1,
            values={name: value for name, value in {**RIGHT, **shown}.items() if name != without},
        ),
        Advantages(
            name="advantages", version=1, estimator="grpo", ids=IDS, groups=("g", "g", "h", "h"),
            trajectories=trajectories, rewards=(1.0, 0.0, 0.0, 0.0), penalties=(0.0,) * 4, token_counts=(1,) * 4,
            advantages=(0.0,) * 4,
        ),
        Drops(
            name="batch", version=1, ids=IDS, truncated=(True, True, False, False), reasons=("",) * 4,
            drop_overlong=False, drop_zero_variance=False,
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=IDS, lengths=lengths, ratio_over="old", weight_level="",
            weight_cap=2.0, mask_level="", mask_low=0.5, mask_high=2.0, max_staleness=0, trained_version=2,
            array="policy",
        ),
        EpisodeTurns(
            name="round 0", version=1, environment="echo", max_turns=2, step_wise=False, before="", after="", end=0,
            episodes=("a", "a", "b"), indices=(0, 1, 0), prompts=((1,),) * 3, sampled=((2,),) * 3, texts=("",) * 3,
            replies=((),) * 3, said=("",) * 3,
        ),
        *(
            SamplingRound(
                name=f"round {number}", version=1, round=number, limit=3, ids=IDS[:2], groups=("g", group),
                rewards=(0.0, 0.0), token_counts=(1, 1), replaced={},
            )
            for number, group in enumerate("hg")
        ),
        LossColumns(
            name="update 1", version=1, aggregation="token_mean", ids=IDS, groups=IDS, lengths=lengths,
            array="columns",
        ),
        LossRows(name="update 1", version=1, coordinate="", array="rows"),
        TrainerStep(
            name="update 1", version=1, step=1, loss=-0.5, num_tokens=4, grad_norm=2.0, learning_rate=1e-3,
            weight_decay=0.0, optimizer_steps=1, scheduler_steps=2,
        ),
    ]  # fmt: skip
    return Trace(Manifest(complete=True, config=CONFIG), records, arrays.__getitem__)


def test_right_numbers_hold() -> None:
    outcome = run_check(REGISTRY["MET001"], trace())
    assert outcome.error is None
    assert outcome.verdict is Verdict.HOLDS
    assert outcome.num_compared == len(RIGHT)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("reward", 0.5), ("mixed_groups", 1.0), ("truncated_share", 0.0), ("num_tokens", 8.0), ("entropy", 5.0),
        ("kl", 0.01), ("clipped_share", 0.25), ("answer_tokens", 2.0), ("loss", -0.25), ("grad_norm", 6.0),
        ("learning_rate", 5e-4), ("staleness", 1.5), ("dropped_stale", 1.0), ("turns", 5 / 3), ("sampling_rounds", 3.0),
        ("replaced_groups", 2.0), ("tokens", 16.0), ("sampled_tokens", 8.0), ("scored_tokens", 16.0),
        ("ratio_gap", 1.5), ("clamped_share", 0.25), ("mismatch_max", 0.25), ("mismatch_p99", 0.5),
        ("mismatch_k3", 0.05), ("mismatch_by_position_1", 0.5), ("mismatch_by_position_2", 0.0),
    ],
)  # fmt: skip
def test_a_wrong_number_is_named(name: str, shown: float) -> None:
    outcome = run_check(REGISTRY["MET001"], trace(**{name: shown}))
    assert outcome.verdict is Verdict.VIOLATED
    assert [item.what for item in outcome.finding.bad] == [name]


@pytest.mark.parametrize("name", [name for name, value in RIGHT.items() if value == value])
def test_a_number_that_is_not_shown_is_named(name: str) -> None:
    outcome = run_check(REGISTRY["MET001"], trace(without=name))
    bad = outcome.finding.bad if outcome.finding else []
    assert [item.what for item in bad] == ([] if name in OPTIONAL else [name])


def test_of_several_turns_the_last_one_was_cut_off_or_not() -> None:
    found = run_check(REGISTRY["MET001"], trace(("a", "a", "b", "c"), truncated_share=1 / 3)).finding
    assert found is not None
    assert "truncated_share" not in [item.what for item in found.bad]
    found = run_check(REGISTRY["MET001"], trace(("a", "b", "b", "c"), truncated_share=0.5)).finding
    assert found is not None
    assert "truncated_share" in [item.what for item in found.bad]


def written(step: int = 4, **values: Real) -> tuple[Verdict, list[str]]:
    line = WrittenMetrics(
        name="metrics.jsonl", version=4, step=step, values={"reward": 0.5, "time_s": 1.0, **values},
        recorded={"reward": 0.5, "kl": "nan"},
    )  # fmt: skip
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [line]))
    return outcome.verdict, [item.what for item in outcome.finding.bad] if outcome.finding else []


def test_a_line_of_its_own_step_holds() -> None:
    assert written(kl="nan") == (Verdict.HOLDS, [])


TIMES: dict[str, Real] = {"kl": "nan", "time_s": 1.0, "prepare_s": 0.5, "train_s": 0.25, "sync_s": 0.125}


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"tokens": 60.0, "train_tokens_per_s": 240.0}, []),
        ({"tokens": 60.0, "train_tokens_per_s": 60.0}, ["train_tokens_per_s"]),  # of the whole step's seconds
        ({"tokens": 60.0}, ["train_tokens_per_s"]),
        ({"rollout_s": 0.25, "score_s": 0.25}, []),
        ({"rollout_s": 0.5, "score_s": 0.25}, ["prepare_s"]),
        ({"train_s": 0.5}, ["time_s"]),
        ({"sampled_tokens": 60.0}, []),  # of recorded rollouts, which took no time
    ],
)
def test_a_rate_is_the_quotient_of_its_line_and_a_time_as_long_as_its_parts(
    values: dict[str, Real], wrong: list[str]
) -> None:
    assert written(**TIMES | values) == (Verdict.VIOLATED if wrong else Verdict.HOLDS, wrong)


def test_a_line_of_another_step_or_with_other_numbers_is_seen() -> None:
    assert written(step=3, kl="nan") == (Verdict.VIOLATED, ["step"])
    assert written(reward=0.25, kl="nan") == (Verdict.VIOLATED, ["reward"])
    assert written() == (Verdict.VIOLATED, ["kl"])


@pytest.mark.parametrize(
    ("step", "event", "wrong"),
    [
        (4, {"reward": 0.5, "time_s": 0.10000000149011612, "signs": 1.0}, []),
        (3, {"reward": 0.5, "time_s": 0.10000000149011612}, ["step of TensorBoard"]),
        (4, {"reward": 0.25, "time_s": 0.10000000149011612}, ["reward of TensorBoard"]),
        (4, {"reward": 0.5}, ["time_s of TensorBoard"]),
        (-1, {}, ["step of TensorBoard", "reward of TensorBoard", "time_s of TensorBoard"]),
        (-1, None, []),  # TensorBoard is not installed
    ],
)  # fmt: skip
def test_a_curve_has_the_numbers_of_the_line_in_float32(step: int, event: dict[str, Real] | None, wrong: list[str]):
    line = WrittenMetrics(
        name="metrics.jsonl", version=4, step=4, values={"reward": 0.5, "time_s": 0.1, "mismatch_by_position_8": "nan"},
        recorded={"reward": 0.5}, event_step=step, event=event,
    )  # fmt: skip
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [line]))
    assert [item.what for item in outcome.finding.bad] == wrong if outcome.finding else not wrong
    gone_on = msgspec.structs.replace(line, recorded={}, event_step=-1, event={})
    assert run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [gone_on])).verdict is Verdict.HOLDS


def test_a_line_that_a_resume_kept_is_the_checkpoints() -> None:
    line = WrittenMetrics(name="metrics.jsonl", version=4, step=5, values={"reward": 0.5}, recorded={})
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [line]))
    assert outcome.finding is not None
    assert outcome.finding.first.stage is Stage.CHECKPOINT


@pytest.mark.parametrize(
    ("found", "begun", "lines", "wrong"),
    [
        ((), 0, ((1, 4),), []),
        (((1, 3),), 2, ((1, 4),), []),
        (((1, 2),), 2, ((3, 4),), ["lines"]),  # opened anew
        (((1, 3),), 2, ((1, 3), (3, 4)), ["lines"]),  # a step twice
        (((1, 3),), 2, ((1, 1), (3, 4)), ["lines"]),  # the checkpoint's own line is lost
        (((1, 3),), 4, ((1, 4),), ["lines"]),  # its line was not there when the process began
        (((2, 9),), 3, ((2, 4),), []),  # somebody had cut the file before
        (((1, 4), (3, 5)), 4, ((1, 4), (3, 4)), []),  # an older process had left lines behind its checkpoint
        (((1, 2), (7, 7), (3, 3)), 3, ((1, 4),), []),
        (((1, 4),), 3, None, []),
    ],
)  # fmt: skip
def test_each_step_has_one_line_whatever_was_there(found: Runs, begun: int, lines: Runs | None, wrong: list[str]):
    line = WrittenMetrics(
        name="metrics.jsonl", version=4, step=4, values={}, recorded={}, lines=lines, lines_found=found, begun=begun
    )
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [line]))
    assert [item.what for item in outcome.finding.bad] == wrong if outcome.finding else not wrong
    if outcome.finding:
        assert outcome.finding.first.stage is (Stage.CHECKPOINT if begun == 4 else Stage.LOSS)


@pytest.mark.parametrize(
    ("begun", "events", "restart", "wrong"),
    [
        (2, ((3, 4),), 3, []),
        (4, (), -1, []),
        (0, ((1, 4),), 1, []),
        (2, ((3, 4),), -1, ["restart of TensorBoard"]),
        (2, ((3, 4),), 4, ["restart of TensorBoard"]),
        (2, ((4, 4),), 3, ["points"]),
        (2, ((3, 4), (4, 4)), 3, ["points"]),
        (2, None, -1, []),
    ],
)  # fmt: skip
def test_a_curve_forgets_steps_that_are_taken_again(begun: int, events: Runs | None, restart: int, wrong: list[str]):
    line = WrittenMetrics(
        name="metrics.jsonl", version=4, step=4, values={}, recorded={}, events=events, restart=restart, begun=begun
    )
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True), [line]))
    assert [item.what for item in outcome.finding.bad] == wrong if outcome.finding else not wrong


@pytest.mark.parametrize(
    ("step", "every", "has", "holds"),
    [
        (1, 1, True, True), (4, 2, True, True), (3, 2, False, True), (1, 2, True, True), (2, 0, False, True),
        (4, 2, False, False), (1, 2, False, False), (3, 2, True, False),
    ],
)  # fmt: skip
def test_an_evaluation_is_in_the_line_of_its_step_just_if_it_is_due(step: int, every: int, has: bool, holds: bool):
    config = {"evaluation": {"every": every, "num_problems": 8, "stop_above": 0.75}, "data": {"rollouts": None}}
    values: dict[str, Real] = {"loss": 1.0, **({"accuracy": 0.5} if has else {})}
    line = WrittenMetrics(name="metrics.jsonl", version=step, step=step, values=values, recorded={"loss": 1.0})
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True, config=config), [line]))
    assert outcome.verdict is (Verdict.HOLDS if holds else Verdict.VIOLATED)
    gone_on = Trace(Manifest(complete=True, config=config), [msgspec.structs.replace(line, recorded={})])
    assert run_check(REGISTRY["MET002"], gone_on).verdict is Verdict.HOLDS  # another process took the step


def test_a_run_that_goes_on_although_it_solves_enough_is_seen() -> None:
    config = {"evaluation": {"every": 1, "num_problems": 8, "stop_above": 0.75}, "data": {"rollouts": None}}
    line = WrittenMetrics(name="metrics.jsonl", version=2, step=2, values={"accuracy": 0.75}, recorded={})
    outcome = run_check(REGISTRY["MET002"], Trace(Manifest(complete=True, config=config), [line]))
    assert [item.what for item in outcome.finding.bad] == ["goes on"]
    last = Manifest(complete=True, config=config, scopes=("ended",))
    assert run_check(REGISTRY["MET002"], Trace(last, [line])).verdict is Verdict.HOLDS
