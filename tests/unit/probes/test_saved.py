"""What a reader finds in a checkpoint that somebody else wrote, its index included."""

import json

import pytest
import torch

from verifier.core.record import Record
from verifier.model.checkpoint import INDEX, write_shard
from verifier.plan.digest import digest_tensor
from verifier.stages.export.probe_tensors import IndexedFiles, record_saved
from verifier.stages.export.records import SavedCheckpoint, SavedTensor

WEIGHTS = {name: torch.full((2, 3), float(place)) for place, name in enumerate("abc")}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Seen(list):
    """A probe that keeps what it is told."""

    def emit(self, record: Record, array=None) -> None:
        self.append(record)


@pytest.fixture
def folder(tmp_path):
    write_shard(tmp_path / FIRST, {name: WEIGHTS[name] for name in "ab"})
    write_shard(tmp_path / SECOND, {"c": WEIGHTS["c"]})
    return tmp_path


def found(folder) -> dict[str, str]:
    seen = Seen()
    record_saved(seen, IndexedFiles(folder), 3)
    assert {item.version for item in seen} == {3}
    (files,) = [item for item in seen if isinstance(item, SavedCheckpoint)]
    present = {item.name: item.digest for item in seen if isinstance(item, SavedTensor)}
    return present | dict.fromkeys(files.missing, "in no shard")


def index(folder, **places: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_all_tensors_of_all_shards(folder):
    index(folder, a=FIRST, b=FIRST, c=SECOND)
    assert found(folder) == {name: digest_tensor(tensor) for name, tensor in WEIGHTS.items()}


def test_without_an_index_what_lies_there(folder):
    assert found(folder).keys() == WEIGHTS.keys()


def test_what_the_index_does_not_name_is_not_found(folder):
    index(folder, a=FIRST, c=SECOND)
    assert found(folder).keys() == {"a", "c"}


def test_what_lies_elsewhere_than_the_index_says_is_not_found(folder):
    index(folder, a=FIRST, b=SECOND, c=SECOND, d="model-00003-of-00003.safetensors")
    assert found(folder) == {
        "a": digest_tensor(WEIGHTS["a"]),
        "b": "in no shard",
        "c": digest_tensor(WEIGHTS["c"]),
        "d": "in no shard",
    }


def test_of_an_empty_folder_that_it_is_empty(tmp_path):
    assert found(tmp_path) == {}
