"""The report: run identity, outcomes, what was left out, the bugs that explain it. A pure function of a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import msgspec

from verifier.core.check import REGISTRY, Check, run_check
from verifier.core.finding import ExitCode, Finding, Outcome, Verdict, verdict_of
from verifier.core.manifest import Manifest, UpstreamBug
from verifier.core.plugins import LOADED
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.load.records import StackFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of the checks on a trace; `verifier.judge` makes one.

    Example:
        >>> report = verifier.judge("traces/my-loop")  # doctest: +SKIP
        >>> report.verdict, report.coverage, report.first_bad_stage  # doctest: +SKIP
        (<Verdict.VIOLATED: 2>, 1204, <Stage.EXPORT: 10>)
        >>> [item.first.sentence for item in report.findings]  # doctest: +SKIP
    """

    trace: str
    """Path of the trace as the user would type it."""
    manifest: Manifest = field(default_factory=Manifest)
    outcomes: tuple[Outcome, ...] = ()
    switched_off: tuple[str, ...] = ()
    """Codes of checks that judge such a run and that were not run."""
    out_of_scope: Mapping[str, str] = field(default_factory=dict)
    """Code -> clause of each check that does not judge such a run."""
    gaps: tuple[str, ...] = ()
    """Clauses on what checks have no means to judge in this run."""
    ended_in: str = ""
    """Label of the stage in which the stack under test ended the run, if it did."""
    unreached: tuple[str, ...] = ()
    """Codes of checks that could not be judged because of that; they have no outcome."""

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Clauses on what was not judged: what no check can judge, and what the run did not come to."""
        num = len(self.unreached)
        ended = f"{num} {'check was' if num == 1 else 'checks were'} not judged: the run ended in stage {self.ended_in}"
        return (*self.gaps, ended) if num else self.gaps

    @property
    def verdict(self) -> Verdict:
        """The dominant verdict. A run that did not finish is never more than inconclusive when nothing is violated."""
        found = verdict_of(self.outcomes)
        return found if self.manifest.complete else max(found, Verdict.INCONCLUSIVE)

    @property
    def coverage(self) -> int:
        """Number of things that were compared, over all checks; a check's own is `num_compared` of its outcome."""
        return sum(item.num_compared for item in self.outcomes)

    @property
    def findings(self) -> list[Finding]:
        """Finding of each violated check, in the order in which data met it."""
        return [item.finding for item in self.violated if item.finding is not None]

    @property
    def first_bad_stage(self) -> Stage | None:
        """Stage where data first went wrong; None where nothing is violated."""
        return self.findings[0].first_bad_stage if self.findings else None

    @property
    def widened(self) -> tuple[str, ...]:
        """Names, each with its dtypes, of what an engine holds in a wider dtype with the same values."""
        return tuple(dict.fromkeys(name for item in self.outcomes for name in item.widened))

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command."""
        return self.verdict.exit_code

    @property
    def violated(self) -> list[Outcome]:
        """Violations in the order in which data met them, so that a cause stands before its consequences."""
        bad = [item for item in self.outcomes if item.verdict is Verdict.VIOLATED and item.finding is not None]
        return sorted(bad, key=lambda item: (_place(item), item.code))

    @property
    def roots(self) -> list[Outcome]:
        """Violations where data first went wrong."""
        return [item for item in self.violated if _place(item) == _place(self.violated[0])]

    @property
    def later(self) -> list[Outcome]:
        """Violations in later stages or versions, so perhaps consequences."""
        return [item for item in self.violated if _place(item) != _place(self.violated[0])]

    @property
    def suspected(self) -> dict[str, str]:
        """Code -> sentence of each check that is suspected, if nothing else stands against the trace; else empty."""
        bad = [item for item in self.outcomes if item.verdict is not Verdict.HOLDS]
        if self.unreached or not self.manifest.complete or not all(item.suspected for item in bad):
            return {}
        return {item.code: f"{item.code} {item.name}: {excess(item)}" for item in bad}

    @property
    def compared_nothing(self) -> bool:
        """True if checks ran, had what they need, and none of them compared anything."""
        ran = [item for item in self.outcomes if item.error is None and not item.not_recorded]
        return bool(ran) and not any(item.num_compared for item in self.outcomes)

    @property
    def resembles(self) -> tuple[KnownFault, ...]:
        """Faults of such runs that violate the same checks, first in the same stage; none of a run not judged whole."""
        if (stage := self.first_bad_stage) is None or self.switched_off or not self.manifest.complete:
            return ()
        facts = self.manifest.facts
        has = {name for name, there in (("adapters", facts.frozen_base), ("experts", facts.expert_stages)) if there}
        return resembling([item.code for item in self.violated], stage.label, has)


def _place(outcome: Outcome) -> tuple[int, ...]:
    return () if outcome.finding is None else tuple(outcome.finding.first.place)


def report_of(
    trace: Trace,
    path: str,
    *,
    checks: Mapping[str, Check] = REGISTRY,
    only_codes: Sequence[str] = (),
    only_names: str = "",
) -> Report:
    """Run the checks that say they judge the run of a trace, of the whole registry outside of tests.

    `path` is where the trace is stored, for the line that tells how to replay. `only_codes` are run whatever they say,
    and the rest is reported as switched off; `only_names` keeps comparisons whose subject contains this text.
    """
    run = trace.manifest
    refusals = {code: item.applies(run) for code, item in sorted(checks.items())}
    scoped = [checks[code] for code, refusal in refusals.items() if refusal is None]
    chosen = [item for code, item in sorted(checks.items()) if code in only_codes] if only_codes else scoped
    outcomes = [run_check(_restricted(item, only_names), trace) for item in chosen]
    ended_in = next((item.at for item in trace.of(StackFailure) if item.message), "")
    unreached = [item.code for item in outcomes if ended_in and item.verdict is Verdict.INCONCLUSIVE and not item.error]
    chosen_codes = {item.code for item in chosen}
    return Report(
        trace=path,
        manifest=trace.manifest,
        outcomes=tuple(item for item in outcomes if item.code not in unreached),
        switched_off=tuple(item.code for item in scoped if item not in chosen),
        out_of_scope={code: why.why for code, why in refusals.items() if why and why.why and code not in chosen_codes},
        gaps=(
            *_gaps([item for item in checks.values() if item in scoped or item not in chosen], run),
            *_not_loaded(trace),
        ),
        ended_in=ended_in,
        unreached=tuple(unreached),
    )


def _gaps(checks: Sequence[Check], run: Manifest) -> Iterator[str]:
    codes: dict[str, list[str]] = {}
    for item in sorted(checks, key=lambda item: item.code):
        if clause := item.gap(run):
            codes.setdefault(clause, []).append(item.code)
    for clause, own in codes.items():
        yield f"not judged: {', '.join(own)} ({clause})"


def _not_loaded(trace: Trace) -> Iterator[str]:
    """Clauses on plugins of the run that are not installed here, and on records that nothing here declares."""
    gone = [f"{name} {version}" for name, version in sorted(trace.manifest.plugins.items()) if name not in LOADED]
    if gone:
        yield f"not judged: the checks of {', '.join(gone)}, not installed here"
    if kinds := Counter(item.kind for item in trace.unknown):
        counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        yield f"not judged: records of kinds that are not known here: {counted}"


def _restricted(item: Check, names: str) -> Check:
    return replace(item, fn=lambda trace: (found for found in item.fn(trace) if names in found.what))


def excess(outcome: Outcome) -> str:
    """Say how far a suspected check is beyond its bound, and where most."""
    assert outcome.finding is not None
    worst = outcome.finding.worst
    return f"{worst.share:.3g} times its bound, `{worst.what}` in version {worst.version}"


def stack_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and value of each line on what replaced upstream code; none for a trace that does not say."""
    lines = [("stands in", ", ".join(manifest.stand_ins))] if manifest.stand_ins else []
    if manifest.upstream_bugs is not None:
        on = ", ".join(bug.id for bug in manifest.upstream_bugs if bug.fixed)
        left = ", ".join(bug.issue for bug in manifest.upstream_bugs if not bug.fixed)
        if on:
            lines.append(("fixes on", on + (f"; not fixed: {left}" if left else "")))
        else:
            lines.append(("as shipped; known upstream bugs that apply", left or "none"))
    return lines


