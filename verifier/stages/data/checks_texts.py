"""Checks of texts and problems: tokens by the tokenizer's files, rollouts of their examples, held-out problems."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np

from verifier.core import ragged
from verifier.core.check import Comparison, Stage, Trace, check, compare_text, compare_value
from verifier.core.condition import NEEDS, condition, on, recorded
from verifier.core.seal import seal_of_reward
from verifier.stages.checks_conditions import EVALUATED, EXAMINED, LIVE, READ_AGAIN, SFT
from verifier.stages.data.records import (
    DataOrder,
    EpisodeTurns,
    HeldOutRead,
    RequestSeeds,
    RolloutTexts,
    TokensRead,
    TrainedText,
)
from verifier.stages.reward.records import GivenRewards
from verifier.stages.rollout.records import EvaluatedAnswers

FILES = "by the tokenizer's files"


@check(
    "DAT013",
    needs=(TokensRead | TrainedText,),
    applies=on(
        step=(SFT | LIVE) & READ_AGAIN,
        export=EVALUATED & READ_AGAIN,
        loop=recorded(TokensRead) | recorded(TrainedText),
    ),
)
def tokens_differ_from_files(trace: Trace) -> Iterator[Comparison]:
    """Prompts have the tokens, and rewards read the text, that the files of the tokenizer alone make.

    What it checks: per rollout, its prompt's tokens against those of its example by a second reader, which has
    tokenizer.json, tokenizer_config.json and the chat template of the run's checkpoint, or the file and arguments that
    the run's config names, and calls nothing that renders, encodes or decodes for the trainer; per example of
    fine-tuning all tokens, where the prompt ends, and which tokens are in the loss: of each turn of an assistant that
    is learned those from the end of what the template gives it to its last special token; per rollout that was sampled,
    the text that the reward read against the decoded last turn, special tokens included. And the token that ends an
    answer against that which the files name. Of a recorded loop that fine-tunes, the text in the loss of an example
    against its response followed by the end token.
    Why it matters: a chat template that is called without the turn that the answer begins, with other options or for
    another text, or a decoder that leaves special tokens out, is the same on both sides of a comparison by one library.
    Answers that are ended by another token, such as that of padding, run on behind their end, and count as cut off.
    Evidence: data/tokens-read, data/turns, reward/rewards, data/trained.
    Tolerance and its source: exact tokens; texts composed (Unicode's NFC), as DAT009 compares them.
    What it does not catch: files that are wrong themselves; how transformers normalizes, splits and decodes text, which
    the second reader does alike, but for tokenizers of bytes; held-out problems beyond eight of each evaluation;
    recorded rollouts; checkpoints without tokenizer.json, which the report names.
    References: trl#4147, trl#2897, transformers#45812, transformers#45920, open-instruct#1455, open-instruct#685,
    tinker-cookbook#860, SkyRL#710, trl#1623.
    """
    for item in trace.of(TokensRead):
        if item.end is not None and item.read_end is not None:
            yield _end(item, item.end, item.read_end)
        later = later_turns(trace, item.version)
        given = ragged.split(trace.array(item, "tokens"), item.lengths)
        read = ragged.split(trace.array(item, "read"), item.read_lengths)
        rows = zip(item.ids, given, read, item.prompt_lengths, item.read_prompt_lengths, strict=True)
        masks = _masks(trace, item)
        for place, (name, found, wanted, begins, should_begin) in enumerate(rows):
            if name in later:  # its prompt has earlier turns too, which DAT006 compares
                found, begins = found[: len(wanted)], should_begin
            same = begins == should_begin and np.array_equal(found, wanted)
            yield _tokens(item, name, found, wanted, (begins, should_begin), same=same)
            if masks and same:
                yield _in_loss(item, name, found, *masks[place])
        scored = {
            name: text
            for rewards in trace.of(GivenRewards, version=item.version)
            for name, text in zip(rewards.ids, rewards.texts, strict=True)
        }
        for name, text in zip(item.ids, item.texts, strict=False):  # empty in fine-tuning
            if (own := scored.get(name)) is not None:
                yield _text(item, name, own, text)
    for trained in trace.of(TrainedText):
        for name, response, text in zip(trained.ids, trained.responses, trained.texts, strict=True):
            subject, says = f"the text that `{name}` trains on", ("", "the response and the end token")
            yield compare_text(trained, name, text, response + trained.end, subject=subject, says=says)


def _tokens(
    item: TokensRead, name: str, found: np.ndarray, wanted: np.ndarray, begins: tuple[int, int], *, same: bool
) -> Comparison:
    shortest = min(len(found), len(wanted))
    at = next(iter(np.flatnonzero(found[:shortest] != wanted[:shortest])), shortest)
    what = "example" if item.whole else "prompt"
    sentence = f"the {what} of `{name}` has {_some(found, at)} from token {at} on, it should have {_some(wanted, at)}"
    if np.array_equal(found, wanted):
        sentence = f"the prompt of `{name}` has {begins[0]:,} tokens, it should have {begins[1]:,}"
    left, right = (
        f"{len(side):,} tokens, the prompt to {to:,}" for side, to in zip((found, wanted), begins, strict=True)
    )
    says, hint = ("", FILES), "look at the options of the chat template, and at tokens before and after the text"
    return compare_value(item, f"{name} ({what})", left, right, same=same, sentence=sentence, says=says, hint=hint)


def _masks(trace: Trace, item: TokensRead) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens in the loss of each example, as they are and as they should be; none in older traces and of prompts."""
    arrays = trace.arrays(item)
    if "mask" not in arrays:
        return []
    found, wanted = ragged.split(arrays["mask"], item.lengths), ragged.split(arrays["read_mask"], item.read_lengths)
    return [*zip(found, wanted, strict=True)]


def _in_loss(item: TokensRead, name: str, tokens: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> Comparison:
    wrong = np.flatnonzero(found != wanted)
    at = int(wrong[0]) if wrong.size else 0
    wrongly = "in the loss and should not be" if found[at] else "out of the loss and should be in it"
    left, right = (f"{int(side.sum()):,} tokens in the loss" for side in (found, wanted))
    sentence, says = f"token {at} of `{name}`, {tokens[at]}, is {wrongly}", (f"{wrong.size:,} tokens are wrong", FILES)
    hint, same = "look at where the loss of a turn begins and ends, at whitespace above all", not wrong.size
    return compare_value(item, f"{name} (loss)", left, right, same=same, sentence=sentence, hint=hint, says=says)


def _end(item: TokensRead, found: int, wanted: int) -> Comparison:
    what, subject = f"end token of {item.name}", "the token that ends an answer"
    says = ("the run's tokenizer", FILES)
    hint = "look at what sets the end token: the tokenizer, its padding, config.json"
    return compare_value(item, what, found, wanted, subject=subject, says=says, hint=hint)


def _some(tokens: np.ndarray, at: int) -> str:
    return f"{tokens[at : at + 4].tolist()}" if at < len(tokens) else "none"


def _text(item: TokensRead, name: str, scored: str, text: str) -> Comparison:
    subject, says = f"the text that the reward read for `{name}`", ("", FILES)
    hint = "look at the options that answers are decoded with, skip_special_tokens above all"
    return compare_text(item, f"{name} (text)", scored, text, subject=subject, says=says, hint=hint)


@check("DAT009", needs=(RolloutTexts, DataOrder, GivenRewards), applies=on(step=LIVE, loop=NEEDS))
def rollout_of_another_example(trace: Trace) -> Iterator[Comparison]:
    """Every rollout's tokens are its own example's prompt and the text that was scored, against its own gold answer.

    What it checks: per rollout, by its place in the step: the decoded prompt against the example's prompt as the
    template writes it, which has what users say, whole and in order, or is the plain prompt after one beginning token;
    the decoded answer without its end token against the text that the reward read; the gold answer that the reward read
    against the example's; the reward, of any function, against those that its processes gave for this text and gold
    answer, by seals that they take.
    Why it matters: prompts in another order than their answers, a prompt that is cut or has lost its first token, an
    answer scored for its neighbour: shapes and losses are as ever, and the reward is noise.
    Evidence: data/texts, data/order, data/turns, data/seeds ("rewards"), reward/rewards.
    Tolerance and its source: exact texts, composed (Unicode's NFC) as the tokenizer may compose them. Spaces after the
    beginning token do not count, as some tokenizers write one there.
    Where to look: the order of prompts, answers and examples, and what cuts or adds tokens of a prompt.
    What it does not catch: a template that is wrong itself; what a reward other than `answer` makes of the texts; two
    rewards of one text and gold answer, exchanged; tokens that the engine was given and the trainer was not (LGP009).
    References: compose-rl#147, VLM-R1#129, trl#3646, marin#7179, NeMo-RL#1627, NeMo-RL#3794.
    """
    for item in trace.of(RolloutTexts):
        asked = _asked(trace, item.version)
        later = later_turns(trace, item.version)
        rewarded = {
            own[0]: (given, *own[1:])
            for given in trace.of(GivenRewards, version=item.version)
            for own in zip(given.ids, given.texts, given.answers, given.rewards, strict=True)
        }
        sealed = {seal for seeds in trace.of(RequestSeeds, version=item.version) for seal in seeds.rewards}
        for name, group, prompt, answer in zip(item.ids, item.groups, item.prompts, item.answers, strict=True):
            own = asked.get(group)
            if own is None:
                if asked:
                    yield _comparison(item, name, "prompt", prompt, "", f"an example of the step at `{group}`")
                continue
            question, rendered, right_answer = own
            found, wanted = _plain(prompt, item.begin), _plain(rendered, item.begin)
            if name in later:  # its prompt has earlier turns too, which DAT006 compares
                found = found[: len(wanted)]
            whole = "" if _says(question, rendered, item.begin) else ", with what its users say"
            yield _comparison(item, name, "prompt", found, wanted, f"the prompt of `{group}`{whole}", extra=not whole)
            given, text, gold, reward = rewarded.get(name, (None, None, None, 0.0))
            if given is not None and text is not None:
                own_text, scored = normalize("NFC", answer), normalize("NFC", text)
                yield _comparison(item, name, "scored text", scored, own_text, "what its tokens say")
                right = f"the gold answer of `{group}`"
                yield _comparison(item, name, "gold answer", str(gold), str(right_answer), right)
                if sealed:
                    same = seal_of_reward(text, gold, reward) in sealed
                    right = "what its processes gave for this text and gold answer"
                    yield _comparison(given, name, "reward", f"{reward:g}", f"{reward:g}", right, extra=same)


def later_turns(trace: Trace, version: int) -> set[str]:
    """Rollouts that are turns of an episode after its first."""
    return {
        f"{episode}/{index}"
        for turns in trace.of(EpisodeTurns, version=version)
        for episode, index in zip(turns.episodes, turns.indices, strict=True)
        if turns.step_wise and index
    }


def _comparison(
    item: RolloutTexts | GivenRewards, name: str, what: str, found: str, wanted: str, source: str, *, extra: bool = True
) -> Comparison:
    left, right = (f"`{text[-60:]}`" for text in (found, wanted))
    same, sentence = found == wanted and extra, f"the {what} of `{name}` is {left}, it should be {source}"
    return compare_value(item, f"{name} ({what})", left, right, same=same, sentence=sentence, says=("", source))


def _asked(trace: Trace, version: int) -> dict[str, Sequence[Any]]:
    """Question, rendered prompt and gold answer of each example of a step, by its place."""
    found: dict[str, Sequence[Any]] = {}
    for order in trace.of(DataOrder, version=version):
        at = f"{order.step}.{order.round}" if order.round else f"{order.step}"
        rows = zip(order.examples, order.prompts, order.rendered, order.answers, strict=False)  # empty in old traces
        found |= {f"{at}/{place}/{name}": own for place, (name, *own) in enumerate(rows)}
    return found


def _plain(text: str, begin: str) -> str:
    """A text in composed form, without spaces after the beginning token."""
    text = normalize("NFC", text)
    return begin + text.removeprefix(begin).lstrip(" ") if begin and text.startswith(begin) else text


def _says(question: str, rendered: str, begin: str) -> bool:
    """True if a rendered prompt is the plain question, or has all that users say, in order."""
    if _plain(rendered, begin) == _plain(begin + question, begin):
        return True
    try:
        said = [text for role, text in json.loads(question) if role == "user"]
    except (ValueError, TypeError):
        return False
    text, at = normalize("NFC", rendered), 0
    for part in said:
        own = normalize("NFC", part.strip())
        if (at := text.find(own, at)) < 0:
            return False
        at += len(own)
    return True


EVALUATED = condition("no problem is held out in this step", lambda run: run.facts.evaluated)


@check("DAT011", needs=(HeldOutRead,), applies=on(step=EVALUATED, loop=NEEDS))
def other_problems_held_out(trace: Trace) -> Iterator[Comparison]:
    """No problem of the evaluation is a question that is trained on.

    What it checks: the question of each problem against those of all examples to train on.
    Why it matters: an evaluation on what is trained on rises with it, and says nothing of other questions.
    Evidence: data/evaluated, on the first step after a start and on each that is followed by an evaluation.
    Tolerance and its source: exact; digests of 64 bits.
    Where to look: the split that the evaluation reads.
    What it does not catch: questions that differ by a space; tokens of the problems (DAT013).
    References: OpenRLHF#1089.
    """
    for item in trace.of(HeldOutRead):
        for name, row in zip(item.ids, trace.array(item).tolist(), strict=True):
            sentence = f"the question of `{name}`, a problem of the evaluation, is example {row} of the training set"
            yield compare_value(
                item, f"{name} (trained on)", f"example {row}", "no example", same=row < 0, sentence=sentence
            )


@check("DAT016", needs=(HeldOutRead, EvaluatedAnswers), applies=on(step=EXAMINED & EVALUATED, loop=NEEDS))
def evaluation_asks_other_problems(trace: Trace) -> Iterator[Comparison]:
    """An evaluation asks the problems that are held out, each once.

    What it checks: of up to 8 answers of an evaluation, others in each, the id of the problem that the engine was asked
    against the ids of the held-out problems, as they were read from the data set.
    Why it matters: an evaluation of other problems, such as those that are trained on, or of one of them again and
    again, is a number with a right name. Curves and the choice of a checkpoint rest on it.
    Evidence: data/evaluated, rollout/evaluated.
    Tolerance and its source: exact (ids).
    Where to look: which data set the prompts of an evaluation are taken from.
    What it does not catch: held-out problems that are trained on (DAT011), other tokens of a problem (DAT013), answers
    that were not kept.
    References: tensorflow/ranking#350.
    """
    held = {name for item in trace.of(HeldOutRead) for name in item.ids}
    for item in trace.of(EvaluatedAnswers):
        places: dict[str, str] = {}
        for answer in item.ids:
            kind, _, rest = answer.partition(" ")
            place, problem = rest.split("/", 2)[1], rest.split("/", 3)[3]
            problem = problem if problem in held else problem.rpartition("/")[0] or problem  # a turn of several
            first = places.setdefault(f"{kind} {problem}", place)
            wrong = "is none of the held-out ones" if problem not in held else "is asked twice" * (first != place)
            sentence = f"`{problem}`, a problem of the evaluation of version {item.version}, {wrong}"
            sides = f"`{problem}` at place {place}", f"each of {len(held):,} problems once"
            yield compare_value(item, answer, *sides, same=not wrong, sentence=sentence, stage=Stage.DATA, owner="")
