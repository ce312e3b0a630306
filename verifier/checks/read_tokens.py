"""Tokens that a run trains on, and texts that it rewards, against a second reading of the tokenizer's files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import EVALUATED, LIVE, READ_AGAIN, SFT
from verifier.checks.rollout_texts import later_turns
from verifier.core import ragged
from verifier.core.check import Comparison, Trace, check, compare_text, compare_value
from verifier.core.condition import on, recorded
from verifier.core.records_data import TokensRead
from verifier.core.records_policy import GivenRewards

FILES = "by the tokenizer's files"


@check(
    "DAT013",
    needs=(TokensRead,),
    applies=on(step=(SFT | LIVE) & READ_AGAIN, export=EVALUATED & READ_AGAIN, loop=recorded(TokensRead)),
)
def tokens_differ_from_files(trace: Trace) -> Iterator[Comparison]:
    """Prompts have the tokens, and rewards read the text, that the files of the tokenizer alone make.

    What it checks: per rollout, its prompt's tokens against those of its example by a second reader, which has
    tokenizer.json, tokenizer_config.json and the chat template of the run's checkpoint, or the file and arguments that
    the run's config names, and calls nothing that renders, encodes or decodes for the trainer; per example of
    fine-tuning all tokens, where the prompt ends, and which tokens are in the loss: of each turn of an assistant that
    is learned those from the end of what the template gives it to its last special token; per rollout that was sampled,
    the text that the reward read against the decoded last turn, special tokens included. And the token that ends an
    answer against that which the files name.
    Why it matters: a chat template that is called without the turn that the answer begins, with other options or for
    another text, or a decoder that leaves special tokens out, is the same on both sides of a comparison by one library.
    Answers that are ended by another token, such as that of padding, run on behind their end, and count as cut off.
    Evidence: data/tokens-read, data/turns, reward/rewards.
    Tolerance and its source: exact tokens; texts composed (Unicode's NFC), as DAT009 compares them.
    What it does not catch: files that are wrong themselves; how transformers normalizes, splits and decodes text, which
    the second reader does alike, but for tokenizers of bytes; held-out problems beyond eight of each evaluation;
    recorded rollouts; checkpoints without tokenizer.json, which the report names.
    References: trl#4147, trl#2897, transformers#45812, transformers#45920, open-instruct#1455, open-instruct#685,
    tinker-cookbook#860.
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
    """The next tokens from a place on."""
    return f"{tokens[at : at + 4].tolist()}" if at < len(tokens) else "none"


def _text(item: TokensRead, name: str, scored: str, text: str) -> Comparison:
    subject, says = f"the text that the reward read for `{name}`", ("", FILES)
    hint = "look at the options that answers are decoded with, skip_special_tokens above all"
    return compare_text(item, f"{name} (text)", scored, text, subject=subject, says=says, hint=hint)
