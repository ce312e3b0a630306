"""A core without torch judges recorded traces as the whole environment does, to the byte."""

import json
import subprocess
import sys

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from tests.snapshots.check_traces import BROKEN, clean
from tests.unit.report.test_live_and_replayed import stored
from verifier.report import render_json, render_text, report_of

pytestmark = pytest.mark.slow

JUDGE = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "megatron", "vllm", "ray", "transformers", "hypothesis", "pytest"}:
            raise ImportError(f"{name} is no part of the core")

sys.meta_path.insert(0, Refuse())
from pathlib import Path
import verifier.checks
from verifier.core import store
from verifier.report import render_json, render_text, report_of

for path in sys.argv[1:]:
    report = report_of(store.read(Path(path)), path)
    print(json.dumps([render_text(report), render_json(report), int(report.exit_code)]))
"""


def test_the_core_says_the_same(tmp_path):
    paths = [tmp_path / str(code) for code in (None, *BROKEN)]
    expected = []
    for path, evidence in zip(paths, [clean(), *BROKEN.values()], strict=True):
        report = report_of(stored(path, evidence), str(path))
        expected.append([render_text(report), render_json(report), int(report.exit_code)])
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, *map(str, paths)],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
