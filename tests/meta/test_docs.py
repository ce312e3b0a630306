"""What the documentation says about the tree is true."""

from tests.meta.sources import ROOT, python_files


def test_every_module_is_in_whats_here():
    text = (ROOT / "docs" / "whats-here.md").read_text()
    names = [str(path.relative_to(ROOT)) for path in python_files("verifier") if path.name != "__init__.py"]
    absent = [name for name in names if f"`{name}`" not in text]
    assert not absent, "\n".join(absent)


def test_whats_here_names_no_module_that_is_gone():
    import re

    text = (ROOT / "docs" / "whats-here.md").read_text()
    gone = [name for name in re.findall(r"`(verifier/[a-z0-9_/]+\.py)`", text) if not (ROOT / name).exists()]
    assert not gone, "\n".join(gone)