def explanation(outcome: Outcome, manifest: Manifest) -> str:
    """The bugs that are not fixed, violate this check, and reach all that it found between them; empty if none do."""
    if outcome.finding is None:
        return ""
    names = {item.what for item in outcome.finding.bad or (outcome.finding.first,)}
    bugs = [bug for bug in manifest.upstream_bugs or () if not bug.fixed and outcome.code in bug.checks]
    reached = {bug.id: {name for name in names if re.fullmatch(bug.names, name)} for bug in bugs}
    if names - set().union(*reached.values()):
        return ""
    return _advice([bug for bug in bugs if reached[bug.id]])


def why_it_ended(manifest: Manifest) -> str:
    """The bug, if any, that is not fixed and ends a run as this one ended."""
    for bug in manifest.upstream_bugs or ():
        if not bug.fixed and not bug.checks and re.search(bug.names, manifest.failure):
            return _advice([bug])
    return ""


def _advice(bugs: Sequence[UpstreamBug]) -> str:
    issues, options = ", ".join(bug.issue for bug in bugs), " --fix ".join(bug.id for bug in bugs)
    return f"{issues}; run again with `--fix {options}` to see what is left"


MAX_NAMED = 3
"""Faults that the text names; the number of others is stated, and JSON holds all."""


class KnownFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks that the last trial of a re-enacted bug violated."""

    fault: str
    reproduces: str
    """Repository and issue of the bug that shipped."""
    link: str
    """Address of the issue; empty where the source is a commit or a file."""
    first_bad: str
    """Label of the first bad stage."""
    caught: tuple[str, ...]
    """Codes of the checks that it violated, sorted."""
    needs: tuple[str, ...] = ()
    """Parts of a run that such a bug sits in: "adapters", "experts"."""


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Read the table, ordered by id."""
    text = files("verifier.report").joinpath("known_faults.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[KnownFault, ...])


def resembling(violated: Collection[str], first_bad: str, has: Collection[str]) -> tuple[KnownFault, ...]:
    """Look up the faults whose last trial violated exactly these checks, first in this stage, of what a run `has`."""
    found = (tuple(sorted(violated)), first_bad)
    return tuple(item for item in known_faults() if (item.caught, item.first_bad) == found and {*item.needs} <= {*has})


def named(faults: Sequence[KnownFault]) -> str:
    """Return the first faults with their issues, and how many more there are."""
    shown = [f"`{item.fault}` ({item.link or item.reproduces})" for item in faults[:MAX_NAMED]]
    left = len(faults) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")
