"""No byte that is flipped, cut or lost in a trace turns a verdict into holds.

What this does not exercise: a forger who makes the digests anew.
"""

import random
import shutil
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import BROKEN, MANIFEST, arrays_of, clean
from verifier.core import store
from verifier.core.check import REGISTRY
from verifier.errors import UsageError
from verifier.report import report_of

DAMAGES = 350
"""Of each of two traces that were finished."""
UNFINISHED = 150
"""Of one that was not: it has no digests, and all checks judge it each time."""


def record(path, records, *, complete):
    """A trace as a run leaves it, by one recorder per role and rank."""
    store.create(path, MANIFEST)
    recorders = {}
    for item in records:
        key = (item.role, item.rank)
        if key not in recorders:
            recorders[key] = store.Recorder(path, *key)
        recorders[key].emit(item, arrays_of(item))
    for recorder in recorders.values():
        recorder.close()
    if complete:
        store.complete(path, MANIFEST)
    return path


def judged(path):
    """Exit code, and what was judged: manifest, records and arrays; nothing where the trace is refused."""
    try:
        trace = store.read(path)
        codes = [*REGISTRY] if trace.manifest.command == MANIFEST.command else []
        code = int(report_of(trace, "t", only_codes=codes).exit_code)
    except UsageError as problem:
        return 4 if len(str(problem).splitlines()) == 1 else -1, None
    try:
        arrays = {item.array: trace.arrays(item) for item in trace.records if getattr(item, "array", "")}
    except ValueError:  # of a run that did not finish, whose files have no digests: its check breaks
        return code, None
    shown = {key: {name: array.tobytes() for name, array in each.items()} for key, each in arrays.items()}
    return code, (trace.manifest, trace.records, shown)


def flip(draw, file):
    contents = bytearray(file.read_bytes())
    contents[draw.randrange(len(contents))] ^= 1 << draw.randrange(8)
    file.write_bytes(contents)


def cut(draw, file):
    contents = file.read_bytes()
    begin = draw.randrange(len(contents))
    end = len(contents) if draw.random() < 0.5 else draw.randrange(begin, len(contents)) + 1
    file.write_bytes(contents[:begin] + contents[end:])


def lose_a_line(draw, file):
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    file.write_bytes(b"".join(lines))


def delete(draw, file):
    file.unlink()


def empty(draw, file):
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("records", "complete", "code"),
    [(clean(), True, 0), (BROKEN["WGT004"], True, 1), (clean(), False, 2)],
    ids=["holds", "violated", "did-not-finish"],
)
def test_damage_never_ends_in_holds(tmp_path, records, complete, code):
    path = record(tmp_path / "trace", records, complete=complete)
    right = judged(path)
    assert right[0] == code
    files = sorted(file for file in path.rglob("*") if file.is_file())
    draw = random.Random(f"damage {code}")
    codes = []
    for _ in range(DAMAGES if complete else UNFINISHED):
        file = draw.choice([*files, path / "manifest.json"])
        kept = file.read_bytes()
        draw.choice([flip, flip, flip, cut, lose_a_line, delete, empty])(draw, file)
        found, content = judged(path)
        codes.append(found)
        assert found >= 0
        assert found != 0 or content == right[1], f"{file.relative_to(path)}"
        assert not complete or found == 4 or content == right[1], f"{file.relative_to(path)}"
        file.write_bytes(kept)
    assert not complete or codes.count(4) > 0.9 * DAMAGES
    assert judged(path) == right


@pytest.mark.parametrize("packed", [False, True], ids=["as it was written", "packed"])
def test_damage_of_a_trace_of_a_real_run(tmp_path, packed):
    """`verifier golden --model tiny:qwen3 --tp 2` left it. Packed it is judged the same."""
    path = Path(shutil.copytree(Path(__file__).with_name("golden-trace"), tmp_path / "trace"))
    code, right = judged(path)
    assert code == 0
    if packed:
        store.pack(path)
        assert judged(path) == (code, right)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) == 2 or not packed
    draw = random.Random("golden")
    for _ in range(200):
        file = draw.choice(files)
        kept = file.read_bytes()
        draw.choice([flip, cut, lose_a_line, delete, empty])(draw, file)
        found, content = judged(path)
        assert found == 4 or content == right
        file.write_bytes(kept)


def test_a_trace_of_another_run_is_not_mixed_in(tmp_path):
    ours = record(tmp_path / "ours", BROKEN["WGT004"], complete=True)
    theirs = record(tmp_path / "theirs", clean(), complete=True)
    shutil.copy(theirs / "evidence" / "trainer-0000.jsonl", ours / "evidence")
    with pytest.raises(UsageError, match=r"is damaged: `evidence/trainer-0000\.jsonl` is not what the run wrote"):
        store.read(ours)
