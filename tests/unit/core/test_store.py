"""A trace on disk: what was written comes back, and what is not whole is refused in one sentence."""

import errno
import io
import lzma
import os
import shutil
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from verifier.core import archive, outputs, reader, store
from verifier.core.manifest import Manifest
from verifier.core.reader import sealed
from verifier.errors import InternalError, UsageError
from verifier.stages.load.records import SourceTensor
from verifier.stages.logprob.records import TrainerLogprobs

MANIFEST = Manifest(command="golden", config={"seed": 1, "scale": 1.0})
TENSOR = SourceTensor(name="a", version=2, digest="vd1:" + "0" * 32, dtype="bfloat16", shape=(2, 3))
LOGPROBS = TrainerLogprobs(name="scored", lengths=(2,))
VALUES = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
EVIDENCE, LOGPROBS_FILE = "evidence/trainer-0003.jsonl", "trainer-0003-000000.safetensors"
FILES: dict[str, bytes] = {}
"""Files of a trace, by their paths within."""


@pytest.fixture
def trace(tmp_path):
    path = store.create(tmp_path / "trace", MANIFEST)
    recorder = store.Recorder(path, "trainer", 3)
    recorder.emit(LOGPROBS, VALUES)
    recorder.emit(TENSOR)
    recorder.close()
    return path


@pytest.fixture
def whole(trace):
    store.complete(trace, MANIFEST)
    return trace


def test_facts_and_arrays_come_back_with_who_recorded_them(whole):
    found = store.read(whole)
    logprobs, tensor = found.records
    assert (logprobs.role, logprobs.rank, logprobs.name, logprobs.lengths) == ("trainer", 3, "scored", (2,))
    assert (tensor.rank, tensor.digest, tensor.dtype, tensor.shape) == (3, TENSOR.digest, "bfloat16", (2, 3))
    assert np.array_equal(found.array(logprobs), np.array([1.5, -2.0], np.float32))
    assert (found.manifest.complete, found.manifest.config) == (True, MANIFEST.config)
    assert [item.name for item in found.of(SourceTensor, version=2)] == ["a"]
    assert found.versions(SourceTensor) == [2]


def test_several_arrays_of_one_record(trace):
    recorder = store.Recorder(trace, "trainer", 4)
    recorder.emit(LOGPROBS, {"one": np.arange(3), "two": np.array([True])})
    recorder.close()
    found = store.read(trace)
    (item,) = found.of(TrainerLogprobs, rank=4)
    assert {name: array.tolist() for name, array in found.arrays(item).items()} == {"one": [0, 1, 2], "two": [True]}
    with pytest.raises(KeyError):
        found.array(item)


def test_the_line_that_a_dying_run_was_writing_is_forgiven_and_no_other(trace):
    file = trace / EVIDENCE
    lines = file.read_bytes()
    file.write_bytes(lines[:-20])
    (trace / "arrays" / "trainer-0003-000001.partial").touch()
    assert [item.name for item in store.read(trace).records] == ["scored"]
    file.write_bytes(lines[20:])
    with pytest.raises(UsageError, match=r"`evidence/trainer-0003.jsonl` line 1 of the trace .* is damaged"):
        store.read(trace)


def rewritten(text: str):
    return lambda trace: (trace / "manifest.json").write_text(text)


def linked(name: str):
    def damage(trace):
        outside = trace.with_name("outside")
        (trace / name).rename(outside)
        (trace / name).symlink_to(outside)

    return damage


def naming(name: str):
    """A manifest, with its right digest, that has one more file."""

    def damage(trace):
        manifest = store.read(trace).manifest
        files = {**manifest.files, name: "xxh3:" + "0" * 32}
        (trace / "manifest.json").write_bytes(sealed(replace(manifest, files=files)))

    return damage


