"""What tests of other people's trainers share: launches of recorded loops, and what their reports are to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

FOLDERS = [str(ROOT / "docs" / "examples"), str(Path(__file__).parent)]
Loops = Mapping[str, tuple[int, dict[str, Any]]]
"""Name -> number of processes, settings."""
Ran = Callable[[str], Report]


def run(
    script: str, checkpoint: Path, folder: Path, loops: Loops, *before: str,
    apart: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> None:  # fmt: skip
    """Run loops by a script of bugs, those of a number of processes in one launch; others apart by what settings say.

    The script gets `before`, the checkpoint, a folder for a trace of each name, all settings in JSON, and names.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *FOLDERS, *sys.path])
    settings = json.dumps({name: given for name, (_, given) in loops.items()})
    launches: dict[tuple[int, Any], list[str]] = {}
    for name, (size, given) in loops.items():
        launches.setdefault((size, apart(given)), []).append(name)
    for (size, _), names in launches.items():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
        told = [str(Path(__file__).with_name(script)), *before, str(checkpoint), str(folder), settings]
        subprocess.run([*launch, *told, *names], env=environment, check=True)


def report(trace: Path, checkpoint: Path, oracle: Oracle) -> Report:
    """Report of a recorded loop, with the oracle."""
    add_oracle(trace, checkpoint, oracle)
    return report_of(read(trace), "trace")


def holds(found: Report, codes: set[str]) -> None:
    """A right loop: these checks judge it, and hold."""
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert not found.not_judged
    assert {item.code for item in found.outcomes} == codes


def caught(found: Report, stage: Stage, code: str) -> None:
    """A loop with a bug: the first bad stage is this one, and a check sees it there."""
    assert found.violated, render_text(found)
    first = found.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(found)
    assert code in [item.code for item in found.violated]
    assert not [item.code for item in found.outcomes if item.error]
