"""Files beside the weights of a checkpoint on their way into `hf_model`, and WGT021 on them."""

import json

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.stages.export.probe_tensors import record_files
from verifier.trainer.model_files import copy_files

WRITTEN = ("config.json", "model.safetensors", "model.safetensors.index.json")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name in (".cache", "original"):  # of a download
        (folder / name).mkdir(parents=True)
        (folder / name / "params.json").write_text("{}")
    for name in (*WRITTEN, "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"):
        (folder / name).write_text("before the training")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def exported(tmp_path):
    """An export that wrote a tokenizer anew, and a template of its own."""
    folder = tmp_path / "hf_model"
    folder.mkdir()
    for name in (*WRITTEN, "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("of the export")
    return folder


def judged(source, exported):
    class Collect(list):
        emit = list.append

    found = Collect()
    record_files(found, source, exported, 3)
    outcome = run_check(REGISTRY["WGT021"], make_trace(found))
    assert outcome.error is None
    return outcome.verdict, outcome.finding and outcome.finding.first.what


def test_files_are_the_sources_and_weights_the_exports(source, exported):
    copy_files(source, exported)
    assert {file.name for file in exported.iterdir()} == {*WRITTEN, "generation_config.json", "tokenizer.json"}
    assert {(exported / name).read_text() for name in WRITTEN} == {"of the export"}
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": [1, 5]}
    assert judged(source, exported) == (Verdict.HOLDS, None)


def test_a_source_of_weights_alone_is_judged(source, exported):
    for name in ("generation_config.json", "tokenizer.json"):
        (source / name).unlink()
    assert judged(source, exported)[0] is Verdict.VIOLATED
    copy_files(source, exported)
    assert judged(source, exported) == (Verdict.HOLDS, None)


@pytest.mark.parametrize(
    ("name", "content"),
    [("generation_config.json", "{}"), ("chat_template.jinja", "another"), ("pytorch_model.bin", "before")],
)
def test_other_added_and_stale_files_are_seen(source, exported, name, content):
    copy_files(source, exported)
    (exported / name).write_text(content)
    assert judged(source, exported) == (Verdict.VIOLATED, name)


def test_a_lost_file_is_seen(source, exported):
    copy_files(source, exported)
    (exported / "tokenizer.json").unlink()
    assert judged(source, exported) == (Verdict.VIOLATED, "tokenizer.json")
