"""The text of a report: one template, one order, plain ASCII; colour is never needed to read it."""

from __future__ import annotations

import re

import msgspec

from verifier.core.comparison import Comparison
from verifier.core.finding import Finding, Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.outputs import printable
from verifier.knob import flat
from verifier.mesh import Mesh
from verifier.report.report import Report, explanation, stack_lines, why_it_ended

MAX_FINDINGS = 20
"""Findings in one text; the number left out is stated, and JSON holds all."""
_DIGEST = re.compile(r"\b([a-z][a-z0-9]*:[0-9a-f]{6})[0-9a-f]{2,}\b")
_LABELS = {Verdict.HOLDS: "holds", Verdict.INCONCLUSIVE: "INCONCLUSIVE", Verdict.VIOLATED: "VIOLATED"}
_CONFIG_KEYS = {
    "dtype": "dtype", "engine": "engine.kind", "engine_tp": "engine.tp", "cycles": "cycles", "update": "update",
    "seed": "seed", "against": "against",
}  # fmt: skip
"""Label in the header -> key of the config."""


def render_text(report: Report) -> str:
    """The whole report: identity, one line per check, a block per check that does not hold, the verdict."""
    parts = [_identity(report.manifest), _table(report)]
    not_holding = [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
    not_holding.sort(key=_cause_first)
    parts += [render_outcome(item, report.trace, report.manifest) for item in not_holding[:MAX_FINDINGS]]
    if len(not_holding) > MAX_FINDINGS:
        parts.append(f"{len(not_holding) - MAX_FINDINGS} more findings are left out here; `--json` holds all")
    parts.append(_conclusion(report))
    return "\n\n".join(part for part in parts if part) + "\n"


def _cause_first(outcome: Outcome) -> tuple[bool, tuple[int, bool, int], str]:
    """Violations in the order in which data met them, so that a cause stands before its consequences."""
    if outcome.finding is None:
        return True, (0, False, 0), outcome.code
    return False, outcome.finding.first.place, outcome.code


def first_line(outcome: Outcome) -> str:
    """The line that has to survive alone: JUnit message, annotation, the first line of the block."""
    return printable(f"{outcome.code} {outcome.name}: {_sentence(outcome)}")


def render_outcome(outcome: Outcome, trace: str, manifest: Manifest) -> str:
    """The block of one outcome, in the fixed order of lines; lines that do not apply are left out."""
    only, fields, hint = "", [], ""
    if finding := outcome.finding:
        first = finding.first
        only = "" if " " in first.what else f" --only {first.what}"
        hint = explanation(outcome, manifest) or first.hint
        fields = [
            ("where", f"{finding.first_bad_stage.label}, version {first.version}, `{first.what}`"),
            ("owner", first.owner),
            ("expected", _cut(first.expected)),
            ("actual", _cut(first.actual)),
            ("mismatched", first.mismatched),
            ("allowed", first.allowed),
            ("spread", _spread(finding)),
        ]
    fields.append(("coverage", _coverage(outcome)))
    fields.append(("replay", f"`verifier replay {trace} --check {outcome.code}{only}`"))
    lines = [first_line(outcome), *(printable(f"  {name:<10}: {value}") for name, value in fields if value)]
    return "\n".join([*lines, "", printable(f"  hint: {hint}")] if hint else lines)


def _sentence(outcome: Outcome) -> str:
    if outcome.finding is not None:
        first = outcome.finding.first
        sentence = _cut(first.sentence) or f"`{first.what}` is not what was expected"
        count = outcome.finding.count
        return sentence + (f" (the first of {count:,})" if count > 1 else "")
    if outcome.error is not None:
        return f"inconclusive, the check itself broke: {outcome.error}"
    if outcome.not_recorded:
        return f"inconclusive, the run recorded no {', no '.join(outcome.not_recorded)}"
    if not outcome.num_compared:
        return "inconclusive, there was nothing to compare"
    return f"holds, {outcome.num_compared:,} compared"


def _spread(finding: Finding) -> str:
    if finding.count == 1:
        return ""
    roles: dict[int, tuple[list[str], Comparison]] = {}
    for role, item in (("first", finding.first), ("worst", finding.worst), ("last", finding.last)):
        roles.setdefault(id(item), ([], item))[0].append(role)
    shown = [f"{' and '.join(names)} `{item.what}` in version {item.version}" for names, item in roles.values()]
    left = finding.count - len(shown)
    return ", ".join(shown) + (f"; {left:,} more of the same kind" if left else "")


def _coverage(outcome: Outcome) -> str:
    text = f"compared {outcome.num_compared:,}"
    if outcome.not_recorded:
        text += f"; not recorded: {', '.join(outcome.not_recorded)}"
    if outcome.error is not None and outcome.finding is not None:
        text += f"; then the check itself broke: {outcome.error}"
    return text


def _cut(text: str) -> str:
    """Digests cut to six digits; JSON keeps them whole."""
    return _DIGEST.sub(r"\1", text)


def _in_one_line(failure: str) -> str:
    """The first line, and the last where the first announces what follows: a traceback ends in its error."""
    lines = failure.strip().splitlines() or [""]
    return f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def _identity(manifest: Manifest) -> str:
    config = manifest.config
    lines = [f"verifier {manifest.command} {config.get('model', '')}".rstrip()]
    if manifest.mesh is not None:
        mesh = Mesh(**msgspec.structs.asdict(manifest.mesh))
        lines[0] += f" on {mesh.label()}"
        if mesh.world_size > 1:
            gpus = manifest.num_gpus
            shared = f" on {gpus} {'GPU' if gpus == 1 else 'GPUs'}" if 0 < gpus < manifest.world_size else ""
            lines[0] += f" ({mesh.world_size} ranks{shared})"
    stated = [f"tier {manifest.tier}"] if manifest.tier else []
    knobs = flat(config)
    stated += [f"{label} {knobs[key]}" for label, key in _CONFIG_KEYS.items() if knobs.get(key) is not None]
    if stated:
        lines.append("  " + ", ".join(stated))
    if manifest.versions:
        lines.append("  " + ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())))
    lines += (f"  {name}: {value}" for name, value in stack_lines(manifest))
    return "\n".join(map(printable, lines))


