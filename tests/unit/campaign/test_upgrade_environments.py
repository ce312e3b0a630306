"""Where a command of the gate was ended, by its report and by what it said."""

import json
import sys

import pytest

from verifier.campaign import upgrade
from verifier.launch.failures import Place

REPORT = """
import json, sys
report = json.loads(sys.argv[1])
if report:
    open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(report))
print("verifier: it ended", file=sys.stderr)
sys.exit(3)
"""
STACK = {
    "code": "STK001", "verdict": "violated", "sentence": "STK001 stack-failed: x",
    "finding": {"first": {"what": "vllm/worker.py:7", "actual": "TypeError: no `size`"}},
}  # fmt: skip


def report(complete, failure, *outcomes):
    return {"outcomes": list(outcomes), "run": {"complete": complete, "failure": failure}}


@pytest.mark.parametrize(
    ("said", "place"),
    [
        (report(False, "long\ntext", STACK), Place(file="vllm/worker.py", line=7, message="TypeError: no `size`")),
        (report(False, "InternalError: a bug\n  more"), Place(message="InternalError: a bug")),
        ({}, Place(message="verifier: it ended")),
        (report(True, ""), None),
    ],
    ids=["stack", "ours", "no-report", "whole"],
)
def test_the_place_of_an_end(tmp_path, said, place):
    ran = upgrade._gate([sys.executable, "-c", REPORT, json.dumps(said)], tmp_path / "golden")
    assert ran.failure == place
    assert ran.exit_code == 3
