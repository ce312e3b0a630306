"""Makers of rewards and replies, against those that the config names, by a second table of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verifier.core.comparison import Comparison
from verifier.core.record import Record
from verifier.core.stage import Stage
from verifier.core.trace import Trace

MAKERS: Mapping[str, Mapping[str, str]] = {
    "reward": {
        "answer": "verifier.rewards.answer:answer_reward",
        "math_verify": "verifier.rewards.math_verify:math_verify_reward",
        "reasoning_gym": "verifier.rewards.reasoning_gym:reasoning_gym_reward",
        "verifiers": "verifier.environments.verifiers_episodes:verifiers_reward",
    },
    "environment": {
        "calculator": "verifier.environments.calculator:Calculator",
        "verifiers": "verifier.environments.verifiers_episodes:VerifiersEnvironment",
    },
}
"""Knob of `grpo` -> name -> maker. Any other is named by its maker, or by a plugin that is not known here."""


def compare_maker(
    trace: Trace, item: Record, made_by: str, *, knob: str, what: str, made: str, told_by: str, stage: Stage
) -> Iterator[Comparison]:
    """Compare a maker with the one that the config names, where both are known.

    Args:
        trace: has the config.
        item: record of what was made.
        made_by: maker, "package.module:name"; empty where nobody recorded it.
        knob: of `grpo`, a key of `MAKERS`.
        what: noun for the maker, "function" for instance.
        made: noun for what it made, in the plural.
        told_by: noun for what recorded the maker.
        stage: of a wrong maker.
    """
    grpo = trace.manifest.config.get("grpo")
    asked = str(grpo.get(knob, "")) if isinstance(grpo, Mapping) else ""
    right = MAKERS[knob].get(asked, asked if ":" in asked else "")
    if right and made_by:
        yield Comparison(
            what=f"{what} of {item.name}", same=made_by == right, stage=stage, version=item.version, badness=1.0,
            sentence=f"{made} of {item.name} are by `{made_by}`, they should be by `{right}`",
            expected=f"{right} (grpo.{knob}={asked})", actual=f"{made_by} ({told_by})", allowed="exact (names)",
            hint=f"look at what hands the name of the {knob} on",
        )  # fmt: skip
