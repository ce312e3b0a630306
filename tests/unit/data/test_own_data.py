"""What teams bring: key maps, further columns, Parquet, folders with splits, and the sentence for what is not read."""

import datetime
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.second_reading import Columns, digests, read_again
from verifier.data.examples import KeyMap, Message
from verifier.data.text_dataset import count_rows, load_examples, splits_of
from verifier.errors import UsageError

SHARE_GPT = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "1+1="},
                               {"from": "gpt", "value": "2"}], "source": "web"}  # fmt: skip
ALPACA = [{"instruction": "Add.", "input": "1+1", "output": "2"}, {"instruction": "1+1?", "input": "", "output": "2"}]
GSM8K = {"question": "Tom has 1 apples and buys 3 more. How many?", "answer": "He buys 3.\n1+3=<<1+3=4>>4\n#### 4"}
VERL = {"data_source": "sums", "prompt": [{"role": "user", "content": "1+1="}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7}}  # fmt: skip
MAPS = {
    "sharegpt": ("sft", [SHARE_GPT], {"messages": "conversations"}),
    "alpaca": ("sft", ALPACA, {"prompt": "instruction+input", "response": "output"}),
    "alpaca, as messages": (
        "sft", ALPACA, {"prompt": "instruction+input", "response": "output", "apply_chat_template": True}
    ),
    "gsm8k, sft": ("sft", [GSM8K], {"prompt": "question", "response": "answer"}),
    "gsm8k, grpo": ("grpo", [GSM8K], {"prompt": "question", "apply_chat_template": True}),
    "verl": ("grpo", [VERL], {"messages": "prompt", "answer": "reward_model.ground_truth"}),
    "prompt not read": ("sft", [{"prompt": "x", "messages": [{"role": "user", "content": "1"},
                                 {"role": "assistant", "content": "2", "weight": 1}]}], {"prompt": None}),
    "numbered": ("sft", [{"id": 0, "prompt": "1", "response": "2", "more": None}], {}),
}  # fmt: skip


def written(folder, rows, form):
    if form == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        path = folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path = folder / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


def read_by(source, task, names, **options):
    """Examples, after the second reader has found the same in the source."""
    found = load_examples(source, task, keys=KeyMap(**names), **options)
    words = dict(names)
    columns = Columns(as_messages=words.pop("apply_chat_template", False), names=words)
    used = [
        digests(
            item.id, item.question, item.prompt, [(one.role, one.content, one.in_loss) for one in item.messages],
            item.response, item.answer, item.metadata,
        )
        for item in found
    ]  # fmt: skip
    assert np.array_equal(np.array(used, np.uint64), read_again(source, task, columns=columns, **options))
    return found


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("name", MAPS)
def test_both_readers_follow_a_key_map(name, form, tmp_path):
    task, rows, names = MAPS[name]
    found = read_by(written(tmp_path, rows, form), task, names)
    assert len(found) == len(rows)


def test_what_key_maps_read(tmp_path):
    def only(name):
        (tmp_path / name).mkdir(exist_ok=True)
        task, rows, names = MAPS[name]
        return load_examples(written(tmp_path / name, rows, "jsonl"), task, keys=KeyMap(**names))

    (talk,) = only("sharegpt")
    assert talk.messages == tuple(
        Message(role=role, content=text) for role, text in (("system", "s"), ("user", "1+1="), ("assistant", "2"))
    )
    assert talk.metadata == {"source": "web"}
    assert [(item.prompt, item.response) for item in only("alpaca")] == [("Add.\n1+1", "2"), ("1+1?", "2")]
    asked, told = only("alpaca, as messages")[1].messages
    assert (asked, told) == (Message(role="user", content="1+1?"), Message(role="assistant", content="2"))
    (solved,) = only("gsm8k, sft")
    assert (solved.prompt, solved.response, solved.answer) == (GSM8K["question"], GSM8K["answer"], None)
    (posed,) = only("gsm8k, grpo")
    assert (posed.messages, posed.answer) == (
        (Message(role="user", content=GSM8K["question"]),), GSM8K["answer"],
    )  # fmt: skip
    (row,) = only("verl")
    assert (row.messages, row.answer) == ((Message(role="user", content="1+1="),), "2")
    assert row.metadata == {name: VERL[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
    assert only("prompt not read")[0].metadata == {"prompt": "x"}
    assert only("numbered")[0].id == "0"
    assert only("numbered")[0].metadata == {"more": None}


def test_what_json_has_no_form_for_is_kept_as_text(tmp_path):
    row = {"prompt": "1", "response": "2", "at": datetime.datetime(2026, 1, 2), "raw": b"\x01", "share": float("nan")}
    (found,) = read_by(written(tmp_path, [row], "parquet"), "sft", {})
    assert found.metadata["at"] == "2026-01-02 00:00:00"
    json.dumps(found.metadata)


def rows_of(split, count=3):
    return [{"prompt": f"{split} {at}", "response": "2"} for at in range(count)]


def write_shards(folder, names, rows=rows_of):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(name)), folder / f"{name}.parquet")
    return str(folder)


