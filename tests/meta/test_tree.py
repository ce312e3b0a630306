"""Laws that hold for every file."""

import ast
import re

from tests.meta.sources import ROOT, imports_of, python_files, tracked, tree_of, where

MAX_LINES = 600
VAGUE_NAMES = {"utils", "helpers", "common", "misc", "manager", "util", "helper"}
BROAD_EXCEPT = {
    ("verifier/core/check.py", "run_check"),
    ("verifier/cli/app.py", "run"),
    ("verifier/algorithms/registry.py", "load_plugins"),
    ("verifier/core/outputs.py", "full_disk_refused"),
    ("verifier/contracts/__main__.py", "failures"),
    ("verifier/engine/server.py", "run"),
    ("verifier/cli/watch_round.py", "_command"),
    ("verifier/data/problem_sources.py", "gym_problems"),
    ("verifier/environments/environment.py", "open_environment"),
    ("verifier/environments/verifiers_tasks.py", "load_environment"),
    ("verifier/rewards/scorer.py", "_answered"),
}
"""Frames around code that may raise anything: a check, a command, a plugin, a contract, any writer of files, the load
of an engine, environments and rewards."""
REGISTRY_HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + "hosted", r"registry\.np" + "m", r"deb\.deb" + "ian"])
)
MACHINE_PATHS = re.compile(r"(^|[^A-Za-z0-9_.~])/(work|farm|root)/")
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "Not" + "ImplementedError"]) + r")\b")


def text_files():
    for path in tracked():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def test_no_file_is_too_long():
    long = [f"{where(path)}: {n}" for path in python_files() if (n := path.read_text().count("\n")) > MAX_LINES]
    assert not long, "\n".join(long)


def test_names_say_what_is_inside():
    vague = [where(path) for path in python_files() if VAGUE_NAMES & set(path.with_suffix("").parts)]
    assert not vague, "\n".join(vague)


def test_code_is_ascii():
    odd = [where(path) for path in python_files() if not path.read_text(encoding="utf-8").isascii()]
    assert not odd, "\n".join(odd)


def test_no_registry_host_and_no_path_of_one_machine():
    found = [
        f"{where(path, number)}: {line.strip()[:100]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if REGISTRY_HOSTS.search(line) or MACHINE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)


def test_nothing_is_left_unfinished():
    found = [where(path) for path in python_files() if UNFINISHED.search(path.read_text())]
    assert not found, "\n".join(found)


def test_every_module_function_and_class_in_the_package_says_what_it_is():
    """Public ones; ruff checks the style, this checks modules that ruff's rules let through."""
    silent = [where(path) for path in python_files("verifier") if not ast.get_docstring(tree_of(path))]
    assert not silent, "\n".join(silent)


def test_broad_except_only_in_the_named_frames():
    found = set()
    for path in python_files():
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                broad = isinstance(node, ast.ExceptHandler) and (
                    node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
                )
                if broad:
                    found.add((where(path), function.name))
    assert found == BROAD_EXCEPT


def test_no_pickle_in_the_package():
    found = [
        where(path, line)
        for path in python_files("verifier")
        for module, line in imports_of(path)
        if module.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    ]
    assert not found, "\n".join(found)


def skips_of_fixtures(tree: ast.Module) -> set[int]:
    """Every `pytest.skip("what is missing")` in a fixture."""
    return {
        id(node.func)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and any("fixture" in ast.unparse(d) for d in function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip" and node.args
    }


def test_no_skip_without_a_marker_and_a_reason():
    """A skip is declared above the test, or made by a fixture that asked the machine; it says what is missing."""
    found = []
    for path in python_files("tests"):
        tree = tree_of(path)
        in_fixtures = skips_of_fixtures(tree)
        reasoned = {
            id(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and any(keyword.arg == "reason" for keyword in node.keywords)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            marked = (node.attr == "skipif" and id(node) in reasoned) or id(node) in in_fixtures
            if node.attr in {"skip", "skipif", "xfail", "importorskip"} and not marked:
                found.append(f"{where(path, node.lineno)}: {node.attr}")
    assert not found, "\n".join(found)


def test_top_level_holds_the_named_entries_only():
    named = {"pyproject.toml", "verifier", "golden", "tests", "conftest.py", "ci", "docs", "configs"}
    named |= {"README.md", "CHANGELOG.md", "changelog.d", "LICENSE"}
    found = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in found if not name.startswith(".")} <= named
