"""A trace on disk: what was written comes back, and what is damaged is refused in one sentence."""

import json
from pathlib import Path

import pytest
import torch

from verifier.core import store
from verifier.core.evidence import Evidence
from verifier.core.stage import Stage
from verifier.errors import UsageError

FACT = Evidence(
    stage=Stage.EXPORT, kind="tensor", name="a", version=2, digest="vd1:00", dtype="bfloat16", shape=(2, 3),
    facts={"at": "tp=0", "names": ["x", "y"]},
)  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    path = store.create(tmp_path / "trace", {"command": "golden"})
    recorder = store.Recorder(path, "trainer", 3)
    recorder.emit(FACT, torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    recorder.emit(Evidence(stage=Stage.LOAD, kind="shard", name="b", shape=()))
    recorder.close()
    return path


def finish(path) -> None:
    store.write_manifest(path, {"command": "golden", "complete": True})


def test_facts_and_arrays_come_back_with_who_recorded_them(trace):
    finish(trace)
    found = store.read(trace)
    first, second = found.evidence
    assert (first.role, first.rank, first.name, first.version) == ("trainer", 3, "a", 2)
    assert (first.digest, first.dtype, first.shape, dict(first.facts)) == ("vd1:00", "bfloat16", (2, 3), FACT.facts)
    assert torch.equal(found.array(first), torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert (second.stage, second.name, second.array) == (Stage.LOAD, "b", None)
    assert found.manifest["complete"] is True


def test_the_line_that_a_dying_run_was_writing_is_forgiven_and_no_other(trace):
    file = trace / "evidence" / "trainer-0003.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert [item.name for item in store.read(trace).evidence] == ["a"]
    finish(trace)
    with pytest.raises(UsageError, match=r"`trainer-0003.jsonl` line 2 of the trace .* is damaged"):
        store.read(trace)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("{", "manifest.json` is not JSON"),
        ('{"format": 2}', "has trace format 2, this version reads format 1"),
        ("[]", "manifest.json` holds a JSON list, not an object"),
        ('{"format": 1, "scopes": 3}', "manifest.json` is damaged: `scopes` is 3"),
        ('{"format": 1, "scopes": [[]]}', r"manifest.json` is damaged: `scopes` is \[\[\]\]"),
        ('{"format": 1, "world_size": 1000000000}', "manifest.json` is damaged: `world_size` is 1000000000"),
        ('{"format": 1, "engine_ranks": -1}', "manifest.json` is damaged: `engine_ranks` is -1"),
        ('{"format": 1, "config": null}', "manifest.json` is damaged: `config` is None"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(trace, manifest, said):
    (trace / "manifest.json").write_text(manifest)
    with pytest.raises(UsageError, match=said):
        store.read(trace)


def test_a_field_of_another_version_is_refused(trace):
    (trace / "evidence" / "trainer-0004.jsonl").write_text(
        json.dumps({"stage": "load", "kind": "x", "name": "y", "opinion": "good"}) + "\n"
    )
    with pytest.raises(UsageError, match="a field `opinion` that this version of verifier does not know"):
        store.read(trace)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"\xff\xfe",
        b'{"stage": "nowhere", "kind": "x", "name": "y"}',
        b'{"stage": "load"}',
        b'{"stage": "load", "kind": "x", "name": 5}',
        b'{"stage": "load", "kind": "x", "name": "y", "version": "z"}',
        b'{"stage": "load", "kind": "x", "name": "y", "facts": []}',
    ],
)
def test_a_line_that_is_no_evidence_is_refused(trace, line):
    finish(trace)
    (trace / "evidence" / "trainer-0004.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UsageError, match=r"`trainer-0004.jsonl` line 1 of the trace .* is damaged"):
        store.read(trace)


def test_a_trace_that_cannot_be_opened_is_refused(trace):
    with pytest.raises(UsageError, match=r"manifest.json` holds no trace: there is no manifest.json"):
        store.read(trace / "manifest.json")
    (trace / "evidence" / "trainer-0004.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"trainer-0004.jsonl` cannot be read: Is a directory"):
        store.read(trace)


def test_a_damaged_array_is_named(trace):
    finish(trace)
    found = store.read(trace)
    for file in (trace / "arrays").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="payload `trainer-0003-000000` of the trace is damaged"):
        found.array(found.evidence[0])


def test_results_go_where_they_can_be_written_and_leave_no_mark_before(tmp_path):
    store.require_writable(tmp_path / "report.json")
    store.require_writable(tmp_path / "new" / "report.json", make_folder=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]
    with pytest.raises(UsageError, match=r"report.json` cannot be written: File name too long"):
        store.require_writable(tmp_path / ("a" * 255 + "report.json"))
    with pytest.raises(UsageError, match="`/dev/full` is a device or a pipe, a file for the results is needed"):
        store.require_writable(Path("/dev/full"))


def test_traces_are_kept_in_an_empty_folder_only(tmp_path):
    store.require_empty(tmp_path / "kept", "--keep")
    with pytest.raises(UsageError, match="is not empty: choose another --keep"):
        store.require_empty(tmp_path, "--keep")


def test_a_folder_that_is_in_use_is_refused(trace):
    with pytest.raises(UsageError, match="is not empty: choose another --trace"):
        store.create(trace, {})


def test_an_array_that_is_gone_is_named(trace):
    finish(trace)
    found = store.read(trace)
    for file in (trace / "arrays").iterdir():
        file.unlink()
    with pytest.raises(KeyError, match="payload `trainer-0003-000000` is not in the trace"):
        found.array(found.evidence[0])
