"""Generated sums are right, distinct, split by a hash and chosen by the seed."""

import zlib

import pytest

from verifier.data.arithmetic import HELD_OUT, SPLITS, TRAIN, arithmetic_examples, calculator_examples
from verifier.errors import UsageError


@pytest.mark.parametrize("split", SPLITS)
def test_sums_are_right_and_the_split_is_by_hash(split):
    examples = arithmetic_examples(split)
    for example in examples:
        first, second = example.prompt.removesuffix("=").split("+")
        assert int(first) + int(second) == int(example.answer) == int(example.response.removeprefix("####"))
        assert (len(example.prompt), len(example.response)) == (6, 7)
        assert (zlib.crc32(example.prompt.encode()) % 10 == 0) == (split == HELD_OUT)
    assert len({example.id for example in examples}) == len(examples)


def test_splits_make_up_the_whole():
    prompts = [example.prompt for split in SPLITS for example in arithmetic_examples(split)]
    assert len(prompts) == len(set(prompts)) == 90 * 90
    assert len(arithmetic_examples(HELD_OUT)) == 822


def test_the_seed_chooses():
    assert arithmetic_examples(TRAIN, 100, 1) == arithmetic_examples(TRAIN, 200, 1)[:100]
    assert arithmetic_examples(TRAIN, 100, 1) != arithmetic_examples(TRAIN, 100, 2)
    assert arithmetic_examples(TRAIN, 2, 1)[0].prompt == "18+32="


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("dev",), "unknown split `dev`"), ((HELD_OUT, 823), "1 to 822"), ((TRAIN, 0), "0 arithmetic examples")],
)
def test_bad_requests_are_one_sentence(arguments, said):
    with pytest.raises(UsageError, match=said):
        arithmetic_examples(*arguments)


def test_a_calculator_is_asked_for_the_sums_of_the_split():
    sums, solved = arithmetic_examples(HELD_OUT, 3), calculator_examples(HELD_OUT, 3, solved=True)
    for plain, talk, asked in zip(sums, solved, calculator_examples(HELD_OUT, 3, solved=False), strict=True):
        assert [item.role for item in talk.messages] == ["user", "assistant", "tool", "assistant"]
        assert [item.content for item in talk.messages] == [
            plain.prompt, plain.prompt, plain.answer, f"####{plain.answer}"
        ]  # fmt: skip
        assert asked.messages == talk.messages[:1]
        assert asked.question == talk.question
        assert asked.answer == plain.answer
