"""The text of a report: one template, one order, plain ASCII; colour is never needed to read it."""

from __future__ import annotations

import enum
import os
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any, TextIO

import msgspec

from verifier.core.comparison import Comparison
from verifier.core.finding import Finding, Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.outputs import printable
from verifier.knob import flat
from verifier.mesh import Mesh
from verifier.report.report import Report, excess, explanation, named, stack_lines, why_it_ended

MAX_FINDINGS = 20
"""Findings in one text; the number left out is stated, and JSON holds all."""
_DIGEST = re.compile(r"\b([a-z][a-z0-9]*:[0-9a-f]{6})[0-9a-f]{2,}\b")
_LABELS = {Verdict.HOLDS: "holds", Verdict.INCONCLUSIVE: "INCONCLUSIVE", Verdict.VIOLATED: "VIOLATED"}
_LEGEND = "vd1: 6 of the 32 digits of a digest of a tensor's bytes; equal digests, equal bits"


class Detail(enum.IntEnum):
    """Length of a report on a terminal or in a file of text."""

    ANSWER = 0
    """The verdict and the cause alone."""
    USUAL = 1
    """The findings where data first went wrong whole, and a line for each later one."""
    WHOLE = 2
    """Every finding whole."""


def render_text(report: Report, detail: Detail = Detail.USUAL) -> str:
    """The report: identity, one line per check, what went wrong first, what came of it, the verdict, the cause."""
    if detail is Detail.ANSWER:
        return _answer(report) + "\n"
    roots, later = report.roots, report.later
    if detail is Detail.WHOLE:
        roots, later = [*roots, *later], []
    parts = [_broke(report), header(report.manifest), _table(report)]
    parts += [render_outcome(item, report.trace, report.manifest) for item in roots[:MAX_FINDINGS]]
    if len(roots) > MAX_FINDINGS:
        parts.append(f"{len(roots) - MAX_FINDINGS} more findings are left out here; `--json` holds all")
    if later:
        lines = ["after it in the flow of data, so perhaps its consequences (`-v` shows each whole):"]
        parts.append("\n".join([*lines, *(f"  {first_line(item)}" for item in later)]))
    parts.append(_not_judged(report))
    if any("vd1:" in part for part in parts):
        parts.append(_LEGEND)
    parts.append(_answer(report))
    return "\n\n".join(part for part in parts if part) + "\n"


def _not_judged(report: Report) -> str:
    unsure = [item for item in report.outcomes if item.verdict is Verdict.INCONCLUSIVE]
    said = "; ".join(f"{item.code} ({_why_unsure(item)})" for item in unsure)
    lines = [*report.not_judged[-1:]] if report.unreached else []
    return "\n".join(map(printable, [*lines, *([f"not judged: {said}"] if unsure else [])]))


def _broke(report: Report) -> str:
    manifest = report.manifest
    if manifest.complete or not manifest.failure:
        return ""
    bug = why_it_ended(manifest)
    return printable(f"the run broke: {_in_one_line(manifest.failure)}" + (f"; {bug}" if bug else ""))


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
            ("owner", located(first.owner, manifest)),
            ("expected", _cut(first.expected)),
            ("actual", _cut(first.actual)),
            ("mismatched", first.mismatched),
            ("allowed", first.allowed),
            ("spread", _spread(finding)),
            ("kinds", grouped(names) if len(names := {item.what for item in finding.bad}) > 1 else ""),
        ]
    if outcome.suspected:
        fields.append(("suspected", f"{excess(outcome)}: judge another step before you trust it"))
    fields.append(("coverage", _coverage(outcome)))
    fields.append(("replay", f"`verifier replay {trace} --check {outcome.code}{only}`"))
    lines = [first_line(outcome), *(printable(f"  {name:<10}: {value}") for name, value in fields if value)]
    return "\n".join([*lines, "", printable(f"  hint: {hint}")] if hint else lines)


def _sentence(outcome: Outcome) -> str:
    if outcome.finding is not None and outcome.verdict is Verdict.VIOLATED:
        first = outcome.finding.first
        sentence = _cut(first.sentence) or f"`{first.what}` is not what was expected"
        count = outcome.finding.count
        return sentence + (f" (the first of {count:,})" if count > 1 else "")
    if outcome.verdict is Verdict.INCONCLUSIVE:
        return f"inconclusive, {_why_unsure(outcome)}"
    return f"holds, {outcome.num_compared:,} compared"


def _why_unsure(outcome: Outcome) -> str:
    if outcome.suspected:
        return f"suspected: {excess(outcome)} alone, later ones hold; judge another run before you trust it"
    if outcome.error is not None:
        return f"the check itself broke: {outcome.error}"
    if outcome.not_recorded:
        return f"the run recorded no {', no '.join(outcome.not_recorded)}"
    if outcome.moved:
        return f"it rests on what the installed versions do not keep: {', '.join(outcome.moved)}"
    return "there was nothing to compare"


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


