"""Weights that the processes of engines held when they sampled, against the versions that answers claim."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from verifier.checks.handed_on import answers_in, by_answer
from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, compare_value
from verifier.core.records_policy import EvaluatedAnswers, PolicyColumns, SamplingAsked
from verifier.core.records_trainer import PreviousStep
from verifier.knob import flat


def compare_answers(trace: Trace, asked: SamplingAsked, policy: PolicyColumns) -> Iterator[Comparison]:
    """Compare each sampled token of a step's answers; those of engines that name no weights are left out."""
    named = by_answer(trace, policy.version, lambda item: item.weights)
    columns = ragged.split(trace.array(policy, "version"), policy.lengths)
    for name, versions in zip(policy.ids, columns, strict=True):
        for answer, begin, end in answers_in(trace, policy.version, name, versions):
            if not named.get(answer):
                continue
            held = [version for version, count in named[answer] for _ in range(count)]
            claimed = versions[begin:end].tolist()
            wrong = _wrong(trace, asked.sent, claimed, held)
            own = f"turn {answer[1]} of `{answer[0]}`" if answer[1] else f"`{answer[0]}`"
            at = next(iter(wrong), 0)
            at_name, where = f"weights of {own}".replace("`", ""), At(Stage.ROLLOUT, policy.version, "engine")
            sentence = f"{len(wrong):,} of {len(claimed):,} tokens of {own} claim other weights than its engine held"
            found = f"version {held[at]}" if at < len(held) else "no token"
            right, same = f"version {claimed[at]} of token {at}, as it claims", not wrong and len(claimed) == len(held)
            yield compare_value(where, at_name, found, right, same=same, sentence=sentence)


def compare_evaluated(trace: Trace, item: EvaluatedAnswers) -> Iterator[Comparison]:
    """Compare the weights of all answers of an evaluation; those of engines that name none are left out."""
    sent = () if item.sent is None else (item.sent,)
    for held in item.weights:
        at, same = At(Stage.ROLLOUT, item.version, "engine"), not _wrong(trace, sent, [item.claimed], [held])
        sentence = f"an evaluation names version {item.claimed}, and its engine held version {held}"
        yield compare_value(at, f"weights {held}", held, item.claimed, same=same, sentence=sentence)


def _wrong(trace: Trace, sent: Collection[int], claimed: list[int], held: list[int]) -> list[int]:
    """Places of tokens that other weights sampled than they claim; tokens without a name of weights are all wrong."""
    right = {version: sent_as(trace, sent, version) for version in {*claimed}}
    found = np.full(len(claimed), -1)
    found[: len(held)] = held[: len(claimed)]
    return [
        at
        for at, (version, own) in enumerate(zip(claimed, found.tolist(), strict=True))
        if own < 0 or (own > version if right[version] is None else own != right[version])
    ]


def sent_as(trace: Trace, sent: Collection[int], version: int) -> int | None:
    """Return the version under which an engine was sent the weights of a version.

    A step without an update sends nothing: its version is sampled by the weights that were sent last before it. Of
    weights that an earlier process sent it is known alone that they are no newer.

    Args:
        trace: of a step, with what is known of the one before.
        sent: versions that the engine was sent last.
        version: that tokens claim.

    Returns:
        The version itself, or an older one; None where it is not known.
    """
    before = next(trace.of(PreviousStep, version=version), None)
    if before is not None and before.updated:
        return version
    return max((own for own in sent if own <= version), default=None)


def adapters_named(trace: Trace, versions: Iterable[int], sent: Collection[int]) -> list[str] | None:
    """Return names of the adapters that sampled some versions, as an engine gets them; see `sent_as`.

    Returns:
        A name for each version; empty for a run whose engine gets no adapter; None where it is not known.
    """
    config = flat(trace.manifest.config)
    if not config.get("lora.rank") or config.get("lora.sync") != "adapter":
        return []
    held = {sent_as(trace, sent, version) for version in versions}
    return None if None in held else [f"version-{own:06d}" for own in sorted(own for own in held if own is not None)]