def _table(report: Report) -> str:
    wide = max((len(item.name) for item in report.outcomes), default=0)
    lines = [
        f"  {_LABELS[item.verdict]:<12}  {item.code}  {item.name:<{wide}}  {item.num_compared:>9,} compared"
        for item in report.outcomes
    ]
    left_out = {"switched off": report.switched_off, "no subject in this run": report.out_of_scope}
    left_out |= {f"nothing to compare with for {item.code}": item.left_out for item in report.outcomes}
    return "\n".join([*lines, *(f"  {why}: {', '.join(codes)}" for why, codes in left_out.items() if codes)])


def _conclusion(report: Report) -> str:
    counts = {verdict: sum(item.verdict is verdict for item in report.outcomes) for verdict in Verdict}
    total = len(report.outcomes)
    unsure = f"{counts[Verdict.INCONCLUSIVE]} could not tell" if counts[Verdict.INCONCLUSIVE] else ""
    if report.verdict is Verdict.HOLDS:
        said = [f"holds: {total} of {total} checks hold"]
    elif report.verdict is Verdict.VIOLATED:
        first = min(report.outcomes, key=_cause_first).finding
        assert first is not None
        where = f"first bad stage: {first.first_bad_stage.label}, version {first.first.version}"
        said = [f"violated: {counts[Verdict.VIOLATED]} of {total} checks are violated", where, unsure]
    else:
        said = [f"inconclusive: {counts[Verdict.HOLDS]} of {total} checks hold", unsure]
    if not report.manifest.complete:
        failure = _in_one_line(report.manifest.failure)
        said.append("the run did not finish" + (f" ({failure})" if failure else ""))
        said.append(why_it_ended(report.manifest))
    said += [f"{sum(item.num_compared for item in report.outcomes):,} things compared", f"trace in `{report.trace}`"]
    return printable("; ".join(part for part in said if part))
