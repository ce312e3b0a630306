"""Every row that a task cannot use is refused by its line, and so are examples on both sides of a split."""

import json

import datasets
import pytest

from verifier.data.arithmetic import arithmetic_examples
from verifier.data.examples import Example, Message
from verifier.data.text_dataset import load_examples, require_disjoint
from verifier.errors import UsageError

GOOD = {"prompt": "1+1=", "response": "2", "answer": "2"}
ASKED = {"role": "user", "content": "1+1="}
TOLD = {"role": "assistant", "content": "2"}


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


def test_rows_of_a_file(written):
    source = written(GOOD, {"id": "second", "messages": [ASKED, TOLD], "answer": 2})
    first, second = load_examples(source, "sft")
    assert first == Example(id="rows.jsonl:1", prompt="1+1=", response="2", answer="2")
    messages = (Message(role="user", content="1+1="), Message(role="assistant", content="2"))
    assert second == Example(id="second", messages=messages, answer="2")
    assert load_examples(source, "sft", count=1) == (first,)


def test_arithmetic_is_a_source():
    assert load_examples("arithmetic", "grpo", split="held-out", count=9, seed=3) == arithmetic_examples(
        "held-out", 9, 3
    )


def test_a_folder_of_datasets(tmp_path):
    rows = datasets.Dataset.from_list([GOOD, {**GOOD, "prompt": "2+2="}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    one = load_examples(str(tmp_path / "one"), "grpo")
    assert [example.prompt for example in one] == ["1+1=", "2+2="]
    several = load_examples(str(tmp_path / "several"), "grpo", split="test")
    assert [example.prompt for example in several] == ["1+1=", "2+2="]
    with pytest.raises(UsageError, match="has no split `train`: there are test"):
        load_examples(str(tmp_path / "several"), "grpo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is no folder that `datasets` saved, nor has it Parquet files"):
        load_examples(str(tmp_path / "empty"), "grpo")
    datasets.Dataset.from_list([GOOD, {**GOOD, "answer": None}]).save_to_disk(tmp_path / "bad")
    with pytest.raises(UsageError, match="row 2: it has no `answer`"):
        load_examples(str(tmp_path / "bad"), "grpo")


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("grpo", {"prompt": "1"}, "it has no `answer`, which a reward needs"),
        ("grpo", {"prompt": "1", "answer": " "}, "it has no `answer`, which a reward needs"),
        ("grpo", {"messages": [ASKED, TOLD], "answer": "2"}, "its last message is an assistant's"),
        ("sft", {"prompt": "1", "answer": "2"}, "it has no label in the loss"),
        ("sft", {"prompt": "1", "response": ""}, "it has no label in the loss"),
        ("sft", {"messages": [ASKED]}, "it has no label in the loss"),
        ("sft", {"messages": [ASKED, {**TOLD, "content": ""}]}, "message 2, an assistant's, is empty"),
        ("sft", {"messages": [ASKED, TOLD, ASKED]}, "its last message is not an assistant's"),
        ("sft", {"messages": [ASKED, TOLD], "response": "2"}, "has `messages` and `response`"),
        ("sft", {**GOOD, "messages": [ASKED, TOLD]}, "it has both `prompt` and `messages`"),
        ("sft", {"response": "2"}, "it has neither `prompt` nor `messages`"),
        ("sft", {"messages": [{**ASKED, "role": "human"}, TOLD]}, "a message has the role `human`"),
        ("sft", {"messages": [{**ASKED, "name": "x"}, TOLD]}, "unknown field `name` - at `$.messages[0]`"),
        ("sft", {"messages": [ASKED, {**TOLD, "weight": 2}]}, "Invalid enum value 2 - at `$.messages[1].weight`"),
        ("sft", {"messages": [ASKED, {**TOLD, "weight": 0}]}, "it has no label in the loss"),
        ("sft", {**GOOD, "prompt": 7}, "Expected `str | null`, got `int` - at `$.prompt`"),
        ("sft", {**GOOD, "id": "first"}, "the id `first` occurs twice"),
        ("sft", [1], "Expected `object`, got `array`"),
        ("sft", '{"prompt": "1",', "Input data was truncated"),
        ("sft", "[" * 100_000, "Expected `object`, got `array`"),
        ("sft", "", "it is empty"),
    ],
)
def test_a_bad_row_is_named_by_its_line(task, row, said, written):
    source = written({**GOOD, "id": "first"}, row)
    with pytest.raises(UsageError) as caught:
        load_examples(source, task)
    assert str(caught.value).startswith(f"{source}, line 2: ")
    assert said in str(caught.value)


def test_sources_that_are_not_there(written, tmp_path):
    with pytest.raises(UsageError, match="no data at `addition`: give arithmetic, calculator, a JSONL file"):
        load_examples("addition", "sft")
    with pytest.raises(UsageError, match="has 1 examples, 2 asked for"):
        load_examples(written(GOOD), "sft", count=2)
    with pytest.raises(UsageError, match="has 0 examples, at least 1 asked for"):
        load_examples(written(), "sft")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text in UTF-8: invalid start byte at byte 0"):
        load_examples(str(tmp_path / "binary"), "sft")


def test_train_and_held_out_share_no_question():
    train, held_out = arithmetic_examples("train"), arithmetic_examples("held-out")
    require_disjoint(train, held_out)
    with pytest.raises(UsageError) as caught:
        require_disjoint(train, [*held_out, train[5]])
    said = f"overlap in 1 of 823 held-out examples: `{train[5].id}`, '{train[5].prompt}', is in both"
    assert said in str(caught.value)


def test_conversations_overlap_by_what_stands_before_the_answer():
    asked = Message(role="user", content="1")
    one = Example(id="one", messages=(asked, Message(role="assistant", content="2")))
    other = Example(id="other", messages=(asked, Message(role="assistant", content="3")))
    with pytest.raises(UsageError, match="`other`"):
        require_disjoint([one], [other])
    require_disjoint([one], [Example(id="another", messages=(Message(role="user", content="2"),))])
