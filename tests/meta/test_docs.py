"""What the documentation says about the tree is true."""

import re

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist import families_table, published_table
from tests.meta import gate_schema, measurement_tables, upgrades
from tests.meta.sources import ROOT, python_files, tracked, where
from verifier.cli.app import app
from verifier.core.check import REGISTRY
from verifier.core.finding import ExitCode
from verifier.faults.catalog import CATALOG
from verifier.model.tiny import KNOWN
from verifier.model.wide import WIDE

PAGES = [path for path in tracked() if path.suffix == ".md"]
LIVING = [page for page in PAGES if page.parent.name != "adr"]
"""Pages that are kept true; an ADR tells of the tree that it was written for."""
MAX_README_LINES = 150
README = (ROOT / "README.md").read_text()


def test_the_page_of_places_is_short_and_names_what_is_there():
    """Each file has the name that stands beside it, and each room of the package is listed."""
    text = (ROOT / "docs" / "where-things-are.md").read_text()
    assert len(text.splitlines()) <= 80
    rows = re.findall(r"^\| [^|]+ \| `(verifier/[^`]+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert len(rows) > 10
    gone = [
        (file, name)
        for file, name in rows
        if not re.search(rf"^(def |class )?{name}\b", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert gone == []
    rooms = {path.parent.name for path in (ROOT / "verifier").glob("*/__init__.py")}
    listed = text.partition("## Rooms")[2].partition("## Beside")[0]
    assert rooms == set(re.findall(r"`([a-z]+)`(?=[^|]*\|[^|]*\|$)", listed, re.MULTILINE))
    assert "docs/where-things-are.md" in README


@pytest.mark.parametrize("name", gate_schema.SCHEMAS)
def test_the_schemas_of_a_gate_are_drawn_from_their_types(name):
    """`python -m tests.meta.gate_schema` writes them anew."""
    assert (ROOT / "docs" / name).read_text() == gate_schema.rendered(name)


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


def test_readme_names_every_command_and_exit_code():
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    commands += [group.name for group in app.registered_groups]
    assert [name for name in commands if f"`verifier {name}" not in README] == []
    assert [code for code in ExitCode if f"| {code.value} | {code.name.lower()}" not in README] == []


def test_models_page_names_every_generated_model():
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in KNOWN if f"`tiny:{name}`" not in text] == []
    assert [name for name in WIDE if f"`wide:{name}`" not in text] == []


def test_readme_is_short():
    assert len(README.splitlines()) <= MAX_README_LINES


def test_models_page_is_drawn_from_the_ledger():
    """`python -m tests.dist.families_table page` and `python -m tests.dist.published_table page` draw it anew."""
    text = families_table.PAGE.read_text()
    assert text == published_table.drawn(families_table.drawn(text))


@pytest.mark.parametrize("page", measurement_tables.TABLES, ids=where)
def test_pages_of_measurements_are_drawn_from_golden(page):
    """`python -m tests.meta.measurement_tables` draws them anew."""
    assert page.read_text() == measurement_tables.drawn(page)


def test_upstream_page_shows_the_recorded_upgrades():
    """`python -m tests.meta.upgrades` draws it anew."""
    text = upgrades.PAGE.read_text()
    assert text == upgrades.drawn(text)


def test_readme_finding_is_one_that_the_renderer_writes():
    """Its check and fault exist, the fault must be caught by the check, and its lines are those of a snapshot."""
    block = README.split("<!-- example: failure -->\n")[1].split("<!-- example: end -->")[0].strip("`\n").splitlines()
    fault = re.search(r"`verifier faults run (\S+) --keep", README)[1]
    code, name = re.match(r"text|(\w+) ([a-z-]+): ", block[1]).groups()
    assert (REGISTRY[code].name, code in CATALOG[fault].caught_by) == (name, True)
    snapshot = (ROOT / "tests" / "snapshots" / "files" / f"check-{code}.txt").read_text()
    labels = re.findall(r"^  ?(\w+ *:)", snapshot, re.MULTILINE)
    assert [label for label in labels if not any(line.strip().startswith(label) for line in block)] == []
    assert all(re.match(r"$|  \w+ *: ", line) for line in block[2:])


@pytest.mark.parametrize("page", LIVING, ids=where)
def test_lines_of_prose_are_short(page):
    """At most 125 characters outside of tables, code, links and headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > 125 and not re.match(r"\s*(\||#)|.*\]\(", line)]
    assert not long, "\n".join(long)


def test_every_folder_of_tests_is_explained():
    text = (ROOT / "tests" / "README.md").read_text()
    folders = {
        path.relative_to(ROOT / "tests").parts[0] for path in python_files("tests") if path.parent.name != "tests"
    }
    assert sorted(name for name in folders if f"`{name}/`" not in text) == []


def test_every_decision_is_listed_and_has_its_three_parts():
    listed = (ROOT / "docs" / "adr" / "README.md").read_text()
    decisions = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert len({path.name[:4] for path in decisions}) == len(decisions)
    for path in decisions:
        assert f"({path.name})" in listed, path.name
        headings = re.findall(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], path.name
