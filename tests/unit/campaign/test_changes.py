"""Which files changed, when a change is over, and which files Python cannot compile."""

from __future__ import annotations

import os

from verifier.campaign.watch.changes import changed, next_change, stamps, syntax_errors


def test_files_written_made_and_removed_are_changed_and_others_are_not(tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("rows/a.py", "b.safetensors", "c.json", "same.py"):
        (tmp_path / name).write_text("1")
    before = stamps([tmp_path])
    (tmp_path / "rows/a.py").write_text("12")
    os.utime(tmp_path / "b.safetensors", ns=(1, 1))
    (tmp_path / "c.json").unlink()
    (tmp_path / "new.py").write_text("")
    for name in (".hidden.swp", "same.py~"):
        (tmp_path / name).write_text("")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_text("")
    found = changed(before, stamps([tmp_path]))
    assert found == [tmp_path / name for name in ("b.safetensors", "c.json", "new.py", "rows/a.py")]


def test_a_link_has_the_stamp_of_what_it_leads_to_and_what_is_gone_has_none(tmp_path):
    blob, link = tmp_path / "blob", tmp_path / "model" / "model.safetensors"
    blob.write_text("1")
    link.parent.mkdir()
    link.symlink_to(blob)
    before = stamps([link.parent, tmp_path / "never"])
    blob.write_text("23")
    assert changed(before, stamps([link.parent])) == [link]


def test_an_edit_of_several_files_is_one_change():
    one, both = {"a": (1, 1)}, {"a": (1, 1), "b": (2, 1)}
    looks, slept = iter([{}, one, both, both, both]), []
    found, seen = next_change({}, lambda: next(looks), slept.append)
    assert (found, seen) == (["a", "b"], both)
    assert len(slept) == 3


def test_a_file_that_does_not_compile_is_named_with_its_line(tmp_path):
    good, bad, gone = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "gone.py"
    good.write_text("x = 1\n")
    bad.write_text("x = 1\ny = )\n")
    assert syntax_errors([good, bad, gone, tmp_path]) == [f"`{bad}`, line 2: unmatched ')'"]