def nested(depth: int):
    """A manifest whose config holds lists in each other, few enough for a parser to take."""
    return rewritten('{"format": 3, "config": {"seed": ' + "[" * depth + "]" * depth + "}}")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (rewritten("{"), "manifest.json` is not JSON"),
        (rewritten('{"format": 2}'), "has trace format 2, this version reads format 3"),
        (rewritten('{"format": 4, "files": 1}'), "has trace format 4, this version reads format 3"),
        (rewritten("[]"), "manifest.json` is no manifest of a trace"),
        (rewritten('{"format": 3, "facts": {"part": "else"}}'), "manifest.json` is damaged: Invalid enum value"),
        (rewritten('{"format": 3, "world_size": 1000000000}'), "manifest.json` is damaged: Expected `int` <= 65536"),
        (rewritten('{"format": 3, "config": null}'), "manifest.json` is damaged: Expected `object`, got `null`"),
        (rewritten('{"format": 3, "opinion": 1}'), "manifest.json` is damaged: it is not what the run wrote"),
        (rewritten('{"format": 3, "config": ' + "[" * 9999 + "]" * 9999 + "}"), "maximum recursion depth"),
        (rewritten('{"format": 3, "complete": true}'), "manifest.json` is damaged: it is not what the run wrote"),
        (lambda trace: (trace / "manifest.json").write_bytes(b"\xff\xfe"), "is not JSON"),
        (lambda trace: (trace / "manifest.json").unlink(), "holds no trace: there is no manifest.json"),
        (lambda trace: (trace / EVIDENCE).unlink(), f"is not whole: `{EVIDENCE}` is missing"),
        (lambda trace: (trace / EVIDENCE).write_bytes(b""), f"is damaged: `{EVIDENCE}` is not what the run wrote"),
        (lambda trace: (trace / "evidence/more.jsonl").touch(), "is not whole: `evidence/more.jsonl` is no file of it"),
        (lambda trace: (trace / "more").touch(), "is not whole: `more` is no file of it"),
        (lambda trace: (trace / "arrays/a.partial").touch(), "is not whole: `arrays/a.partial` is no file of it"),
        (lambda trace: os.mkfifo(trace / "evidence" / "pipe.jsonl"), "`evidence/pipe.jsonl` is no file of it"),
        (lambda trace: (trace / "arrays/x.safetensors").symlink_to("/dev/zero"), "x.safetensors` is no file of it"),
        (lambda trace: (trace / "arrays/trainer-0003-000000.safetensors").unlink(), "000000.safetensors` is missing"),
        (lambda trace: (trace / "evidence/x.jsonl").mkdir(), "is not whole: `evidence/x.jsonl` is no file of it"),
        (lambda trace: ((trace / "manifest.json").unlink(), os.mkfifo(trace / "manifest.json")), "is no regular file"),
        (linked("manifest.json"), "manifest.json` is no regular file"),
        (linked("evidence"), "is not whole: `evidence` is no file of it"),
        (linked(EVIDENCE), f"is not whole: `{EVIDENCE}` is no file of it"),
        (naming("../outside"), "is not whole: `../outside` is missing"),
        (naming("/etc/hostname"), "is not whole: `/etc/hostname` is missing"),
        *[(nested(depth), "manifest.json` is damaged: Expected `str") for depth in (3, 500, 970, 985)],
    ],
)
def test_what_is_not_whole_is_refused(whole, damage, sentence):
    damage(whole)
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")) as raised:
        store.read(whole)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"\xff\xfe",
        b'{"name":"y"}',
        b'{"kind":"nowhere/x"}',
        b'{"kind":"nowhere/x","name":"y","version":-1}',
        b'{"kind":"load/source"}',
        b'{"kind":"load/source","name":"y"}',
        b'{"kind":"load/source","name":"y","digest":"","dtype":"float32","shape":[]}',
        b'{"kind":"load/source","name":5,"digest":"vd1:00000000000000000000000000000000","dtype":"f","shape":[]}',
        b'{"kind":"load/source","name":"y","digest":"vd1:00000000000000000000000000000000","dtype":"f","shape":[-1]}',
        b'{"kind":"logprob/trainer","name":"y","lengths":[2],"array":"../../../etc/passwd"}',
        b'{"kind":"engine/settings","name":"y","values":' + b'{"a":' * 9999 + b"}" * 9999 + b"}",
    ],
)
def test_a_line_that_is_no_record_is_refused(trace, line):
    (trace / "evidence" / "trainer-0004.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UsageError, match=r"`evidence/trainer-0004.jsonl` line 1 of the trace .* is damaged"):
        store.read(trace)


def test_a_record_whose_array_is_absent_is_refused(trace):
    line = b'{"kind":"logprob/trainer","name":"y","lengths":[2]}'
    (trace / "evidence" / "trainer-0004.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UsageError, match="is not whole: logprob/trainer `y` has no array"):
        store.read(trace)


def test_an_array_that_changes_after_it_was_looked_at_is_judged_as_it_was(whole):
    found = store.read(whole)
    before = found.array(found.records[0])
    for file in (whole / "arrays").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert found.array(found.records[0]).tolist() == before.tolist()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def unpacked(file: Path) -> dict[str, bytes]:
    return {name: contents() for name, contents in archive.members(file).items()}


@pytest.fixture
def batch(tmp_path):
    file = tmp_path / "000001-00.safetensors"
    file.write_bytes(b"a batch")
    return file


@pytest.mark.parametrize("in_memory", [archive.IN_MEMORY, 1])
def test_a_packed_trace_reads_as_before(whole, batch, monkeypatch, in_memory):
    monkeypatch.setattr(archive, "IN_MEMORY", in_memory)
    before, files = store.read(whole), files_of(whole)
    first = before.array(before.records[0]).tolist()
    store.pack(whole, [batch])
    assert sorted(files_of(whole)) == ["manifest.json", "trace.tar.xz"]
    assert not batch.exists()
    packed = unpacked(whole / "trace.tar.xz")
    assert packed.pop("batches/000001-00.safetensors") == b"a batch"
    assert packed | {"manifest.json": files["manifest.json"]} == files
    found = store.read(whole)
    assert (found.manifest, found.records) == (before.manifest, before.records)
    assert found.array(found.records[0]).tolist() == first
    once = files_of(whole)
    store.pack(whole)  # again
    assert files_of(whole) == once


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as it was written"])
def test_batches_stay_where_records_are_removed(whole, batch, packed):
    if packed:
        store.pack(whole, [batch])
    for _ in range(2):
        store.pack(whole, [batch], records=False)
        assert sorted(files_of(whole)) == ["batches.tar.xz", "manifest.json"]
        assert unpacked(whole / "batches.tar.xz") == {"batches/000001-00.safetensors": b"a batch"}
    with pytest.raises(UsageError, match=r"were removed \(verify\.keep\), its digests are kept"):
        store.read(whole)


@pytest.mark.parametrize("records", [True, False], ids=["packed", "records removed"])
@pytest.mark.parametrize("died_at", ["fsync", "rename", "unlink", "rmtree"])
def test_a_kill_while_a_trace_is_packed_loses_nothing(whole, batch, monkeypatch, died_at, records):
    class Killed(BaseException):
        pass

    def die(*_args, **_options):
        raise Killed

    before = store.read(whole).records
    owner = {"fsync": os, "rmtree": shutil}.get(died_at, Path)
    monkeypatch.setattr(owner, died_at, die)
    with pytest.raises(Killed):
        store.pack(whole, [batch], records=records)
    monkeypatch.undo()
    assert store.read(whole).records == before
    kept = [unpacked(file)["batches/000001-00.safetensors"] for file in whole.glob("*.xz")]
    assert (batch.exists() and batch.read_bytes() == b"a batch") or kept == [b"a batch"]
    store.pack(whole, [file for file in [batch] if file.exists()], records=records)  # as a resumed run does
    assert sorted(files_of(whole)) == sorted(["manifest.json", "trace.tar.xz" if records else "batches.tar.xz"])
    (file,) = whole.glob("*.xz")
    assert unpacked(file)["batches/000001-00.safetensors"] == b"a batch"


def archive_of(members: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:xz") as packed:
        for name, contents in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            packed.addfile(member, io.BytesIO(contents))
    return found.getvalue()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda packed: packed[:-5], "trace.tar.xz` is damaged: Compressed file ended"),
        (lambda packed: b"x" + packed, "trace.tar.xz` is damaged: Input format not supported"),
        (lambda packed: packed[:200] + b"x" + packed[201:], "trace.tar.xz` is damaged: Corrupt input data"),
        (lambda packed: lzma.compress(lzma.decompress(packed)[:700]), "trace.tar.xz` is damaged: unexpected end"),
        (lambda packed: lzma.compress(bytes(2**21)), "contents are more than 1,048,576 bytes"),
        (lambda packed: archive_of({EVIDENCE: FILES[EVIDENCE]}), f"is not whole: `arrays/{LOGPROBS_FILE}` is missing"),
        (lambda packed: archive_of({EVIDENCE: b"", f"arrays/{LOGPROBS_FILE}": b"x"}), "is not what the run wrote"),
        (lambda packed: archive_of({**FILES, "more": b""}), "is not whole: `more` is no file of it"),
    ],
)  # fmt: skip
def test_an_archive_that_is_damaged_is_refused_in_one_sentence(whole, monkeypatch, change, sentence):
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    FILES.update({name: contents for name, contents in files_of(whole).items() if name != "manifest.json"})
    store.pack(whole)
    file = whole / "trace.tar.xz"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UsageError, match=sentence) as raised:
        store.read(whole)
    assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_a_trace_as_it_was(whole, batch, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = files_of(whole)
    monkeypatch.setattr(os, "fsync", full)
    store.pack(whole, [batch])
    assert files_of(whole) == before
    assert batch.exists()


def test_a_large_array_that_changes_after_it_was_looked_at_is_named(whole, monkeypatch):
    monkeypatch.setattr(reader, "KEPT_BYTES", 0)
    found = store.read(whole)
    for file in (whole / "arrays").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="array `trainer-0003-000000` of the trace is damaged"):
        found.array(found.records[0])
    file.unlink()
    with pytest.raises(KeyError, match="array `trainer-0003-000000` is not in the trace"):
        found.array(found.records[0])


