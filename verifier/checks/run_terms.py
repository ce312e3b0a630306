"""Terms that the parts of a training step work by, against those that the run's config asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.record import Record
from verifier.core.records_data import ExamplesRead
from verifier.core.records_policy import (
    Advantages,
    Drops,
    EpisodeTurns,
    EvaluatedAnswers,
    LossTerms,
    PolicyColumns,
    SamplingAsked,
    SamplingRound,
)
from verifier.core.records_trainer import DataOrder, LossColumns, StepSizes
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.knob import flat

Config = Mapping[str, Any]
"""A run's config under dotted keys."""
Wanted = str | Callable[[Config], Any]
"""Key of the config that a term is a copy of, or what makes it of the config: an ellipsis where it asks for none."""


class Terms(NamedTuple):
    """Terms that one kind of record has of a run's config."""

    record: type[Record]
    stage: Stage
    """Stage that works by them."""
    fields: Mapping[str, Wanted]


def _in(place: str) -> Wanted:
    """Weight of the KL divergence in one place; 0 where it is in the other."""
    return lambda config: config["grpo.kl_weight"] if config["grpo.kl_in"] == place else 0.0


def _or(key: str, none: Any) -> Wanted:
    """Value of a key; another for null."""
    return lambda config: none if config[key] is None else config[key]


def _grpo(*names: str, **others: str) -> dict[str, Wanted]:
    """Copies of knobs of `grpo`, of their names or of others."""
    return {name: f"grpo.{key}" for name, key in {**dict(zip(names, names, strict=True)), **others}.items()}


TERMS = (
    Terms(
        DataOrder, Stage.DATA,
        {"seed": "seed", "batch_size": "data.batch_size", "num_examples": _or("data.num_examples", ...)},
    ),
    Terms(ExamplesRead, Stage.DATA, {"source": "data.source"}),
    Terms(
        LossColumns, Stage.ADVANTAGE,
        {"aggregation": "aggregation", "constant": lambda config: config["aggregation_constant"] or 1.0},
    ),
    Terms(StepSizes, Stage.DATA, {"batch_size": "data.batch_size"}),
)  # fmt: skip
"""Terms of any algorithm."""
OF_GRPO = (
    Terms(StepSizes, Stage.DATA, _grpo("group_size", "mini_batches", "epochs")),
    Terms(Drops, Stage.DATA, _grpo("drop_overlong", "drop_zero_variance")),
    Terms(EpisodeTurns, Stage.DATA, _grpo("environment", "max_turns", "step_wise")),
    Terms(SamplingRound, Stage.REWARD, _grpo(limit="max_sampling_rounds")),
    Terms(
        Advantages, Stage.ADVANTAGE,
        {**_grpo("kl_kind", estimator="advantage"), "kl_weight": _in("reward")},
    ),
    Terms(
        PolicyColumns, Stage.ADVANTAGE,
        {
            **_grpo("ratio_over", "weight_cap", "mask_low", "mask_high", "max_staleness", "keep_kv_cache"),
            **{level: _or(f"grpo.{level}", "") for level in ("weight_level", "mask_level")},
        },
    ),
    Terms(
        LossTerms, Stage.LOSS,
        {
            **_grpo("loss", "clip_low", "clip_high", "dual_clip", "kl_kind", "entropy_weight", "temperature"),
            "kl_weight": _in("loss"),
        },
    ),
    Terms(
        SamplingAsked, Stage.ROLLOUT,
        {
            **_grpo("group_size", "max_turns", "temperature", "max_answer_tokens", max_rounds="max_sampling_rounds"),
            "seed": "seed", "batch_size": "data.batch_size",
        },
    ),
    Terms(EvaluatedAnswers, Stage.ROLLOUT, _grpo("temperature", "max_answer_tokens")),
)  # fmt: skip
"""Terms of policy-gradient runs."""


@check("CFG003", needs=(StepSizes,), scope="sizes")
def term_differs_from_config(trace: Trace) -> Iterator[Comparison]:
    """Every part of a step works by the terms that the run's config asks for.

    What it checks: the terms by which the controller makes a step, as it records them beside its numbers, against the
    config in the step's manifest: source of the data, seed and size of batches, what is asked of the engine in training
    and in an evaluation, turns, rounds, filters, estimator, KL estimate and its place, importance weights and masks,
    staleness, mean over tokens, terms of the loss.
    Why it matters: other checks compute a step once more by its own terms. A flag that is read from another group of
    knobs, or not handed on, leaves a default in its place, and all numbers agree with that: rewards are divided by
    their deviation where that was switched off, or a mean over tokens stands where one over answers was asked for.
    Evidence: data/sizes, data/order, data/read, data/asked, data/drops, data/turns, reward/round, advantage/advantages,
    advantage/policy, advantage/columns, loss/terms, rollout/evaluated, and the manifest's config.
    Tolerance and its source: exact; terms are copied.
    What it does not catch: a config that is not what was asked for (CFG002); settings of Megatron (CFG001), of the
    schedule (TRN002), of the reward (RWD003); a term that is recorded rightly and not worked by (the checks of its
    stage).
    References: verl#945, verl#7893, rllm#447, SkyRL#77.
    """
    config = flat(trace.manifest.config)
    for terms in (*TERMS, *(OF_GRPO if config.get("algorithm") == "grpo" else ())):
        for item in trace.of(terms.record):
            for field, wanted in terms.fields.items():
                try:
                    right = config[wanted] if isinstance(wanted, str) else wanted(config)
                except KeyError:  # a config of another version, which has no such knob
                    continue
                if right is ...:
                    continue
                held = getattr(item, field)
                yield Comparison(
                    what=f"{field} of {item.name}", same=held == right, stage=terms.stage, version=item.version,
                    badness=1.0, sentence=f"{item.name} has {field} {held!r}, the config asks for {right!r}",
                    expected=f"{right!r} (the manifest's config)", actual=f"{held!r} (what the step works by)",
                    allowed="exact (terms are copied)",
                    hint="look at which object this part of the step reads its knobs from",
                )  # fmt: skip
