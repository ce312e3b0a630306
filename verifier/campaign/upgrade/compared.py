"""Two environments beside each other: packages, contracts, verdicts and failures that are not the same in both."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verifier.campaign.upgrade.environments import EnvironmentResult, Ran, looked_at, made
from verifier.core.finding import ExitCode
from verifier.core.outputs import printable
from verifier.errors import UsageError
from verifier.launch.failures import Place
from verifier.platform.provenance import host, this_code
from verifier.report.changed_results import VerdictChange, changed_verdicts
from verifier.report.progress import Progress, columns


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
