"""A second reading of a source: digests of the rows that the loader reads, by no code of the loader's."""

import json

import datasets
import numpy as np
import pytest

from tests.second_reading import PARTS, digests, read_again, rows_of_step
from verifier.data import text_dataset
from verifier.data.examples import Example
from verifier.data.recorded import recorded_files
from verifier.errors import UsageError

ROWS = [
    {"id": "a", "prompt": "1+1=", "response": "2", "answer": "2"},
    {"prompt": "caf\u00e9 \U0001f600\u2028\u0085=", "response": " 3\r\n", "answer": " 3 "},
    {"id": "", "prompt": "x", "response": "", "answer": 1e23},
    {"prompt": "y", "messages": [], "response": "z", "answer": 12345678901234567890123},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="},
                  {"role": "assistant", "content": "2"}, {"role": "tool", "content": "t"},
                  {"role": "assistant", "content": "u"}]},
]  # fmt: skip
ASKED = [{"messages": ROWS[4]["messages"][:2], "answer": "2"}, {"prompt": "1+1=", "answer": -0.0}]


def of_examples(examples):
    return np.array([of_example(item) for item in examples], np.uint64)


def of_example(item: Example):
    messages = [(message.role, message.content, message.in_loss) for message in item.messages]
    return digests(item.id, item.question, item.prompt, messages, item.response, item.answer, item.metadata)


def same(source, task, **options):
    found = of_examples(text_dataset.load_examples(str(source), task, **options))
    return np.array_equal(found, read_again(source, task, **options))


@pytest.mark.parametrize("source", ["arithmetic", "calculator"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
@pytest.mark.parametrize("split", ["train", "held-out"])
def test_generated_examples(source, task, split):
    assert same(source, task, split=split, seed=3)
    assert same(source, task, split=split, seed=4, count=7)


@pytest.mark.parametrize("escaped", [True, False])
def test_rows_of_a_file(tmp_path, escaped):
    for task, rows in (("sft", [ROWS[at] for at in (0, 1, 3, 4)]), ("grpo", [*ROWS[:4], *ASKED])):
        file = tmp_path / f"{task}.jsonl"
        lines = [json.dumps(row, ensure_ascii=escaped) for row in rows]
        file.write_text("\n".join(lines), encoding="utf-8")
        assert same(str(file), task)
        assert same(str(file), task, count=2)


def test_a_folder_of_datasets_in_several_files(tmp_path):
    rows = [{"id": f"row {at}", "prompt": f"{at}+1=", "response": f"{at + 1}", "answer": None} for at in range(40)]
    talks = datasets.Dataset.from_list([{"messages": [*ROWS[4]["messages"]]}] * 3)
    kept = datasets.Dataset.from_list(rows).select(range(30, 0, -2))
    kept.save_to_disk(tmp_path / "one", num_shards=4)
    datasets.DatasetDict({"train": talks, "held-out": kept}).save_to_disk(
        tmp_path / "several", num_shards={"train": 2, "held-out": 1}
    )
    assert len(read_again(str(tmp_path / "one"), "sft")) == 15
    assert same(str(tmp_path / "one"), "sft")
    assert same(str(tmp_path / "several"), "sft")
    assert same(str(tmp_path / "several"), "sft", split="held-out", count=4)


def test_each_part_has_a_digest_of_its_own():
    said = [("user", "q", True)]
    whole = digests("a", "q", "", said, "r", "1", {"level": 1})
    changed = [
        digests("b", "q", "", said, "r", "1", {"level": 1}), digests("a", "p", "", said, "r", "1", {"level": 1}),
        digests("a", "q", "", [("system", "q", True)], "r", "1", {"level": 1}),
        digests("a", "q", "", said, None, "1", {"level": 1}), digests("a", "q", "", said, "r", None, {"level": 1}),
        digests("a", "q", "", said, "r", "1", {"level": 2}),
    ]  # fmt: skip
    for at, other in enumerate(changed):
        assert [mine != its for mine, its in zip(whole, other, strict=True)] == [
            here == at for here in range(len(PARTS))
        ]


def test_what_cannot_be_read_again_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("[]\n")
    for source in ("rows.jsonl", "absent.jsonl", "."):
        with pytest.raises(UsageError, match="cannot be read a second time"):
            read_again(str(tmp_path / source), "sft")
    with pytest.raises(UsageError, match="cannot be read a second time"):
        rows_of_step(tmp_path, 2)


def test_files_of_steps_are_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name}) + "\n")
    (tmp_path / "b.txt").write_text("")
    assert [rows_of_step(tmp_path, step)[0]["id"] for step in (1, 2, 3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "names",
    [
        ("2", "10", "100"), ("000009", "000010", "000011"), ("a", "a1", "a02", "a2", "b1"), ("1-9", "1-10", "2-1"),
        ("01", "1", "002"), ("step_9_of_10", "step_10_of_10"), ("99999999999999999999999", "100000000000000000000000"),
        ("1", "\u0663", "\u00b2"),
    ],
)  # fmt: skip
def test_numbers_in_names_count_as_numbers_for_both_readers(tmp_path, names):
    for name in sorted(names):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name}) + "\n")
    found = [file.stem for file in recorded_files(tmp_path)]
    assert found == [rows_of_step(tmp_path, step + 1)[0]["id"] for step in range(len(names))]
    assert names[-1].isascii() is False or found == list(names)
