"""CFG003 on hand-written records: terms of a step beside those that the manifest's config asks for.

What this does not exercise: real runs (tests/dist/train_clean_case.py), and bugs that CFG003 catches (tests/faults).
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import MANIFEST
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.records_policy import Drops, EvaluatedAnswers, LossTerms, PolicyColumns, SamplingAsked
from verifier.core.records_trainer import StepSizes
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.trainer.worker_spec import loss_terms, step_sizes

KNOBS = ("model=tiny:add", "run=nowhere")
GRPO = ("algorithm=grpo", "grpo.group_size=4", "grpo.mini_batches=2", "grpo.epochs=2")
PENALISED = ("algorithm=grpo", "grpo.weight_level=token", "grpo.kl_weight=0.5", "grpo.kl_in=reward", "grpo.kl_kind=k1")


def config_of(knobs):
    return load(TrainConfig, overrides=[*KNOBS, *knobs])[0]


def judged(records, knobs, **config):
    told = {**config_of(knobs).to_dict(), **config}
    outcome = run_check(REGISTRY["CFG003"], Trace(replace(MANIFEST, config=told), tuple(records)))
    assert outcome.error is None
    return outcome


def made_by(knobs):
    """Records of a step that a config of these knobs makes."""
    config = config_of(knobs)
    options = config.grpo
    return [
        StepSizes(name="step", version=1, **step_sizes(config)),
        LossTerms(name="loss", version=1, **loss_terms(config)),
        Drops(
            name="batch", version=1, ids=(), truncated=(), reasons=(), drop_overlong=options.drop_overlong,
            drop_zero_variance=options.drop_zero_variance,
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=(), lengths=(), ratio_over=options.ratio_over,
            weight_level=options.weight_level or "", weight_cap=options.weight_cap,
            mask_level=options.mask_level or "", mask_low=options.mask_low, mask_high=options.mask_high,
            max_staleness=options.max_staleness, trained_version=0, array="none",
        ),
        SamplingAsked(
            name="answers", version=1, seed=config.seed, batch_size=config.data.batch_size,
            group_size=options.group_size, max_rounds=options.max_sampling_rounds, max_turns=options.max_turns,
            temperature=options.temperature, max_answer_tokens=options.max_answer_tokens, end=1,
        ),
        EvaluatedAnswers(
            name="held-out problems", version=1, claimed=1, temperature=options.temperature, ids=(), lengths=(),
            greedy=(), max_answer_tokens=options.max_answer_tokens, end=1, array="none",
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("knobs", [(), ("data.batch_size=4",), GRPO, PENALISED])
def test_terms_of_the_config_hold(knobs):
    records = made_by(knobs)
    assert judged(records, knobs).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("knob", "stage", "sentence"),
    [
        ("grpo.weight_cap=4.0", Stage.ADVANTAGE, "policy inputs has weight_cap 2.0, the config asks for 4.0"),
        ("grpo.mask_level=token", Stage.ADVANTAGE, "policy inputs has mask_level '', the config asks for 'token'"),
        ("grpo.drop_overlong=true", Stage.DATA, "batch has drop_overlong False, the config asks for True"),
        ("grpo.clip_high=0.3", Stage.LOSS, "loss has clip_high 0.2, the config asks for 0.3"),
        ("grpo.epochs=2", Stage.DATA, "step has epochs 1, the config asks for 2"),
        ("seed=7", Stage.ROLLOUT, "answers has seed 1, the config asks for 7"),
        (
            "grpo.max_answer_tokens=100", Stage.ROLLOUT,
            "answers has max_answer_tokens 64, the config asks for 100",
        ),
    ],
)  # fmt: skip
def test_another_term_is_seen_in_its_own_stage(knob, stage, sentence):
    outcome = judged(made_by(PENALISED), (*PENALISED, knob))
    assert outcome.verdict is Verdict.VIOLATED
    assert outcome.finding.first.sentence == sentence
    assert outcome.finding.first.stage is stage


def test_terms_of_grpo_are_not_those_of_fine_tuning():
    assert judged(made_by(()), ("grpo.group_size=2", "grpo.clip_low=0.1")).verdict is Verdict.HOLDS


def test_a_config_without_a_knob_says_nothing_of_it():
    grpo = {"kl_weight": 0.0}
    assert judged(made_by(GRPO), GRPO, grpo=grpo).finding is None
