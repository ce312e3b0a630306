"""Texts of rollouts: each answers its own example's prompt, is scored as what it says, and by its own gold answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from unicodedata import normalize

from verifier.checks.conditions import LIVE
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.core.records_policy import EpisodeTurns, GivenRewards
from verifier.core.records_trainer import DataOrder, RolloutTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One example at its place in a step."""

    question: str
    rendered: str
    answer: str | None


@check(
    "DAT009",
    needs=(RolloutTexts, DataOrder, GivenRewards),
    applies=on(step=LIVE, loop=recorded(RolloutTexts, DataOrder, GivenRewards)),
)
def rollout_of_another_example(trace: Trace) -> Iterator[Comparison]:
    """Every rollout's tokens are its own example's prompt and the text that was scored, against its own gold answer.

    What it checks: per rollout, by its place in the step: the decoded prompt against the example's prompt as the
    template writes it, which has what users say, whole and in order, or is the plain prompt after one beginning token;
    the decoded answer without its end token against the text that the reward read; the gold answer that the reward read
    against the example's.
    Why it matters: prompts in another order than their answers, a prompt that is cut or has lost its first token, an
    answer scored for its neighbour: shapes and losses are as ever, and the reward is noise.
    Evidence: data/texts, data/order, data/turns, reward/rewards.
    Tolerance and its source: exact texts, composed (Unicode's NFC) as the tokenizer may compose them. Spaces after the
    beginning token do not count, as some tokenizers write one there.
    Where to look: the order of prompts, answers and examples, and what cuts or adds tokens of a prompt.
    What it does not catch: a template that is wrong itself; what a reward other than `answer` makes of the texts;
    tokens that the engine was given and the trainer was not (LGP009).
    References: compose-rl#147, VLM-R1#129, trl#3646, marin#7179, NeMo-RL#1627.
    """
    for item in trace.of(RolloutTexts):
        asked = _asked(trace, item.version)
        later = later_turns(trace, item.version)
        rewarded = {
            name: (text, answer)
            for given in trace.of(GivenRewards, version=item.version)
            for name, text, answer in zip(given.ids, given.texts, given.answers, strict=True)
        }
        for name, group, prompt, answer in zip(item.ids, item.groups, item.prompts, item.answers, strict=True):
            own = asked.get(group)
            if own is None:
                if asked:
                    yield _comparison(item, name, "prompt", prompt, "", f"an example of the step at `{group}`")
                continue
            found, wanted = _plain(prompt, item.begin), _plain(own.rendered, item.begin)
            if name in later:  # its prompt has earlier turns too, which DAT006 compares
                found = found[: len(wanted)]
            whole = "" if _says(own, item.begin) else ", with what its users say"
            yield _comparison(item, name, "prompt", found, wanted, f"the prompt of `{group}`{whole}", extra=not whole)
            text, gold = rewarded.get(name, (None, None))
            if text is not None:
                own_text, scored = normalize("NFC", answer), normalize("NFC", text)
                yield _comparison(item, name, "scored text", scored, own_text, "what its tokens say")
                right = f"the gold answer of `{group}`"
                yield _comparison(item, name, "gold answer", str(gold), str(own.answer), right)


def later_turns(trace: Trace, version: int) -> set[str]:
    """Rollouts that are turns of an episode after its first."""
    return {
        f"{episode}/{index}"
        for turns in trace.of(EpisodeTurns, version=version)
        for episode, index in zip(turns.episodes, turns.indices, strict=True)
        if turns.step_wise and index
    }


def _comparison(
    item: RolloutTexts, name: str, what: str, found: str, wanted: str, source: str, *, extra: bool = True
) -> Comparison:
    left, right = (f"`{text[-60:]}`" for text in (found, wanted))
    same, sentence = found == wanted and extra, f"the {what} of `{name}` is {left}, it should be {source}"
    return compare_value(item, f"{name} ({what})", left, right, same=same, sentence=sentence, says=("", source))


def _asked(trace: Trace, version: int) -> dict[str, _Asked]:
    """Examples of a step by step, round, place and id, as groups are named."""
    found = {}
    for order in trace.of(DataOrder, version=version):
        at = f"{order.step}.{order.round}" if order.round else f"{order.step}"
        rows = zip(order.examples, order.prompts, order.rendered, order.answers, strict=False)  # empty in old traces
        for place, (name, question, rendered, answer) in enumerate(rows):
            found[f"{at}/{place}/{name}"] = _Asked(question=question, rendered=rendered, answer=answer)
    return found


def _plain(text: str, begin: str) -> str:
    """A text in composed form, without spaces after the beginning token."""
    text = normalize("NFC", text)
    return begin + text.removeprefix(begin).lstrip(" ") if begin and text.startswith(begin) else text


def _says(asked: _Asked, begin: str) -> bool:
    """True if a rendered prompt is the plain question, or has all that users say, in order."""
    if _plain(asked.rendered, begin) == _plain(begin + asked.question, begin):
        return True
    try:
        said = [text for role, text in json.loads(asked.question) if role == "user"]
    except (ValueError, TypeError):
        return False
    text, at = normalize("NFC", asked.rendered), 0
    for part in said:
        own = normalize("NFC", part.strip())
        if (at := text.find(own, at)) < 0:
            return False
        at += len(own)
    return True
