"""Checks and kinds of records of another package: docs/api.md's, installed in a folder of its own.

Each case is a process of its own, which has the package on its path or not.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
MODULE = re.search(r"The module declares.*?```python\n(.*?)```", PAGE, re.S)[1]
EMITTED = re.search(r"The loop records them.*?```python\n(.*?)```", PAGE, re.S)[1]
DECLARED = re.search(r"```toml\n(.*?)```", PAGE, re.S)[1]
KIND = "rollout/chat-templates"
BROKEN = {
    "absent module": (None, "ModuleNotFoundError: No module named 'mylab_checks'"),
    "error": ("import math\nmath.nothing\n", "AttributeError: module 'math' has no attribute 'nothing'"),
    "exit": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "code of ours": (MODULE.replace("LAB001", "WGT004"), "check code WGT004 is taken by `export-differs-from-source`"),
    "code twice": (MODULE + MODULE[MODULE.index("@check") :], "check code LAB001 is taken by `chat-template-differs`"),
    "kind of ours": (MODULE.replace(KIND, "export/tensor"), "`export/tensor` of `ChatTemplates` is taken"),
    "no stage": (MODULE.replace(KIND, "templates"), "`templates` of `ChatTemplates` is no stage/kind"),
}  # fmt: skip
"""Case -> contents of the module, and what the refusal says."""


@pytest.fixture
def package(tmp_path):
    """Folder of the installed package."""
    return installed(tmp_path / "site", MODULE)


def installed(folder, module, version="1.2"):
    folder.mkdir()
    if module is not None:
        (folder / "mylab_checks.py").write_text(module)
    made = folder / f"mylab_checks-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mylab-checks\nVersion: {version}\n")
    (made / "entry_points.txt").write_text(DECLARED.replace("[project.entry-points.", "[").replace('"', ""))
    return folder


def python(program, *path, cwd, code=0):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=cwd, check=False,
        env={"PYTHONPATH": ":".join(map(str, (ROOT, *path))), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def trace(package, tmp_path):
    """A loop that records the kind for two versions; in the second the templates differ."""
    same = EMITTED.replace("77a1", "9f3c")
    loop = ["from verifier import probe", "from mylab_checks import ChatTemplates", "record = probe.open('trace')"]
    loop += ["step = 1", same, "step = 2", EMITTED, "record.close()"]
    python("\n".join(loop), package, cwd=tmp_path)
    return tmp_path / "trace"


JUDGE = """
import json, verifier
report = verifier.judge("trace")
kinds = [type(item).__name__ for item in verifier.read("trace").records]
print(json.dumps([report.verdict.name, kinds, [item.code for item in report.outcomes], report.not_judged]))
"""


def test_with_the_package_its_records_are_typed_and_its_checks_judge(package, trace, tmp_path):
    verdict, kinds, codes, gaps = json.loads(python(JUDGE, package, cwd=tmp_path).stdout)
    assert (verdict, kinds, codes, gaps) == ("VIOLATED", ["ChatTemplates"] * 2, ["LAB001"], [])
    said = python("from verifier.cli.app import main; main(['judge', 'trace'])", package, cwd=tmp_path, code=1).stdout
    assert "the chat template is 9f3c (the sampler's), it should be 77a1 (the trainer's)" in said
    assert "first bad stage: rollout, version 2" in said
    page = python("from verifier.cli.app import main; main(['explain', 'LAB001'])", package, cwd=tmp_path).stdout
    assert page.startswith("LAB001 chat-template-differs")


def test_without_it_they_are_kept_and_the_verdict_names_what_was_not_judged(trace, tmp_path):
    verdict, kinds, codes, gaps = json.loads(python(JUDGE, cwd=tmp_path).stdout)
    assert (verdict, kinds, codes) == ("INCONCLUSIVE", [], [])
    assert gaps == [
        "not judged: the checks of mylab-checks 1.2, not installed here",
        "not judged: records of kinds that are not known here: 2 rollout/chat-templates",
    ]
    said = python("from verifier.cli.app import main; main(['judge', 'trace'])", cwd=tmp_path, code=2).stdout
    assert all(gap in said for gap in gaps)
    kept = "import verifier; print([(item.version, item.fields['trainer']) for item in verifier.read('trace').unknown])"
    assert python(kept, cwd=tmp_path).stdout == "[(1, '9f3c'), (2, '77a1')]\n"


@pytest.mark.slow
def test_the_gate_and_the_judge_of_a_training_run_load_it(package, trace, tmp_path):
    step = "from verifier.cli.train import judge_step; print(judge_step('trace').mismatched)"
    assert python(step, package, cwd=tmp_path).stdout == "frozenset({'LAB001'})\n"
    for module in ("verifier.campaign.gate.cell_runs", "verifier.campaign.gate.run"):
        registry = f"import {module}; from verifier.core.check import REGISTRY; print('LAB001' in REGISTRY)"
        assert python(registry, package, cwd=tmp_path).stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_one_that_cannot_be_loaded_is_one_sentence_and_exit_code_4(case, tmp_path, trace):
    module, sentence = BROKEN[case]
    package = installed(tmp_path / "broken", module)
    done = python("from verifier.cli.app import main; main(['judge', 'trace'])", package, cwd=tmp_path, code=4)
    assert done.stdout == ""
    assert done.stderr.startswith("verifier: the plugin `mylab-checks` cannot be loaded, module `mylab_checks`: ")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


REFUSED = """
import verifier
from verifier.cli.train import started_judge
from verifier.core.check import REGISTRY

def train():
    with started_judge():
        raise AssertionError("a step would have been trained")

def judge():
    verifier.judge("trace")

for attempt in (judge, lambda: verifier.read("trace"), train, judge):
    try:
        attempt()
    except verifier.UsageError as problem:
        print("WGT004 is taken" in str(problem), "LAB000" in REGISTRY)
"""


def test_what_it_registered_before_it_broke_goes_and_no_run_begins(tmp_path, trace):
    before = MODULE[MODULE.index("@check") :].replace("LAB001", "LAB000")
    broken = MODULE[: MODULE.index("@check")] + before + MODULE[MODULE.index("@check") :].replace("LAB001", "WGT004")
    package = installed(tmp_path / "broken", broken)
    assert python(REFUSED, package, cwd=tmp_path).stdout == "True False\n" * 4
    gate = "from verifier.cli.app import main; main(['gate', '--model', 'tiny:qwen3', '--dry-run'])"
    assert "the plugin `mylab-checks` cannot be loaded" in python(gate, package, cwd=tmp_path, code=4).stderr
