"""Clean runs in a verified set beside the default: `ci/with-env --set SET python -m tests.dist.clean_sets [NAME...]`.

Rows of the two clean tables: every family with a hand-written row, every run with a live vLLM, and training. Each must
hold with every check that it declares. All of them write golden/sets/SET.json; named ones are only run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist import train_clean_case
from tests.dist.clean_case import HYBRID, Case, cases
from tests.dist.clean_case import run as run_case
from tests.meta.sources import ROOT
from verifier.mesh import Mesh
from verifier.platform.provenance import DEFAULT_SET, SETS, installed, installed_versions, running_set
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner

LEDGERS = {name: ROOT / "golden" / "sets" / f"{name}.json" for name in SETS if name != DEFAULT_SET}
"""Verified set -> what its clean runs measured."""
RUNS = [case for case in cases() if case.engine == "vllm"]
RUNS += [Case(family=family, mesh=Mesh(ep=2, dp=2)) for family in ("deepseek-v3", HYBRID)]
TRAINING = (
    "sft", "sft dp2", "sft moe ep2", "grpo dp2", "live vllm dp2", "live vllm moe bf16 ep2", "live async",
    "live in flight, recomputed", "live in flight, kept",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Rows of both tables."""

    runs: list[dict[str, Any]]
    training: list[dict[str, Any]]


def measure(resources: Resources, folder: Path, named: list[str]) -> Found:
    """Run the rows in turn, one engine at a time; those that are named, or all."""
    found = Found(runs=[], training=[])
    for case in RUNS:
        if named and case.id not in named:
            continue
        found.runs.append(run_case(Runner(resources, print), case, folder / case.id).row())
        resources.stop_engines()
        print(json.dumps(found.runs[-1]), flush=True)
    for name in TRAINING:
        if named and name not in named:
            continue
        found.training.append(train_clean_case.run(resources, name, folder / name.replace(" ", "-")))
        resources.stop_engines()
        print(json.dumps(found.training[-1]), flush=True)
    return found


def commit_of_checkout() -> str:
    """Commit that is checked out; it ends in "-dirty" where files differ from it."""
    line = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def write(verified_set: str, found: Found, commit: str) -> None:
    """Replace the ledger of a set."""
    head = {
        "command": f"ci/with-env --set {verified_set} python -m tests.dist.clean_sets", "commit": commit,
        "versions": {**installed_versions(), "llguidance": installed("llguidance")},
    }  # fmt: skip
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, rows in (("runs", found.runs), ("training", found.training)):
        parts.append(f' "{key}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]")
    ledger = LEDGERS[verified_set]
    ledger.parent.mkdir(exist_ok=True)
    ledger.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(named: list[str]) -> None:
    """Measure in the environment that runs, which must be one of a set beside the default."""
    verified_set = running_set("cpu")
    if verified_set not in LEDGERS:
        sys.exit(f"run this by `ci/with-env --set SET`, SET being one of {', '.join(LEDGERS)}")
    unknown = set(named) - {case.id for case in RUNS} - set(TRAINING)
    if unknown:
        sys.exit(f"no such run: {', '.join(sorted(unknown))}")
    commit = commit_of_checkout()
    with tempfile.TemporaryDirectory() as folder, Resources(warm=True) as resources:
        found = measure(resources, Path(folder), named)
    if not named:
        write(verified_set, found, commit)


if __name__ == "__main__":
    main(sys.argv[1:])
