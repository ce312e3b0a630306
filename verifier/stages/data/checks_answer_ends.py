"""Ends of answers, and groups of one prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import on, recorded, told
from verifier.stages.advantage.records import Advantages, PolicyColumns
from verifier.stages.checks_conditions import LIVE, SYNCED
from verifier.stages.data.records import Drops, SamplingAsked
from verifier.stages.pack.records import Rollouts


@dataclass(frozen=True, slots=True)
class _Turn:
    """Sampled tokens of one turn; an answer without an environment has one."""

    tokens: tuple[int, ...]
    is_last: bool


@check(
    "DAT008", needs=(SamplingAsked, PolicyColumns, Drops, Rollouts),
    applies=on(step=SYNCED, loop=recorded(PolicyColumns, Advantages, Drops, SamplingAsked)
        & told("ends", "no end token is known")),
)  # fmt: skip
def answer_ends_elsewhere(trace: Trace) -> Iterator[Comparison]:
    """A live answer is in the loss from its first token to its end token, and was cut off only at the greatest length.

    What it checks: per rollout that stays in the batch, that the loss has each token that a version of the weights
    sampled, and no other. Per turn of a rollout that was packed (an answer without an environment is one), that the end
    token stands at its last place alone, that it has no more tokens than are allowed, and as many as that if no end
    token ends it; in an episode of several turns each but the last was ended. And that a rollout is said to be cut off
    just if its last turn has no end token.
    Why it matters: an end token that is masked, as one that is also padding, is never learned, and answers grow until
    they are cut off. An answer that counts as cut off is left out; one whose stop token does not reach the engine runs
    on.
    Evidence: data/asked (as the config asks), advantage/policy, data/drops, pack/rollouts.
    Tolerance and its source: exact; tokens and flags.
    Where to look: what makes the loss mask of an answer, its end token above all; which stop tokens and which limit
    reach the engine; and what tells a whole answer from one that was cut off.
    What it does not catch: an answer that is shorter than allowed and ends with another end token that the checkpoint
    names, at which engines stop too; tokens of an answer that are lost with their versions (LGP009, by what comes
    after); a rollout without a token in the loss, which no rank packs, beyond its flag.
    References: trl#4970, RL#4089, SkyRL#1319, verl#213.
    """
    for asked in trace.of(SamplingAsked):
        if not asked.max_answer_tokens:  # a step of a recorded loop that does not say
            continue
        for policy in trace.of(PolicyColumns, version=asked.version):
            for drops in trace.of(Drops, version=asked.version):
                yield from _masks(trace, policy, dict(zip(drops.ids, drops.reasons, strict=True)))
        turns: dict[str, list[_Turn]] = {}
        for rollouts in trace.of(Rollouts, version=asked.version):
            turns |= _turns(trace, rollouts)
        for name, own in turns.items():
            yield _ends(asked, name, own)
        for drops in trace.of(Drops, version=asked.version):
            for name, truncated in zip(drops.ids, drops.truncated, strict=True):
                if name in turns:
                    yield _flag(asked, name, turns[name][-1], truncated)


def _masks(trace: Trace, policy: PolicyColumns, reasons: Mapping[str, str]) -> Iterator[Comparison]:
    masks = ragged.split(trace.array(policy, "mask").astype(bool), policy.lengths)
    versions = ragged.split(trace.array(policy, "version"), policy.lengths)
    for name, mask, version in zip(policy.ids, masks, versions, strict=True):
        if reasons.get(name):
            continue
        sampled = version >= 0
        wrong = np.flatnonzero(mask != sampled)
        side = "" if not wrong.size else "out of" if sampled[wrong[0]] else "in"
        outside = f"{wrong.size} of the {int(sampled.sum())} tokens that were sampled for `{name}` are out of the loss"
        others = f"{wrong.size} tokens of `{name}` are wrongly in or out of the loss"
        right = f"{int(sampled.sum())} tokens in the loss"
        found = f"{int(mask.sum())}, token {wrong[:1]} {side} the loss"
        at, sentence = At(Stage.DATA, policy.version), outside if side == "out of" else others
        yield compare_value(at, name, found, right, same=not wrong.size, sentence=sentence)


def _turns(trace: Trace, rollouts: Rollouts) -> Mapping[str, list[_Turn]]:
    """Turns of each rollout: runs of sampled tokens."""
    tokens = ragged.split(trace.array(rollouts, "tokens"), rollouts.lengths)
    sampled = ragged.split(trace.array(rollouts, "sampled").astype(bool), rollouts.lengths)
    found = {}
    for name, ids, drawn in zip(rollouts.ids, tokens, sampled, strict=True):
        if own := spans(drawn):
            found[name] = [_Turn(tuple(ids[at:end].tolist()), end == own[-1][1]) for at, end in own]
    return found


def _ends(asked: SamplingAsked, name: str, turns: list[_Turn]) -> Comparison:
    most, ends = asked.max_answer_tokens, (asked.end, *asked.other_ends) if asked.ends else ()
    said = (
        wrong_end(turn.tokens, most, ends, is_last=turn.is_last, where=f" in turn {number}" if number else "")
        for number, turn in enumerate(turns)
    )
    wrong = next((words for words in said if words), "")
    right = f"up to the first token {asked.end}, or {most:,} tokens" if asked.ends else f"{most:,} tokens"
    found = ", ".join(f"{len(turn.tokens):,} tokens, the last is {turn.tokens[-1]}" for turn in turns[-2:])
    at, sentence = At(Stage.ROLLOUT, asked.version, "engine"), f"the answer `{name}` {wrong}"
    return compare_value(at, f"end of {name}", found, right, same=not wrong, sentence=sentence)


def wrong_end(tokens: Sequence[int], most: int, ends: Sequence[int], *, is_last: bool = True, where: str = "") -> str:
    """Words for what is wrong with the end of an answer or turn; empty if nothing is.

    Args:
        tokens: that were sampled.
        most: tokens that are allowed.
        ends: tokens that end it, the tokenizer's end token first; empty where none does.
        is_last: nothing comes after it.
        where: words that say which turn it is.
    """
    size, end = len(tokens), ends[0] if ends else None
    if size > most:
        return f"has {size:,} tokens{where}, {most:,} are allowed"
    ended = tokens[-1] == end
    if end in tokens[:-1]:
        return f"runs on after its end token, {end}, at place {[*tokens].index(ends[0])} of {size}{where}"
    if not ended and not is_last:
        return f"goes on without an end token{where}"
    if tokens[-1] not in ends and size != most:
        return f"stops after {size:,} tokens{where}, without an end token and before {most:,}"
    return ""


def spans(drawn: np.ndarray) -> list[tuple[int, int]]:
    """Beginning and end of each run of sampled tokens, which are turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn, [False]])))
    return [(begin, end) for begin, end in edges.reshape(-1, 2).tolist()]


