"""What every architecture's tiny checkpoint does: `python -m tests.dist.families_table RUN [NAME...]`.

RUN is a key of `RUNS`; without names it runs every architecture that transformers and Megatron-Bridge both know, and
those of `ASKED_FOR` that only one of them does. Each result replaces the one before in golden/families.json, and
`python -m tests.dist.families_table page` draws its table in docs/models.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.errors import InternalError, UsageError, VerifierError
from verifier.mesh import Mesh
from verifier.model.architectures_hf import architectures
from verifier.platform.provenance import TRAINER, installed
from verifier.report import report_of
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "families.json"
PAGE = ROOT / "docs" / "models.md"
END = "<!-- table: end -->\n"
RUNS = {"golden": "golden, 1 rank", "golden-tp2": "golden, tp 2", "roundtrip": "round trip, hf engine, 1 rank"}
"""Name of a run -> head of its column."""
ASKED_FOR = ("ernie4_5", "kimi_k2")
"""Families that teams train and only one of the two libraries knows."""
NOTES = {
    "deepseek_v4": "ours: no rule for hash tables of experts",
    "ernie4_5_moe": "upstream: the bridge leaves attention dropout at 0.1, which the model does not have",
    "exaone4": "upstream: the bridge has no mapping of `lm_head.weight`, and embeddings are not tied by default",
    "falcon_h1": "upstream: in a round trip, the bridge's model takes no packed sequences; with tp, one group",
    "gemma2": "upstream: Megatron-Bridge #5712; it holds with `--fix bridge-5712`",
    "gemma3": "upstream: Megatron-Bridge #5712; it holds with `--fix bridge-5712`",
    "glm4_moe_lite": (
        "upstream: transformers computes norms in latent attention with 1e-6, whatever `rms_norm_eps` says (#44261); "
        "with 1e-6 in the config it holds"
    ),
    "gpt_oss": (
        "upstream: the bridge takes YaRN's numbers of the published checkpoints, whatever the config says; with those "
        "in the config it holds"
    ),
    "hy_v3": "upstream: the bridge reads a key that transformers' config does not have",
    "nemotron_h": (
        "upstream: transformers writes `backbone.embedding.weight`, published checkpoints and the bridge have "
        "`backbone.embeddings.weight`; `tiny:nemotron-h` has the published name and holds"
    ),
}
"""Family -> whose fault it is that a run does not hold, as far as it was looked into."""
_FRAME = re.compile(r'File "[^"]*site-packages/([^"]+)", line (\d+)')
_RANK = re.compile(r"^rank \d+ (\([^)]*\) )?failed: ")
_RANK_OF = re.compile(r" \(trainer rank .*\)$")
_NO_PLACE = re.compile(r"/\S+/(tiny-|live-)")


def names() -> list[str]:
    """One model type of each architecture, the shortest, in the order of names."""
    shortest = {item: name for name, item in sorted(architectures().items(), key=lambda row: -len(row[0]))}
    return sorted(shortest.values())


def outcome_of(runner: Runner, run: str, name: str, folder: Path) -> dict[str, Any]:
    """Run one family, and say how it ended: holds, violated, died (package, line, message) or refused.

    A hand-written model of the same name is not meant: the architecture's own name is given where there is one.
    """
    return ended(runner, run, f"tiny:{architectures().get(name, name)}", folder / f"{run}-{name}")


def ended(runner: Runner, run: str, model: str, trace: Path, dtype: str = "float32") -> dict[str, Any]:
    """Run a model, and say how it ended; see `outcome_of`."""
    try:
        if run == "roundtrip":
            hf = EngineOptions(kind="hf")
            runner.roundtrip(RoundtripConfig(model=model, trace=trace, cycles=1, engine=hf, dtype=dtype))
        else:
            mesh = Mesh(tp=2) if run == "golden-tp2" else Mesh()
            runner.golden(GoldenConfig(model=model, trace=trace, mesh=mesh, dtype=dtype))
    except UsageError as problem:
        return {"outcome": "refused", "reason": _line(str(problem))}
    except VerifierError as problem:
        if isinstance(problem, InternalError) and "\n" not in str(
            problem
        ):  # what kept ranks refuse; see `Runner.roundtrip`
            return {"outcome": "refused", "reason": _line(str(problem))}
        frames = _FRAME.findall(str(problem))
        theirs = [frame for frame in frames if frame[0].startswith("megatron/")] or frames
        place = f"{theirs[-1][0]}:{theirs[-1][1]}: " if theirs else ""
        first = str(problem).partition("\n")[0]
        return {"outcome": "died", "reason": place + _line(_RANK.sub("", first))}
    report = report_of(store.read(trace), str(trace))
    violated = [
        f"{item.code}: {item.finding.first.what}, {item.finding.count} differ"
        for item in report.violated
        if item.finding is not None
    ]
    return {
        "outcome": report.verdict.name.lower(),
        "reason": _line("; ".join(violated)),
        "num_checks": len(report.outcomes),
        "num_compared": sum(item.num_compared for item in report.outcomes),
    }


def _line(text: str) -> str:
    return _NO_PLACE.sub(r"\1", " ".join(text.partition(" when instantiating")[0].split()))[:300].strip()


def record(found: Sequence[Mapping[str, Any]]) -> None:
    """Replace what the ledger says of these families and runs."""
    kept = json.loads(LEDGER.read_text())["rows"] if LEDGER.exists() else []
    new = {(row["family"], row["run"]): row for row in [*kept, *found]}
    lines = ",\n".join("  " + json.dumps(new[key]) for key in sorted(new))
    command = "python -m tests.dist.families_table RUN"
    LEDGER.write_text(f'{{\n "command": "{command}",\n "rows": [\n{lines}\n ]\n}}\n')


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each family, a column for each run, and why the first one that does not hold ended so."""
    lines = [f"| family | {' | '.join(RUNS.values())} | why |", "|" + " --- |" * (len(RUNS) + 2)]
    for family in sorted({row["family"] for row in rows}):
        runs = {row["run"]: row for row in rows if row["family"] == family}
        cells = [runs[run]["outcome"] if run in runs else "" for run in RUNS]
        bad = next((runs[run] for run in RUNS if run in runs and runs[run]["outcome"] != "holds"), None)
        reason = NOTES.get(family) or _RANK_OF.sub("", bad["reason"]) if bad else ""
        lines.append(f"| `tiny:{family}` | {' | '.join(cells)} | {reason.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def measured_with(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: versions of the rows, and the names that stand for a row's model."""
    versions = sorted({f"{name} {version}" for row in rows for name, version in row["versions"].items()})
    measured = {row["family"] for row in rows}
    others = ", ".join(f"`tiny:{name}`" for name in sorted(architectures()) if name not in measured)
    said = f"Measured with {', '.join(versions)}. Names without a row of their own: {others}."
    return textwrap.fill(said, 120, break_on_hyphens=False) + "\n"


def drawn(page: str) -> str:
    """The page's text with its tables drawn anew."""
    rows = json.loads(LEDGER.read_text())["rows"]
    for name, text in (("families", table(rows)), ("versions", measured_with(rows))):
        begin = f"<!-- table: {name} -->\n"
        head, rest = page.split(begin)
        page = head + begin + text + END + rest.split(END, maxsplit=1)[1]
    return page


def said(*command: str) -> str:
    """What a command prints in the repository's root."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def main(arguments: Sequence[str]) -> None:
    """Run what was asked for, one family after the other in warm processes; or draw the page."""
    run, *chosen = arguments
    if run == "page":
        PAGE.write_text(drawn(PAGE.read_text()))
        return
    commit = said("git", "describe", "--always")
    if said("git", "status", "--porcelain", "--", ".", f":!{LEDGER.relative_to(ROOT)}"):
        commit += "-dirty"
    with Resources(warm=True) as resources, tempfile.TemporaryDirectory() as folder:
        runner = Runner(resources, lambda line: None)
        for name in chosen or [*names(), *ASKED_FOR]:
            found = outcome_of(runner, run, name, Path(folder))
            versions = {package: installed(package) for package in TRAINER}
            named = {"family": name, "architecture": architectures().get(name, "")}
            row = {**named, "run": run, **found, "versions": versions, "commit": commit}
            record([row])
            print(name, found["outcome"], found["reason"], flush=True)
            resources.stop_engines()


if __name__ == "__main__":
    main(sys.argv[1:])
