"""What `import verifier` gives, as docs/api.md has it: lazily, typed, without torch, and on Python 3.10 to 3.13."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import verifier
from tests.meta.sources import ROOT
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.errors import UsageError
from verifier.plan.digest import digest_tensors
from verifier.report import report_of

PAGE = (ROOT / "docs" / "api.md").read_text()
EXAMPLE = re.search(r"```python\n(import verifier\n.*?)```", PAGE, re.DOTALL)[1]
LOOP = ROOT / "tests" / "unit" / "probe" / "array_loop.py"
GOLDEN = ROOT / "tests" / "unit" / "core" / "golden-trace"
RECORDED = ROOT / "tests" / "unit" / "core" / "recorded"
LOOPS = [["HOLDS", 72, ""], ["VIOLATED", 72, "transport"]]
"""Verdict, things compared and first bad stage of the two loops of `array_loop.py`."""
HEAVY = ("torch", "transformers", "megatron", "vllm", "ray", "triton")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def output(*words, python=sys.executable, timeout=60, cwd=ROOT):
    done = subprocess.run(
        [python, *map(str, words)], capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without(packages, program):
    """A program for which some packages are not installed."""
    return f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n{program}"


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """The loops on arrays, recorded without torch, and what was printed of them."""
    folder = tmp_path_factory.mktemp("loops")
    program = f"sys.argv[1:] = ['.']\nimport runpy\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')"
    return folder, json.loads(output("-c", without(HEAVY, program), cwd=folder))


def test_the_page_example_prints_verdict_and_findings(loops, capsys):
    folder, _ = loops
    exec(EXAMPLE, {"path": folder / "moved"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "VIOLATED 72 things compared"
    assert lines[1].startswith("transport 2 `layers.0.weight` ")


def test_a_report_says_verdict_coverage_findings_and_first_bad_stage(loops):
    folder, _ = loops
    clean, moved = verifier.judge(folder / "clean"), verifier.judge(verifier.read(str(folder / "moved")))
    assert isinstance(moved, verifier.Report)
    assert (clean.verdict, clean.findings, clean.first_bad_stage) == (Verdict.HOLDS, [], None)
    assert (moved.verdict, moved.first_bad_stage) == (Verdict.VIOLATED, Stage.TRANSPORT)
    assert moved.coverage == sum(item.num_compared for item in moved.outcomes) > 0
    assert [item.first.version for item in moved.findings] == [2] * len(moved.findings)
    assert moved == report_of(store.read(folder / "moved"), str(folder / "moved"))


def test_a_loop_without_torch_is_recorded_as_with_it(loops):
    folder, printed = loops
    assert (printed["judged"], printed["loaded"]) == (LOOPS, [])
    tensors = {"transposed": torch.randn(5, 7).T, "bytes": torch.arange(9, dtype=torch.uint8), "empty": torch.empty(0)}
    assert digest_tensors(item.numpy() for item in tensors.values()) == digest_tensors(tensors.values())
    source = [item for item in verifier.read(folder / "clean").records if type(item).__name__ == "KeptWeights"]
    assert [item.version for item in source] == [1, 2]


WITH_MODEL = """
import verifier
try:
    verifier.probe.open("trace", model=".")
except verifier.UsageError as problem:
    print(problem)
