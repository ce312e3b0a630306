"""Which split a run holds out, and how many problems it evaluates on, where its config says neither."""

import datasets
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer.run_data import held_out_split, load_held_out, load_train, with_evaluation


def config(*overrides):
    return load(TrainConfig, overrides=["model=tiny:add", "run=run", "data.batch_size=2", *overrides])[0]


@pytest.fixture
def folder(tmp_path):
    def write(**counts):
        parts = {
            name.replace("_", "-"): datasets.Dataset.from_list(
                [{"prompt": f"{name} {at}", "response": "2"} for at in range(count)]
            )
            for name, count in counts.items()
        }
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
        return f"data.source={tmp_path / 'saved'}"

    return write


def evaluated(asked):
    asked = with_evaluation(asked)
    return asked.evaluation.num_problems, len(load_held_out(asked, load_train(asked, "sft"), "sft"))


def test_an_evaluation_has_the_problems_there_are(folder, tmp_path):
    assert evaluated(config(folder(train=4, test=3))) == (3, 3)
    assert evaluated(config()) == (512, 512)
    assert evaluated(config("evaluation.num_problems=7")) == (7, 7)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "response": "2"}\n{"prompt": "2", "response": "2"}\n')
    assert evaluated(config(f"data.source={rows}")) == (0, 0)
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "3", "response": "2"}\n')
    assert evaluated(config(f"data.source={rows}", f"data.held_out={held}")) == (1, 1)
    assert with_evaluation(config("algorithm=grpo", f"data.rollouts={tmp_path}")).evaluation.num_problems == 0


def test_the_split_is_the_first_of_those_that_are_held_out(folder):
    source = folder(train=4, test=3, validation=2)
    assert held_out_split(config(source)) == "validation"
    assert evaluated(config(source, "data.held_out_split=test")) == (3, 3)
    assert held_out_split(config()) == "held-out"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.num_problems=5"], "evaluation.num_problems is 5: .* has 3 examples, 5 asked for"),
        (["data.held_out_split=dev"], "has no split `dev`: there are train, test"),
        (["data.held_out_split=train"], "data.split and data.held_out_split are both `train`"),
    ],
)
def test_what_cannot_be_held_out_gets_a_sentence(words, said, folder):
    with pytest.raises(UsageError, match=said):
        evaluated(config(folder(train=4, test=3), *words))


def test_a_source_without_a_held_out_split_gets_a_sentence(folder, tmp_path):
    source = folder(train=4)
    assert evaluated(config(source)) == (0, 0)
    with pytest.raises(UsageError, match=r"has no held-out split: give data.held_out or data.held_out_split"):
        evaluated(config(source, "evaluation.num_problems=2"))
    with pytest.raises(UsageError, match=r"has splits train: give data.held_out_split"):
        evaluated(config(f"data.held_out={tmp_path / 'saved'}"))
