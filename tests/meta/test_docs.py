"""What the documentation says about the tree is true."""

import re

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.h100.results import table
from tests.meta.sources import ROOT, python_files, tracked, where
from verifier.cli.app import app
from verifier.core.check import REGISTRY
from verifier.core.gate import ExitCode
from verifier.model.tiny import TINY
from verifier.model.wide import WIDE

PAGES = [path for path in tracked() if path.suffix == ".md"]
LIVING = [page for page in PAGES if page.parent.name != "adr"]
"""Pages that are kept true; an ADR tells of the tree that it was written for."""
README = (ROOT / "README.md").read_text()


def test_every_module_is_in_whats_here():
    text = (ROOT / "docs" / "whats-here.md").read_text()
    names = [str(path.relative_to(ROOT)) for path in python_files("verifier") if path.name != "__init__.py"]
    absent = [name for name in names if f"`{name}`" not in text]
    assert not absent, "\n".join(absent)


@pytest.mark.parametrize("page", LIVING, ids=where)
def test_pages_name_files_that_exist(page):
    """Links, and paths in backticks that begin with a folder of this repository."""
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    gone = [target for target in links if not (page.parent / target).exists()]
    paths = re.findall(r"`((?:verifier|tests|docs|ci|golden)/[A-Za-z0-9_./-]+)`", text)
    gone += [path for path in paths if not (ROOT / path).exists()]
    assert not gone, "\n".join(gone)


def test_pages_are_ascii():
    odd = [where(page) for page in PAGES if not page.read_text().isascii()]
    assert not odd, "\n".join(odd)


def test_every_check_has_its_bound_in_numerics():
    text = (ROOT / "docs" / "numerics.md").read_text()
    assert sorted(code for code in REGISTRY if code not in text) == []


def test_readme_names_every_command_exit_code_and_model():
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    commands += [group.name for group in app.registered_groups]
    assert [name for name in commands if f"`verifier {name}" not in README] == []
    assert [code for code in ExitCode if f"| {code.value} | {code.name.lower()}" not in README] == []
    assert [name for name in TINY if f"`tiny:{name}`" not in README] == []
    assert [name for name in WIDE if f"`wide:{name}`" not in README] == []


def test_readme_shows_what_gpus_showed():
    """The table is what `tests.h100.results.table` makes of the recorded rows."""
    shown = README.split("<!-- table: gpu -->\n")[1].split("\n<!-- table: end -->")[0]
    assert shown == table(ROOT / "golden" / "gpu")


def test_readme_examples_are_whole():
    """Each opens with the run's identity and ends with its verdict, as the renderer writes them."""
    for kind, verdict in (("pass", "holds: "), ("failure", "violated: ")):
        block = README.split(f"<!-- example: {kind} -->\n")[1].split("<!-- example: end -->")[0]
        lines = [line for line in block.strip().splitlines() if not line.startswith(("```", "$ "))]
        assert lines[0].startswith("verifier roundtrip tiny:")
        assert lines[-1].startswith(verdict)


def test_every_folder_of_tests_is_explained():
    text = (ROOT / "tests" / "README.md").read_text()
    folders = {
        path.relative_to(ROOT / "tests").parts[0] for path in python_files("tests") if path.parent.name != "tests"
    }
    assert sorted(name for name in folders if f"`{name}/`" not in text) == []


def test_every_decision_is_listed_and_has_its_three_parts():
    listed = (ROOT / "docs" / "adr" / "README.md").read_text()
    decisions = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        assert f"({path.name})" in listed, path.name
        headings = re.findall(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], path.name