def test_a_run_that_failed_says_why_and_is_not_complete(trace):
    store.fail(trace, MANIFEST, "rank 3 died")
    assert (store.read(trace).manifest.complete, store.read(trace).manifest.failure) == (False, "rank 3 died")


def test_a_manifest_is_stored_with_its_digest(trace):
    assert (trace / "manifest.json").read_bytes() == sealed(MANIFEST)


def test_results_go_where_they_can_be_written_and_leave_no_mark_before(tmp_path):
    outputs.require_writable(tmp_path / "report.json")
    outputs.require_writable(tmp_path / "new" / "report.json", make_folder=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]
    with pytest.raises(UsageError, match=r"report.json` cannot be written: File name too long"):
        outputs.require_writable(tmp_path / ("a" * 255 + "report.json"))
    with pytest.raises(UsageError, match="`/dev/full` is a device or a pipe, a file for the results is needed"):
        outputs.require_writable(Path("/dev/full"))


def test_traces_are_kept_in_an_empty_folder_only(tmp_path):
    outputs.require_empty(tmp_path / "kept", "--keep")
    with pytest.raises(UsageError, match="is not empty: choose another --keep"):
        outputs.require_empty(tmp_path, "--keep")


def test_a_folder_that_is_in_use_is_refused(trace):
    with pytest.raises(UsageError, match="is not empty: choose another --trace"):
        store.create(trace, MANIFEST)