"""


def test_a_checkpoint_without_torch_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = output("-c", without(HEAVY, WITH_MODEL), cwd=tmp_path)
    assert said == "the checkpoint `.` is read with torch, which is not installed: leave `model` out\n"


def test_an_open_loop_is_sealed_by_its_path_and_never_holds(tmp_path):
    with verifier.probe.open(tmp_path / "trace", world_size=2, rank=0):
        pass
    report = verifier.judge(tmp_path / "trace")
    assert (report.verdict, report.manifest.failure) == (Verdict.INCONCLUSIVE, "trainer rank 1 of 2 recorded nothing")


@pytest.mark.parametrize("ask", [verifier.read, verifier.judge])
def test_what_a_caller_can_mend_is_one_class_and_one_sentence(ask, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, str(tmp_path / "absent"), tmp_path / "file"):
        with pytest.raises(verifier.UsageError, match=r"^`.*` holds no trace: there is no manifest.json$"):
            ask(path)
    assert verifier.UsageError is UsageError


def test_names_are_loaded_when_they_are_used():
    program = "import sys, verifier; print(sorted(name for name in sys.modules if name.split('.')[0] in {found}))"
    assert output("-c", program.format(found={"verifier", "numpy", "msgspec"})) == "['verifier']\n"
    for name in verifier.__all__:
        assert getattr(verifier, name) is not None
        assert f"`verifier.{name}" in PAGE or name == "__version__"
    with pytest.raises(AttributeError, match="module `verifier` has no attribute `nothing`"):
        verifier.nothing  # noqa: B018


LIGHT = f"""
import contextlib, io, verifier
from verifier.cli.app import run

verifier.probe
with contextlib.redirect_stdout(io.StringIO()):
    for option in ("--json", "--junit", "--html"):
        run(["replay", {str(GOLDEN)!r}, option, "report"])
    run(["judge", {str(GOLDEN)!r}])
    run(["explain", "WGT004"])
found = (getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "verifier")
print("\\n".join(sorted(filter(None, found))))
"""
"""Prints the files of the package that reading, judging, recording and their commands load."""
MYPY = """[mypy]
python_version = 3.10
follow_imports = silent
ignore_missing_imports = True
follow_imports_for_stubs = True
[mypy-numpy.*,torch.*,transformers.*,megatron.*,vllm.*,ray.*,numba.*,triton.*,safetensors.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_what_judges_and_records_is_of_python_3_10(tmp_path):
    """Syntax, and names of the standard library, by mypy; the interpreters run it in the slow tier."""
    files = output("-c", without((*HEAVY, "numba"), LIGHT), cwd=tmp_path).splitlines()
    assert len(files) > 100
    (tmp_path / "mypy.ini").write_text(MYPY)
    told = output("-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *files, cwd=tmp_path)
    assert told == f"Success: no issues found in {len(files)} source files\n"


def interpreters():
    """Version -> interpreter of those on PATH, of pyenv and of uv."""
    home = Path.home()
    shared = os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local/share/uv/python")
    found = {}
    for version in PYTHONS:
        places = [*home.glob(f".pyenv/versions/{version}.*"), *Path(shared).glob(f"cpython-{version}.*")]
        named = [shutil.which(f"python{version}"), *(str(place / "bin/python") for place in places)]
        for name in filter(None, named):
            if version not in found and subprocess.run([name, "-V"], check=False).returncode == 0:
                found[version] = name
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(interpreters().keys() | {"{}.{}".format(*sys.version_info)}))
def test_an_interpreter_reads_judges_and_records(version, tmp_path):
    """Of 3.10 to 3.13 those that are on this machine, each with the requirements of ci/locks/core.in alone."""
    made = tmp_path / "environment"
    subprocess.run([interpreters().get(version, sys.executable), "-m", "venv", made], check=True, timeout=120)
    python = made / "bin" / "python"
    requirements = ROOT / "ci" / "locks" / "core.in"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True, timeout=600)
    traces = [tmp_path / name for name in ("step", "export", "roundtrip")]
    for trace in traces:
        with tarfile.open(RECORDED / f"{trace.name}.tar.xz") as archive:
            archive.extractall(trace, filter="data")
    printed = json.loads(output(LOOP, tmp_path / "loops", *traces, python=python, timeout=300))
    here = [[report.verdict.name, report.coverage, ""] for report in map(verifier.judge, traces)]
    assert printed == {"python": version, "judged": [*LOOPS, *here], "loaded": []}
    command = "import sys; from verifier.cli.app import main; main(sys.argv[1:])"
    said = output("-c", command, "judge", tmp_path / "loops" / "clean", python=python)
    assert said.splitlines()[-1].startswith("holds: ")
    print(f"ran on Python {version}")
