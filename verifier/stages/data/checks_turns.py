"""Turns of episodes with an environment, and rollouts that filters leave out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_text, compare_value
from verifier.core.condition import NEEDS, on, recorded
from verifier.core.seal import seal_of_reply
from verifier.knob import flat
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.checks_conditions import GRPO, TURNS, UPDATED
from verifier.stages.data.records import Drops, EpisodeTurns
from verifier.stages.pack.records import Rollouts
from verifier.stages.reward.records import GivenRewards

MOST_CHARACTERS = 32
"""Longest expression that the calculator reads, and longest value that it gives."""
DIGITS, OPERATORS = frozenset("0123456789"), frozenset("+-*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    reply: tuple[int, ...]
    text: str
    said: str
    read: tuple[int, ...] | None
    """Ids of the reply by a second reader; None without one."""
    decoded: str | None
    """Text of the turn by the same reader."""


@check("DAT006", needs=(EpisodeTurns, Rollouts), applies=on(step=GRPO & UPDATED & TURNS, loop=NEEDS))
def turn_differs_from_episode(trace: Trace) -> Iterator[Comparison]:
    """Every later turn is given all earlier token ids and what the tool says; sampled tokens alone are trained on.

    What it checks: per turn, that the engine was given the ids of the prompt before it, of the turn that was sampled
    and of the reply, in this order and no others; that a reply stands after a turn that was ended, is not the last one
    allowed and, for the calculator, asks for a value: then its text is the template's with the value that a second
    calculator finds. What the template puts around any reply, the ids of the whole reply, and the text of each turn as
    the environment reads it, by a second reader of the tokenizer's files, if there is one. Of any environment, that it
    said this reply, or none, when it had read the turns of this episode up to here, by seals that are taken as it
    speaks. Per rollout of the batch, that its tokens are those of the episode, and that those marked as sampled are the
    turns that it trains, as is its loss mask unless the rollout was dropped. Per episode of the batch, that each of its
    turns is there, and that the reward read its last turn. Of up to 8 problems of an evaluation, others in each, the
    turns of both answers and what the reward read of them.
    Why it matters: text that is encoded again has other tokens than those that were sampled, so their log-probabilities
    are of another context; a tool's answer in the loss teaches the model to make answers up. The reward may rise in
    both.
    Evidence: data/turns, reward/rewards, pack/rollouts, advantage/advantages.
    Tolerance and its source: exact (ids and texts).
    What it does not catch: an environment that is wrong itself, other than the calculator; a template that is wrong.
    References: trl#5224, trl#4975, verl#6501, verl#6719, NeMo-RL#1089, ms-swift#9168, AReaL#432, open-instruct#1896,
    vllm#25281, verifiers#1535, verl#6392.
    """
    versions: dict[int, list[EpisodeTurns]] = defaultdict(list)
    for item in trace.of(EpisodeTurns):
        versions[item.version].append(item)
        for name, turns in _episodes(item).items():
            yield from _given(item, name, turns)
            yield from _said(item, name, turns)
            yield from _sealed(item, name, turns)
            yield from _encoded(item, name, turns)
    for version, items in versions.items():
        for rewards in trace.of(GivenRewards, version=version):
            for item in items:
                yield from _scored(item, rewards)
        expected = {name: row for item in items for name, row in _rollouts(item)}
        for rollouts in trace.of(Rollouts, version=version):
            yield from _trained(trace, rollouts, expected)
        for given in trace.of(Advantages, version=version):
            for item in items:
                yield from _whole(item, given)


def _episodes(item: EpisodeTurns) -> Mapping[str, list[_Turn]]:
    found: dict[str, dict[int, _Turn]] = defaultdict(dict)
    rows = zip(
        item.episodes,
        item.indices,
        item.prompts,
        item.sampled,
        item.replies,
        item.texts,
        item.said,
        item.read_replies or (None,) * len(item.said),
        item.read_texts or (None,) * len(item.said),
        strict=True,
    )
    for name, index, prompt, sampled, reply, text, said, read, decoded in rows:
        found[name][index] = _Turn(
            prompt=prompt, sampled=sampled, reply=reply, text=text, said=said, read=read, decoded=decoded
        )
    return {name: [turns[at] for at in sorted(turns)] for name, turns in found.items()}


def _given(item: EpisodeTurns, name: str, turns: Sequence[_Turn]) -> Iterator[Comparison]:
    for at, (before, turn) in enumerate(pairwise(turns), start=1):
        expected = (*before.prompt, *before.sampled, *before.reply)
        sentence = f"turn {at} of `{name}` is given {len(turn.prompt)} tokens, {_differs(turn.prompt, expected)}"
        hint = "look at what encodes a turn again, cuts the context, or writes the template"
        yield compare_value(item, f"{name}, turn {at}", turn.prompt, expected, sentence=sentence, hint=hint)


def _differs(actual: Sequence[int], expected: Sequence[int]) -> str:
    for at, (found, right) in enumerate(zip(actual, expected, strict=False)):
        if found != right:
            return f"of which number {at} is {found}, where {right} was before"
    return f"where {len(expected)} were before"


def _said(item: EpisodeTurns, name: str, turns: Sequence[_Turn]) -> Iterator[Comparison]:
    for at, turn in enumerate(turns):
        may = turn.sampled[-1:] == (item.end,) and at + 1 < item.max_turns
        expected = turn.said if may else ""
        if may and item.environment == "calculator":
            value = calculated(turn.text)
            expected = "" if value is None else f"{item.before}{value}{item.after}"
        elif expected and not item.seals and not (expected.startswith(item.before) and expected.endswith(item.after)):
            expected = f"{item.before}...{item.after}"
        goes_on = at + 1 < len(turns)
        same = turn.said == expected and goes_on == bool(turn.reply) == bool(expected)
        sentence = f"`{name}` has {'another turn without a' if goes_on else 'no turn after the'} reply to turn {at}"
        sentence = "" if turn.said != expected else sentence
        found, right = f"`{turn.said[-60:]}`", f"`{expected[-60:]}`"
        what, subject = f"{name}, reply {at}", f"the reply to turn {at} of `{name}`"
        hint = "look at which turn the environment reads, and at what frames its reply"
        yield compare_value(item, what, found, right, same=same, subject=subject, sentence=sentence, hint=hint)


def _sealed(item: EpisodeTurns, name: str, turns: Sequence[_Turn]) -> Iterator[Comparison]:
    """Each reply against what the environment said to the turns of its episode, of traces that have its seals."""
    known = set(item.seals)
    for at, turn in enumerate(turns if known else ()):
        if turn.sampled[-1:] != (item.end,) or at + 1 >= item.max_turns:
            continue  # the environment is not asked
        read = [before.text for before in turns[: at + 1]]
        shown = f"`{turn.said[-60:]}`" if turn.said else "no reply"
        at_reply = f"{name}, seal of reply {at}"
        right = f"what `{item.environment}` said when it had read `{turn.text[-60:]}`"
        sentence = f"{shown} follows turn {at} of `{name}`, which is not what `{item.environment}` said to it"
        same = seal_of_reply(read, turn.said) in known
        hint = "look at what orders or cuts replies, and at what ends episodes"
        yield compare_value(item, at_reply, shown, right, same=same, sentence=sentence, hint=hint)


def _scored(item: EpisodeTurns, given: GivenRewards) -> Iterator[Comparison]:
    read = dict(zip(given.ids, given.texts, strict=True))
    hint = "look at which turns of an episode the reward reads, and at what joins them"
    for name, turns in _episodes(item).items():
        text = read.get(name, read.get(f"{name}/{len(turns) - 1}"))
        if text is not None:
            says, subject = (given.name, "its last turn"), f"the text of `{name}` that the reward read"
            yield compare_text(
                item, f"{name}, scored text", text, turns[-1].text, subject=subject, says=says, hint=hint
            )


def _encoded(item: EpisodeTurns, name: str, turns: Sequence[_Turn]) -> Iterator[Comparison]:
    """Ids of each reply, and the text of each turn, by a second reader, of traces that have them."""
    says = "", "by the tokenizer's files"
    for at, turn in enumerate(turns):
        if turn.decoded is not None:
            hint = (
                "look at the options that turns are decoded with, skip_special_tokens above all, and at what cuts them"
            )
            what, subject = f"{name}, text of turn {at}", f"turn {at} of `{name}` as the environment reads it"
            yield compare_text(item, what, turn.text, turn.decoded, subject=subject, says=says, hint=hint)
        if turn.reply and turn.read:
            differs = _differs(turn.reply, turn.read).replace("before", "expected")
            sentence = f"the reply to turn {at} of `{name}` has {len(turn.reply)} tokens, {differs}"
            hint = "look at what encodes replies: the same text has other tokens by another class or by other options"
            what = f"{name}, ids of reply {at}"
            yield compare_value(item, what, turn.reply, turn.read, sentence=sentence, says=says, hint=hint)


def _rollouts(item: EpisodeTurns) -> Iterator[tuple[str, tuple[tuple[int, ...], np.ndarray]]]:
    """Each rollout of the episodes: id, tokens, and [L] which of them it trains."""
    for name, turns in _episodes(item).items():
        drawn = [np.zeros(len(turn.prompt) + len(turn.sampled), bool) for turn in turns]
        for turn, own in zip(turns, drawn, strict=True):
            own[len(turn.prompt) :] = True
        if item.step_wise:
            for at, (turn, own) in enumerate(zip(turns, drawn, strict=True)):
                yield f"{name}/{at}", ((*turn.prompt, *turn.sampled), own)
            continue
        whole = drawn[-1].copy()
        for own in drawn:
            whole[: len(own)] |= own
        yield name, ((*turns[-1].prompt, *turns[-1].sampled), whole)


def _trained(
    trace: Trace, rollouts: Rollouts, expected: Mapping[str, tuple[tuple[int, ...], np.ndarray]]
) -> Iterator[Comparison]:
    columns = [ragged.split(trace.array(rollouts, name), rollouts.lengths) for name in ("tokens", "sampled", "mask")]
    for name, tokens, sampled, mask in zip(rollouts.ids, *columns, strict=True):
        right, drawn = expected.get(name, ((), np.zeros(0, bool)))
        wrong = ""
        if (found := tuple(tokens.tolist())) != right:
            wrong = f"has {len(found)} tokens, {_differs(found, right)}"
        elif (others := np.flatnonzero(sampled != drawn)).size:
            wrong = f"marks {others.size} tokens wrongly, number {others[0]} as {_kind(sampled[others[0]])}"
        elif mask.any() and (others := np.flatnonzero(mask != drawn)).size:
            wrong = f"has {others.size} tokens wrongly in or out of the loss, the first is number {others[0]}"
        right_one = f"{len(right)} tokens, {int(drawn.sum())} of them sampled"
        at, sentence = At(Stage.DATA, rollouts.version), f"rollout `{name}` {wrong}"
        hint = "look at what joins the turns of an episode, and at the loss mask of what the tool says"
        what = f"{rollouts.name} {name}"
        yield compare_value(at, what, wrong, right_one, same=not wrong, sentence=sentence, hint=hint)


def _whole(item: EpisodeTurns, given: Advantages) -> Iterator[Comparison]:
    """The turns of each episode that is in a batch; further rounds of sampling replace whole ones."""
    found = Counter(given.trajectories)
    for name, turns in Counter(item.episodes).items():
        if name not in found:
            continue
        right = turns if item.step_wise else 1
        sentence = f"the episode `{name}` has {found[name]} rollouts in the batch, its {turns} turns make {right}"
        hint = "look at what makes rollouts of an episode's turns, and what filters them"
        yield compare_value(item, f"rollouts of {name}", found[name], right, sentence=sentence, hint=hint)


def _kind(sampled: object) -> str:
    return "sampled" if sampled else "not sampled"


def calculated(text: str) -> str | None:
    """Value that the calculator gives for a turn, read from its end; None where it asks for none."""
    if not text.endswith("="):
        return None
    at = end = len(text) - 1
    while at > 0 and text[at - 1] in DIGITS:
        at -= 1
        if at > 1 and text[at - 1] in OPERATORS and text[at - 2] in DIGITS:
            at -= 1
    expression = text[at:end]
    if not expression or len(expression) > MOST_CHARACTERS:
        return None
    total = 0
    for part in expression.replace("-", "+-").split("+"):
        product = -1 if part.startswith("-") else 1
        for factor in part.removeprefix("-").split("*"):
            product *= int(factor)
        total += product
    value = str(total)
    return value if len(value) <= MOST_CHARACTERS else None


@check(
    "DAT004", needs=(Drops, Advantages, PolicyColumns),
    applies=on(step=GRPO, loop=recorded(PolicyColumns, Advantages, Drops)),
)  # fmt: skip
def dropped_for_another_reason(trace: Trace) -> Iterator[Comparison]:
    """A rollout leaves the loss for the first reason that applies to it, and for no other.

    What it checks: per rollout, the reason that the batch gives, against the rules: a token is older than the bound;
    the answer was cut off; all trajectories of the group have one reward. The last two where the config asks for them.
    And its tokens in the loss of the update that has it: none of one that is dropped, its own of every other. And, in
    `verifier train`, that the updates of a step train each of the others once in each pass.
    Why it matters: a filter on the group's mean, or on a shaped reward, drops the prompts that teach most, and the
    counts still add up. So they do where a filter's places are those of another order, and it drops as many tokens of a
    neighbour. A rollout that fills up a batch is trained twice, one that does not fill a batch never.
    Evidence: data/drops, advantage/advantages, advantage/policy ("version", "own"), advantage/columns.
    Tolerance and its source: exact; reasons are names, rewards are compared as they are.
    Where to look: what the filter compares, over which rollouts, and in which order it finds them.
    What it does not catch: a rollout that says wrongly whether it was cut off.
    References: OpenRLHF#1270, NeMo-RL#2431, NeMo-RL#4158, slime#1445, open-instruct#1794, trl#4976, verl-omni#602.
    """
    for item in trace.of(Drops):
        expected = _reasons(trace, item)
        for name, reason in zip(item.ids, item.reasons, strict=True):
            right = expected.get(name, "")
            yield compare_value(item, name, _reason_or_kept(reason), _reason_or_kept(right))
        said = dict(zip(item.ids, item.reasons, strict=True))
        right_ones = {name: reason for name, reason in said.items() if reason == expected.get(name, "")}
        yield from _masks(trace, item.version, right_ones)


def _masks(trace: Trace, version: int, reasons: Mapping[str, str]) -> Iterator[Comparison]:
    """Tokens in the loss of each rollout of an update, against its own where it stays and none where it is dropped."""
    own = dict[str, np.ndarray]()
    for policy in trace.of(PolicyColumns, version=version):
        arrays = trace.arrays(policy)
        if (which := "mask" if policy.rejects else "own") in arrays:
            own |= dict(zip(policy.ids, ragged.split(arrays[which].astype(bool), policy.lengths), strict=True))
    for columns in trace.of(LossColumns, version=version):
        masks = ragged.split(trace.array(columns, "mask").astype(bool), columns.lengths)
        for name, found in zip(columns.ids, masks, strict=True):
            if name not in own or name not in reasons:
                continue
            said, right = _reason_or_kept(reasons[name]), own[name] & (not reasons[name])
            found_in, right_in = int(found.sum()), int(right.sum())
            at, what, same = At(Stage.DATA, version), f"{name} in {columns.name}", np.array_equal(found, right)
            subject = f"the number of tokens of `{name}`, which is {said}, in the loss of {columns.name}"
            yield compare_value(at, what, found_in, right_in, same=same, subject=subject)
    times = Counter(name for columns in trace.of(LossColumns, version=version) for name in columns.ids)
    passes = flat(trace.manifest.config).get("grpo.epochs")  # a recorded loop's step may train a part of its rollouts
    for name, mask in own.items() if times and passes else ():
        if reasons.get(name) == "" and mask.any():
            subject = f"the number of times that the step trains `{name}`"
            yield compare_value(At(Stage.DATA, version), f"{name} in all updates", times[name], passes, subject=subject)


def _reason_or_kept(reason: str) -> str:
    return f"dropped as {reason.replace('_', ' ')}" if reason else "in the loss"


def _reasons(trace: Trace, item: Drops) -> dict[str, str]:
    found: dict[str, str] = {}
    for batch in trace.of(Advantages, version=item.version):
        parts: dict[str, list[float]] = defaultdict(list)
        for trajectory, reward in zip(batch.trajectories, batch.rewards, strict=True):
            parts[trajectory].append(reward)
        sums = {name: math.fsum(own) for name, own in parts.items()}
        members: dict[str, dict[str, float]] = defaultdict(dict)
        for trajectory, group in zip(batch.trajectories, batch.groups, strict=True):
            members[group][trajectory] = sums[trajectory]
        for name, group in zip(batch.ids, batch.groups, strict=True):
            own = list(members[group].values())
            if item.drop_zero_variance and len(own) > 1 and min(own) == max(own):
                found[name] = "zero_variance"
    if item.drop_overlong:
        found |= {name: "overlong" for name, cut in zip(item.ids, item.truncated, strict=True) if cut}
    for policy in trace.of(PolicyColumns, version=item.version):
        versions = ragged.split(trace.array(policy, "version"), policy.lengths)
        for name, by in zip(policy.ids, versions, strict=True):
            sampled = by[by >= 0]
            if len(sampled) and policy.trained_version - int(sampled.min()) > policy.max_staleness:
                found[name] = "stale"
    return found