def _table(report: Report) -> str:
    wide = max((len(item.name) for item in report.outcomes), default=0)
    lines = [
        f"  {_LABELS[item.verdict]:<12}  {item.code}  {item.name:<{wide}}  {item.num_compared:>9,} compared"
        for item in report.outcomes
    ]
    left_out = {"switched off": report.switched_off, "no subject in this run": report.out_of_scope}
    left_out |= {f"nothing to compare with for {item.code}": item.left_out for item in report.outcomes}
    if report.widened:
        first, *others = report.widened
        more = f" and {len(others):,} more" if others else ""
        lines.append(printable(f"  held in a wider dtype with the same values: {first}{more}"))
    return "\n".join([*lines, *(f"  {why}: {', '.join(codes)}" for why, codes in left_out.items() if codes)])


def _answer(report: Report) -> str:
    lines = [_conclusion(report)]
    if report.violated:
        if alike := report.resembles:
            lines.append(printable(f"resembles: {named(alike)}"))
        first = report.violated[0]
        assert first.finding is not None
        found = first.finding.first
        where = f"{first.finding.first_bad_stage.label}, version {found.version}, `{found.what}`"
        owner = located(found.owner, report.manifest)
        lines.append(printable(f"cause: {first.code} {first.name}: {where}" + (f", {owner}" if owner else "")))
    return "\n".join(lines)


def _conclusion(report: Report) -> str:
    counts = {verdict: sum(item.verdict is verdict for item in report.outcomes) for verdict in Verdict}
    total = len(report.outcomes) + len(report.unreached)
    unknown = counts[Verdict.INCONCLUSIVE] + len(report.unreached)
    unsure = f"{unknown} could not tell" if unknown else ""
    if report.verdict is Verdict.HOLDS:
        said = [f"holds: {total} of {total} checks hold"]
    elif report.verdict is Verdict.VIOLATED:
        first = report.violated[0].finding
        assert first is not None
        where = f"first bad stage: {first.first_bad_stage.label}, version {first.first.version}"
        said = [f"violated: {counts[Verdict.VIOLATED]} of {total} checks are violated", where, unsure]
    else:
        said = [f"inconclusive: {counts[Verdict.HOLDS]} of {total} checks hold", unsure]
    said += report.gaps
    if report.ended_in:
        said.append(f"the run ended in stage {report.ended_in}")
    elif not report.manifest.complete:
        failure = _in_one_line(report.manifest.failure)
        said.append("the run did not finish" + (f" ({failure})" if failure else ""))
        said.append(why_it_ended(report.manifest))
    said += [f"{report.coverage:,} things compared", f"trace in `{report.trace}`"]
    return printable("; ".join(part for part in said if part))


LEAST_WIDTH = 40
"""Narrower than that, lines are left alone."""
_LABEL = re.compile(r" *(?:[\w -]{1,10}: +)?")
"""Margin of a line and its label: what follows is folded to stand below itself."""
_WHOLE = re.compile(r" *(replay|command) *: ")
"""Lines to copy, which no break may cut."""
_COLOURS = {"VIOLATED": "31", "violated": "31", "INCONCLUSIVE": "33", "inconclusive": "33", "holds": "32", "cause": "1"}
_WORDS = re.compile(r"^( *)(" + "|".join(_COLOURS) + r")(?= {2}|:)", re.MULTILINE)


def for_terminal(text: str, stream: TextIO) -> str:
    """Fold and colour a report for a stream, if that is a terminal; NO_COLOR (no-color.org) leaves the colours out."""
    if not stream.isatty():
        return text
    text = folded(text, shutil.get_terminal_size().columns)
    return text if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else coloured(text)


