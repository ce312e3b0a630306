"""Examples as token ids: prompts to sample from, and rollouts of given text for SFT, masked by role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from verifier.data.examples import Example
from verifier.data.rollout import NO_VERSION, Rollout, make_rollout
from verifier.data.tokenizer import Tokenizer
from verifier.errors import UsageError

Piece = tuple[tuple[int, ...], int]
"""(token ids, number of leading ones that are trained on)."""


def encode_prompt(example: Example, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids to sample from: the prompt, or the conversation up to the beginning of an assistant's turn.

    Raises:
        UsageError: see `Tokenizer.encode` and `Tokenizer.chat_text`; the prompt has no tokens.
    """
    if example.messages:
        ids = tokenizer.encode(tokenizer.chat_text(example.messages, to_answer=True))
    else:
        ids = tokenizer.encode(example.prompt, begin=True)
    if not ids:
        raise UsageError(f"example `{example.id}`: its prompt has no tokens")
    return ids


def encode_example(example: Example, tokenizer: Tokenizer) -> Rollout:
    """Encode an example for SFT: the loss is over what an assistant wrote, the end of each of its turns included.

    Each turn is encoded apart from what stands before it, so a prompt has the tokens that an engine would be given.
    The prompt is all before the first trained token. Trained tokens are marked as sampled, as `Rollout` demands; no
    weights sampled them, so their log-probabilities are NaN and their version is `NO_VERSION`. What users and tools
    say between turns has the role of tool output, and so have tokens of the template after the end of a turn.

    Raises:
        UsageError: no trained token; the chat template does not end an assistant's turn with a special token, or
            changes earlier turns; or see `encode_prompt`.
    """
    if example.messages:
        first, *rest = _turns(example, tokenizer)
    else:
        response = (*tokenizer.encode(example.response), tokenizer.eos_id) if example.response else ()
        first, *rest = (encode_prompt(example, tokenizer), 0), (response, len(response))
    trained = [at < kept for ids, kept in rest for at in range(len(ids))]
    if not any(trained):
        raise UsageError(f"example `{example.id}` has no label in the loss: give it a response or an assistant message")
    return make_rollout(
        example.id,
        first[0],
        [token for ids, _ in rest for token in ids],
        sampled=trained,
        versions=NO_VERSION,
    )


def require_kept(examples: Iterable[Example], tokenizer: Tokenizer) -> None:
    """Refuse, before any step asks for it, a text with a character that the tokenizer loses.

    Of each character that is lost by itself the first example that has it is encoded: the tokenizer may keep it there.

    Raises:
        UsageError: see `encode_example`; names the example.
    """
    firsts: dict[str, Example] = {}
    for example in examples:
        texts = (example.prompt, example.response or "", *(message.content for message in example.messages))
        firsts |= dict.fromkeys(set().union(*texts) - firsts.keys(), example)
    for character, example in firsts.items():
        try:
            tokenizer.encode(character)
        except UsageError:
            try:
                encode_example(example, tokenizer)
            except UsageError as problem:
                raise UsageError(f"example `{example.id}`: {problem}") from None


def split_turns(example: Example, tokenizer: Tokenizer) -> tuple[Example, ...]:
    """The example, or one for each turn that is learned where the chat template changes earlier turns.

    Each of these has the conversation up to its turn, as it would be sampled, and that turn alone in the loss.

    Raises:
        UsageError: nothing stands before an answer, or the template refuses the conversation, or writes what stands
            before an answer otherwise once the answer is there.
    """
    turns = list(_rendered(example, tokenizer))
    if all(before.startswith(done) for (_, before, _), (_, _, done) in zip(turns[1:], turns, strict=False)):
        return (example,)
    found = []
    for number, (at, _, _) in enumerate(turns, start=1):
        given = (replace(message, in_loss=False) for message in example.messages[:at])
        found.append(
            replace(example, id=f"{example.id}/{number}", messages=(*given, example.messages[at]))
        )  # fmt: skip
    return tuple(found)


def _rendered(example: Example, tokenizer: Tokenizer) -> Iterator[tuple[int, str, str]]:
    """(Place, text before it, text with it) of each assistant's message that is learned."""
    for at, message in enumerate(example.messages):
        if not message.is_learned:
            continue
        before = tokenizer.chat_text(example.messages[:at], to_answer=True) if at else ""
        after = tokenizer.chat_text(example.messages[: at + 1])
        if not before or not after.startswith(before):
            why = "the chat template changes what stands before an answer" if before else "nothing stands before it"
            raise UsageError(
                f"example `{example.id}`: {why} (message {at + 1}): give a prompt before it, or another template by "
                "data.chat_template"
            )
        yield at, before, after


def _turns(example: Example, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Text before an assistant's turn, and the turn, in alternation."""
    done = ""
    for at, before, after in _rendered(example, tokenizer):
        if not before.startswith(done):
            raise UsageError(
                f"example `{example.id}`: the chat template changes earlier turns (message {at + 1}): give an example "
                "for each answer, as `split_turns` does"
            )
        turn = tokenizer.encode(after[len(before) :])
        ends = [place for place, token in enumerate(turn) if token in tokenizer.special_ids]
        if not ends:
            raise UsageError(f"{tokenizer.template_name} ends an assistant's turn with no special token")
        yield tokenizer.encode(before[len(done) :]), 0
        yield turn, ends[-1] + 1
        done = after
    if not done:
        yield (), 0