def test_room_for_a_trace_is_asked_for_and_nothing_is_left(trace, tmp_path):
    with pytest.raises(UsageError, match="is not empty: choose another --trace"):
        store.require_room(trace)
    store.require_room(tmp_path / "to" / "come")
    assert list((tmp_path / "to").iterdir()) == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("empty", "link"):
        store.require_room(tmp_path / name)
        assert list((tmp_path / name).iterdir()) == []
    assert (tmp_path / "link").is_symlink()


def test_a_run_that_broke_keeps_its_logs_and_can_be_judged(tmp_path):
    traces = [tmp_path / "whole", tmp_path / "broken"]
    logs = {"rank000": b"one", "engine0": b"two"}

    def run():
        with store.recording(traces, MANIFEST, lambda: logs) as complete:
            complete(traces[0])
            raise InternalError("rank 0 died")

    with pytest.raises(InternalError):
        run()
    assert not (traces[0] / "logs").exists()
    assert {file.name: file.read_bytes() for file in (traces[1] / "logs").iterdir()} == {
        "rank000.log": b"one", "engine0.log": b"two",
    }  # fmt: skip
    found = store.read(traces[1]).manifest
    assert (found.complete, found.failure) == (False, "rank 0 died")
    assert found.began <= found.ended
    assert found.began


def test_a_refused_run_asks_for_no_logs(tmp_path):
    def ask():
        raise AssertionError("asked")

    with pytest.raises(UsageError), store.recording([tmp_path / "trace"], MANIFEST, ask):
        raise UsageError("mend it")
    assert not (tmp_path / "trace").exists()


def test_a_manifest_of_a_version_with_fewer_fields_is_read(tmp_path):
    """Its digest is of what was written, not of what this version would write."""
    import msgspec

    from verifier.core.reader import digest_of

    trace = store.create(tmp_path / "trace", MANIFEST)
    written = msgspec.json.decode((trace / "manifest.json").read_bytes())
    del written["began"], written["commit"]
    written["digest"] = digest_of(msgspec.json.encode({**written, "digest": ""}))
    (trace / "manifest.json").write_bytes(msgspec.json.encode(written))
    assert store.read(trace).manifest.command == MANIFEST.command
    written["command"] = "another"
    (trace / "manifest.json").write_bytes(msgspec.json.encode(written))
    with pytest.raises(UsageError, match="it is not what the run wrote"):
        store.read(trace)


def test_of_two_runs_that_want_one_folder_one_gets_it_and_it_stays(tmp_path):
    """Many at the same moment: the others are refused, and take nothing of it away."""
    for attempt in range(20):
        path, outcomes, start = tmp_path / str(attempt), [], threading.Barrier(4)

        def take(path=path, outcomes=outcomes, start=start):
            start.wait()
            try:
                store.create(path, Manifest())
                outcomes.append("made")
            except UsageError as problem:
                outcomes.append(str(problem))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = f"the trace directory `{path}` is not empty: choose another --trace"
        assert sorted(outcomes) == sorted(["made", refused, refused, refused])
        assert not store.read(path).manifest.complete