def folded(text: str, width: int) -> str:
    """Fold every line at a width, in columns, between words; what is longer than a line stays whole."""
    if width < LEAST_WIDTH:
        return text
    return "\n".join(line if _WHOLE.match(line) else _fold(line, width) for line in text.split("\n"))


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    found = _LABEL.match(line)
    margin = " " * max(found.end() if found else 0, 2)
    return textwrap.fill(
        line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


def coloured(text: str) -> str:
    """Colour the verdict at the beginning of each line that has one."""
    return _WORDS.sub(lambda found: f"{found[1]}\x1b[{_COLOURS[found[2]]}m{found[2]}\x1b[0m", text)


_KINDS = (
    (r"lora_[ab]|adapter", "adapter matrices"),
    (r"\bbias$|_bias$", "biases"),
    (r"(norm|layernorm)\w*\.weight$|\bnorm\.weight$", "norm weights"),
    (r"embed_tokens|word_embeddings|\bembeddings?\b", "embeddings"),
    (r"lm_head|output_layer", "output heads"),
    (r"shared_expert", "shared-expert weights"),
    (r"experts\b", "expert weights"),
    (r"router|\bgate\.weight$", "router weights"),
    (r"conv1d|A_log|dt_|mixer|ssm", "state-space weights"),
    (r"attn|attention|[qkvo]_proj|linear_qkv", "attention weights"),
    (r"mlp|gate_proj|up_proj|down_proj|linear_fc", "MLP weights"),
    (r"\bsequence \d+$", "sequences"),
)
"""Pattern in a name -> its kind, the first that fits."""
_SEQUENCE = re.compile(r"^(?P<kind>\S.*) sequence \d+$")


def kind_of_name(name: str) -> str:
    """Kind of a tensor or sequence by its name, a plural; the name with its numbers left out where it has no kind."""
    if found := _SEQUENCE.match(name):
        return f"{found['kind']} sequences"
    for pattern, kind in _KINDS:
        if re.search(pattern, name):
            return kind
    return f"`{re.sub(r'[0-9]+', '*', name)}`"


def grouped(names: Iterable[str]) -> str:
    """Say how many mismatches are of which kind, the largest first: "34 of 34 are norm weights"."""
    kinds = Counter(map(kind_of_name, names))
    total = kinds.total()
    (first, count), *others = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    text = f"{count:,} of {total:,} are {first}"
    named = [f"{number:,} {kind}" for kind, number in others[:2]]
    left = sum(number for _, number in others[2:])
    return ", ".join([text, *named]) + (f", {left:,} others" if left else "")


_CONFIG_KEYS = {
    "dtype": "dtype", "engine": "engine.kind", "engine_tp": "engine.tp", "cycles": "cycles", "update": "update",
    "seed": "seed", "against": "against",
}  # fmt: skip
"""Label in the header -> key of the config, of what is always said."""
_SAID = {*_CONFIG_KEYS.values(), "model", "fixes", "timeout_s", "trace", "transport", "record", "why"}
"""Keys of the config that the header has elsewhere, or that change nothing in what is judged."""
_OWNER = re.compile(r"\btrainer rank (\d+)\b(?! \()")


def mesh_of(manifest: Manifest) -> Mesh | None:
    """The trainer's mesh, if the run had one."""
    return None if manifest.mesh is None else Mesh(**msgspec.structs.asdict(manifest.mesh))


def options_of(manifest: Manifest) -> dict[str, Any]:
    """Options of a run that are on and need not be, by key: CUDA graphs, sleep, quantisation, adapters."""
    knobs = {key: value for key, value in flat(manifest.config).items() if key not in _SAID}
    return {key: value for key, value in sorted(knobs.items()) if value and not key.startswith("mesh.")}


def located(owner: str, manifest: Manifest) -> str:
    """An owner with the mesh coordinates of each trainer rank that it names without them."""
    mesh = mesh_of(manifest)
    if mesh is None:
        return owner

    def coordinates(found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"{found[0]} ({mesh.coordinate(rank)})" if rank < mesh.world_size else found[0]

    return _OWNER.sub(coordinates, owner)


def differences(manifest: Manifest) -> str:
    """Each package that runs at another version than the verified one, with both."""
    pairs = sorted(manifest.verified.items())
    return ", ".join(f"{name} {manifest.versions[name]} (verified {verified})" for name, verified in pairs)


def provenance(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and value of each line on where a run comes from; none for what its trace does not say."""
    code = f"verifier {manifest.verifier}" if manifest.verifier else ""
    machine = ", ".join(filter(None, [manifest.host, *manifest.gpus]))
    times = f"{manifest.began} to {manifest.ended}" if manifest.began and manifest.ended else manifest.began
    lines = {
        "made by": code + (f", commit {manifest.commit}" if manifest.commit else ""),
        "on": "; ".join(filter(None, [machine, times])),
        "command": f"`{manifest.command_line}`" if manifest.command_line else "",
    }
    return [(name, value) for name, value in lines.items() if value]


def header(manifest: Manifest) -> str:
    """All lines of the head."""
    knobs = flat(manifest.config)
    lines = [f"verifier {manifest.command} {knobs.get('model') or ''}".rstrip()]
    if (mesh := mesh_of(manifest)) is not None:
        lines[0] += f" on {mesh.label()}"
        if mesh.world_size > 1:
            gpus = manifest.num_gpus
            shared = f" on {gpus} {'GPU' if gpus == 1 else 'GPUs'}" if 0 < gpus < manifest.world_size else ""
            lines[0] += f" ({mesh.world_size} ranks{shared})"
    stated = [f"tier {manifest.tier}"] if manifest.tier else []
    stated += [f"{label} {knobs[key]}" for label, key in _CONFIG_KEYS.items() if knobs.get(key) is not None]
    if transport := manifest.transport or knobs.get("transport"):
        stated.append(f"transport {transport}")
    if stated:
        lines.append("  " + ", ".join(stated))
    if options := options_of(manifest):
        lines.append("  options: " + ", ".join(f"{key}={value}" for key, value in options.items()))
    if manifest.layout:
        lines.append(f"  layout: {manifest.layout}")
    lines += (f"  note: {text}" for text in manifest.notes)
    if manifest.versions:
        named = f"verified set {manifest.verified_set}: " if manifest.verified_set else ""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
        lines.append(f"  {named}{versions}")
    if manifest.verified:
        lines.append(f"  differs from the verified set: {differences(manifest)}")
    lines += (f"  moved: {item.name} of {item.package}: {item.why}" for item in manifest.moved_contracts)
    lines += (f"  {name}: {value}" for name, value in [*stack_lines(manifest), *provenance(manifest)])
    return "\n".join(map(printable, lines))
