"""Content of a training batch: the text that examples train on, and the rollouts that filters leave out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from unicodedata import normalize

import numpy as np

from verifier.core import ragged
from verifier.core.check import check
from verifier.core.compare import At, compare_value
from verifier.core.comparison import Comparison
from verifier.core.condition import condition, on, recorded
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.checks_conditions import GRPO, SFT
from verifier.stages.data.records import Drops, TrainedText

TEXT = condition("no text of an example is known", lambda run: run.facts.text)


WHOLE = condition(
    lambda run: f"the chat template writes {run.facts.unread} conversations otherwise than they stand",
    lambda run: not run.facts.unread, gap=True,
)  # fmt: skip


@check("DAT003", needs=(TrainedText,), applies=on(step=SFT & TEXT, loop=recorded(TrainedText)), wholly=WHOLE)
def other_text_trained(trace: Trace) -> Iterator[Comparison]:
    """The tokens in the loss of an example are what an assistant says and the end of its turns, and no others.

    What it checks: per example, the text that its tokens in the loss decode to: of a prompt and a response, against the
    response followed by the end token; of a conversation, against all that its assistant says, turn by turn, each with
    the end that the chat template writes, and with what it may write between the header and the text.
    Why it matters: a mask that reaches into the prompt trains the model to ask; one that stops before the end token
    trains it never to stop; one of the last turn alone trains on a part of the data. The loss falls in all.
    Evidence: data/trained.
    Tolerance and its source: exact texts, composed (Unicode's NFC) as the tokenizer may compose them; in conversations
    without whitespace, which templates add and strip.
    Where to look: the loss mask, where the response begins and where it ends.
    What it does not catch: conversations whose template changes what an assistant says, of which the report says so; a
    response that is wrong in the data.
    References: Megatron-Bridge#4660, SkyRL#710, verl#3287, trl#1623, cosmos-rl#132, ms-swift#7838.
    """
    for item in trace.of(TrainedText):
        for name, response, text in zip(item.ids, item.responses, item.texts, strict=True):
            turns = item.conversations.get(name)
            expected, source = normalize("NFC", response + item.end), "the response and the end token"
            same = normalize("NFC", text) == expected
            if turns is not None:
                expected = "".join(turn + item.closing for turn in turns)
                source = "the assistant's turns, each with its end"
                same = _has_turns(text, turns, item.opening, item.closing)
            found, right = f"`{text[-60:]}`", f"`{expected[-60:]}`"
            subject, says = f"the text that `{name}` trains on", ("", source)
            yield compare_value(item, name, found, right, same=same, subject=subject, says=says)


def _has_turns(text: str, turns: Sequence[str], opening: str, closing: str) -> bool:
    """True if a text is these turns, each with its end, and with the template's opening or without; no whitespace."""

    def bare(part: str) -> str:
        return "".join(normalize("NFC", part).split())

    whole, ends = bare(text), {0}
    for turn in turns:
        ways = [bare(turn) + bare(closing), bare(opening) + bare(turn) + bare(closing)]
        ends = {at + len(way) for at in ends for way in ways if whole.startswith(way, at)}
    return len(whole) in ends


@check(
    "DAT004", needs=(Drops, Advantages, PolicyColumns),
    applies=on(step=GRPO, loop=recorded(PolicyColumns, Advantages, Drops)),
)  # fmt: skip
def dropped_for_another_reason(trace: Trace) -> Iterator[Comparison]:
    """A rollout leaves the loss for the first reason that applies to it, and for no other.

    What it checks: per rollout, the reason that the batch gives, against the rules: a token is older than the bound;
    the answer was cut off; all trajectories of the group have one reward. The last two where the config asks for them.
    And its tokens in the loss of the update that has it: none of one that is dropped, its own of every other.
    Why it matters: a filter on the group's mean, or on a shaped reward, drops the prompts that teach most, and the
    counts still add up. So they do where a filter's places are those of another order, and it drops as many tokens of a
    neighbour.
    Evidence: data/drops, advantage/advantages, advantage/policy ("version", "own"), advantage/columns.
    Tolerance and its source: exact; reasons are names, rewards are compared as they are.
    Where to look: what the filter compares, over which rollouts, and in which order it finds them.
    What it does not catch: a rollout that says wrongly whether it was cut off.
    References: OpenRLHF#1270, NeMo-RL#2431, NeMo-RL#4158, slime#1445, open-instruct#1794, trl#4976.
    """
    for item in trace.of(Drops):
        expected = _reasons(trace, item)
        for name, reason in zip(item.ids, item.reasons, strict=True):
            right = expected.get(name, "")
            yield compare_value(item, name, _said(reason), _said(right))
        said = dict(zip(item.ids, item.reasons, strict=True))
        right_ones = {name: reason for name, reason in said.items() if reason == expected.get(name, "")}
        yield from _masks(trace, item.version, right_ones)


def _masks(trace: Trace, version: int, reasons: Mapping[str, str]) -> Iterator[Comparison]:
    """Tokens in the loss of each rollout of an update, against its own where it stays and none where it is dropped.

    Args:
        trace: of a step.
        version: that the step made.
        reasons: why each rollout is dropped, empty for one that stays; of those whose reason is right.
    """
    own = dict[str, np.ndarray]()
    for policy in trace.of(PolicyColumns, version=version):
        arrays = trace.arrays(policy)
        if "own" in arrays:
            own |= dict(zip(policy.ids, ragged.split(arrays["own"].astype(bool), policy.lengths), strict=True))
    for columns in trace.of(LossColumns, version=version):
        masks = ragged.split(trace.array(columns, "mask").astype(bool), columns.lengths)
        for name, found in zip(columns.ids, masks, strict=True):
            if name not in own or name not in reasons:
                continue
            said, right = _said(reasons[name]), own[name] & (not reasons[name])
            found_in, right_in = int(found.sum()), int(right.sum())
            at, what, same = At(Stage.DATA, version), f"{name} in {columns.name}", np.array_equal(found, right)
            subject = f"the number of tokens of `{name}`, which is {said}, in the loss of {columns.name}"
            yield compare_value(at, what, found_in, right_in, same=same, subject=subject)


def _said(reason: str) -> str:
    return f"dropped as {reason.replace('_', ' ')}" if reason else "in the loss"


def _reasons(trace: Trace, item: Drops) -> dict[str, str]:
    """Reason of each rollout by the rules; empty for one that stays."""
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
