"""A trace that a later minor version wrote: its fields are left out, its kinds are kept, the verdict is the same."""

import json

import msgspec
import pytest

import verifier
from tests.snapshots.check_traces import BROKEN, clean
from tests.unit.core.test_damage import record
from verifier.core.reader import digest_of
from verifier.core.record import UnknownRecord
from verifier.report import render_text

EVIDENCE = "evidence/trainer-0000.jsonl"
ADDED = {"kind": "rollout/later", "name": "x", "version": 1, "rank": 0, "nats": [0.5, None]}


def extended(value, added):
    """A JSON value with a further field in each object whose fields are not names of the user's."""
    if isinstance(value, list):
        return [extended(item, added) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: extended(item, added) if key not in NAMED else item for key, item in value.items()}
    return found | added


NAMED = {"config", "files", "versions", "plugins", "verified", "recorded", "numbers", "dtypes"}
"""Fields that map names to values."""


def later(path):
    """Rewrite a trace with a field more everywhere, and a record of a further kind, and seal it."""
    for file in (path / "evidence").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        new = [line | {"later": {"unit": "nats"}} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in new))
    with (path / EVIDENCE).open("a") as stream:
        stream.write(json.dumps(ADDED) + "\n")
    file = path / "manifest.json"
    manifest = extended(json.loads(file.read_text()), {"later": 1}) | {"verifier": "0.9.0", "digest": ""}
    manifest["files"] = {name: digest_of((path / name).read_bytes()) for name in manifest["files"]}
    file.write_bytes(msgspec.json.encode(manifest | {"digest": digest_of(msgspec.json.encode(manifest))}))
    return path


@pytest.mark.parametrize("code", ["", "WGT004", "LGP001"])
def test_it_is_judged_as_without_what_was_added(code, tmp_path):
    path = record(tmp_path / "trace", BROKEN[code] if code else clean(), complete=True)
    before, known = verifier.judge(path), verifier.read(path)
    found, report = verifier.read(later(path)), verifier.judge(path)
    assert found.records == known.records
    assert found.unknown == (UnknownRecord(kind="rollout/later", name="x", version=1, fields=ADDED),)
    assert (report.verdict, report.outcomes) == (before.verdict, before.outcomes)
    said = "not judged: records of kinds that are not known here: 1 rollout/later"
    assert (report.not_judged, said in render_text(report)) == ((*before.not_judged, said), True)