@pytest.mark.parametrize("inner", [".", "data"])
def test_a_folder_of_parquet_files_has_splits(inner, tmp_path):
    names = ["test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"]
    write_shards(tmp_path / inner, names)
    assert splits_of(str(tmp_path)) == ("test", "train", "validation")
    train = read_by(str(tmp_path), "sft", {})
    assert [item.prompt for item in train] == [f"{name} {at}" for name in names[1:3] for at in range(3)]
    assert [item.prompt for item in read_by(str(tmp_path), "sft", {}, split="test", count=2)] == [
        f"{names[0]} {at}" for at in range(2)
    ]
    assert count_rows(str(tmp_path), "train", 512) == 6
    with pytest.raises(UsageError, match=r"has no split `dev`: there are test, train, validation; give data.split"):
        load_examples(str(tmp_path), "sft", split="dev")


@pytest.mark.parametrize("names", [["0000", "0001"], ["part-0", "part-1"], ["chat"]])
def test_a_folder_of_parquet_files_of_one_kind_has_none(names, tmp_path):
    write_shards(tmp_path, names)
    assert splits_of(str(tmp_path)) == ()
    assert len(read_by(str(tmp_path), "sft", {})) == 3 * len(names)


def test_splits_of_saved_folders(tmp_path):
    parts = {name: datasets.Dataset.from_list(rows_of(name)) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "several")
    parts["train"].save_to_disk(tmp_path / "one")
    assert splits_of(str(tmp_path / "several")) == ("train", "test")
    assert splits_of(str(tmp_path / "one")) == splits_of("rows.jsonl") == ()


def test_what_is_no_data_gets_a_sentence(tmp_path):
    def said(source, **options):
        with pytest.raises(UsageError) as caught:
            load_examples(str(source), "sft", **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "`hf download openai/gsm8k --repo-type dataset --local-dir gsm8k`" in said("openai/gsm8k")
    write_shards(tmp_path / "tests", ["test-00000-of-00001"])
    assert "has no split `train`: there are test" in said(tmp_path / "tests")
    for name in ("main", "socratic"):
        write_shards(tmp_path / "hub" / name, ["train-00000-of-00001"])
    assert "has Parquet files in main, socratic: give one of these folders" in said(tmp_path / "hub")
    (tmp_path / "bad.parquet").write_text("PAR0")
    assert "bad.parquet is no Parquet file" in said(tmp_path / "bad.parquet")
    kinds = {"more": {"x": 1}, "other": {"response": 3}, "fewer": {}}
    for kind, columns in kinds.items():
        last = {"prompt": "1"} | ({} if kind == "fewer" else {"response": "2"} | columns)
        rows = {"train-0": [{"prompt": "1", "response": "2"}], "train-1": [last]}
        write_shards(tmp_path / kind, rows, rows.__getitem__)
        found = said(tmp_path / kind)
        assert "train-1.parquet has the columns prompt string" in found
        assert found.endswith("and train-0.parquet beside it prompt string, response string: make them alike")
    (tmp_path / "list.jsonl").write_text('[\n{"prompt": "1"}]\n')
    assert "rows of a list are read if each has a line of its own" in said(tmp_path / "list.jsonl")


@pytest.mark.parametrize(
    ("task", "row", "names", "said"),
    [
        ("sft", GSM8K, {"prompt": "problem"}, "data.prompt_key is `problem`, which is no column: there are question, "),
        ("grpo", VERL, {"messages": "prompt", "answer": "reward_model.gold"}, "data.answer_key is `reward_model.gold`"),
        ("sft", ALPACA[0], {"prompt": "instruction+context"}, "data.prompt_key is `context`, which is no column"),
        ("sft", {"a": "x", "b": 1}, {"prompt": "a+b"}, "data.prompt_key is `a+b`, which joins texts, and `1` is none"),
        ("sft", SHARE_GPT, {}, "neither `prompt` nor `messages`; its columns are conversations, source: give "
                               "data.messages_key=conversations"),
        ("sft", ALPACA[0], {}, "give data.prompt_key=instruction+input data.response_key=output"),
        ("grpo", GSM8K, {}, "give data.prompt_key=question"),
        ("sft", {"text": "x"}, {}, "its columns are text: give data.prompt_key or data.messages_key"),
        ("grpo", VERL, {}, "`prompt` is a list: if it has messages, give data.messages_key=prompt"),
        ("sft", {"conversations": [{"from": "observation", "value": "x"}]}, {"messages": "conversations"},
         "a message has the role `observation`: it must be one of system, user, assistant, tool"),
        ("sft", {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]}, {},
         "message 2, an assistant's, is empty"),
        ("sft", {"prompt": "1", "response": "2", "answer": ["2"]}, {},
         "Expected `int | float | str | null`, got `array` - at `$.answer`: give another column by its key of data"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_read_gets_a_sentence(task, row, names, said, tmp_path):
    with pytest.raises(UsageError) as caught:
        load_examples(written(tmp_path, [row], "jsonl"), task, keys=KeyMap(**names))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
