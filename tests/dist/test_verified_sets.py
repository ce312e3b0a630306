"""Each verified set beside the default, in the environment of its own lock list: contracts, a round trip, clean runs.

`ci/with-env --set SET` makes the environment, about a minute and 7 GB where its packages are cached. What this does not
exercise: GPUs, where the default set alone is verified.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.dist.clean_sets import LEDGERS
from tests.meta.sources import ROOT
from verifier.contracts import table
from verifier.platform.provenance import pinned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.parametrize("verified_set", LEDGERS)]


def run_in(verified_set: str, *command: str) -> subprocess.CompletedProcess[str]:
    line = [str(ROOT / "ci" / "with-env"), "--set", verified_set, *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=3500, check=False, cwd=ROOT)


def test_contracts_hold_but_those_that_the_table_states(verified_set):
    done = run_in(verified_set, "verifier", "doctor", "--contracts", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verified_set"], found["differs"]) == (verified_set, [])
    stated = {item.name for item in table.contracts_of("cpu") if verified_set in item.gone_in}
    assert {item["name"]: item["failure"] for item in found["contracts"] if not item["holds"]}.keys() == stated


def test_a_round_trip_holds_with_every_check(verified_set, tmp_path):
    words = ("--model", "tiny:qwen3-moe", "--ep", "2", "--dp", "2", "--cycles", "2")
    done = run_in(verified_set, "verifier", "roundtrip", *words, "--trace", str(tmp_path / "trace"), "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {item["verdict"] for item in report["outcomes"]} == {"holds"}
    assert len(report["outcomes"]) > 35
    manifest = report["run"]
    assert (manifest["verified_set"], manifest["verified"], manifest["moved_contracts"]) == (verified_set, {}, [])
    assert manifest["versions"].items() <= pinned(verified_set).items()


def test_clean_runs_raise_no_alarm(verified_set):
    """Writes the ledger, from which `python -m tests.dist.clean_table` draws the tables of docs/measurements.md."""
    done = run_in(verified_set, "python", "-m", "tests.dist.clean_sets")
    assert done.returncode == 0, done.stdout + done.stderr