def _flag(asked: SamplingAsked, name: str, last: _Turn, truncated: bool) -> Comparison:
    words = {True: "cut off", False: "whole"}
    says = "", f"its last token is {last.tokens[-1]}, the end token {asked.end}"
    right, subject = words[last.tokens[-1] != asked.end], f"the answer `{name}`, by its flag,"
    return compare_value(asked, f"flag of {name}", words[truncated], right, subject=subject, says=says)


@check(
    "DAT007",
    needs=(SamplingAsked, Advantages),
    applies=on(
        step=LIVE,
        loop=recorded(SamplingAsked, Advantages) & told("sizes", "the loop does not say how many answers it asks for"),
    ),
)
def step_of_another_size(trace: Trace) -> Iterator[Comparison]:
    """A live batch has the prompts, and of each prompt the answers, that were asked of the engine.

    What it checks: the number of prompts with an answer, and the number of answers to each, where the turns of a
    trajectory are one answer, against what the step asked of the engine.
    Why it matters: an answer that is lost on its way changes the group that its advantages are relative to. All other
    counts are then those of what was left, and agree.
    Evidence: data/asked, advantage/advantages.
    Tolerance and its source: exact; these are counts.
    Where to look: what loses answers of the engine.
    What it does not catch: recorded rollouts; which groups further rounds of sampling replace.
    References: labs-molt#109, SkyRL#1529.
    """
    for asked in trace.of(SamplingAsked):
        for given in trace.of(Advantages, version=asked.version):
            answers: dict[str, set[str]] = defaultdict(set)
            for group, trajectory in zip(given.groups, given.trajectories, strict=True):
                answers[group].add(trajectory)
            counts = [("prompts with an answer", len(answers), asked.batch_size)]
            counts += [(f"answers to prompt `{group}`", len(own), asked.group_size) for group, own in answers.items()]
            for what, actual, expected in counts:
                says = "", f"batch size {asked.batch_size}, {asked.group_size} answers"
                yield compare_value(
                    asked, what, actual, expected, subject=f"the number of {what} in the step", says=says
                )
