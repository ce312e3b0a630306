"""What published configs do, scaled down: `python -m tests.dist.published_table RUN [NAME...]`.

RUN is a key of `RUNS` or `plan`, NAME a file of tests/published_configs; without names it runs all. Results replace
those before in golden/published-configs.json, and `python -m tests.dist.published_table page` draws its table in
docs/models.md.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.dist.families_table import END, PAGE, ROOT, ended
from tests.scaled_configs import NAMES, published, write_scaled_down
from verifier.config import PlanConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.plan.run_plan import run_plan
from verifier.platform.provenance import TRAINER, installed
from verifier.report import report_of
from verifier.report.report import explanation
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner

LEDGER = ROOT / "golden" / "published-configs.json"
RUNS = {
    "golden": ("golden-tp2", "float32"),
    "roundtrip": ("roundtrip", "float32"),
    "roundtrip-bf16": ("roundtrip", "bfloat16"),
}
"""Name of a run -> run of `families_table`, dtype."""
_CODES = r" \((?:[A-Z]{3}\d{3}(?:, )?)+\)$"
HEADS = ("plan, parameters", "golden, tp 2", "round trip, fp32", "round trip, bf16", "why")


def planned(name: str) -> dict[str, Any]:
    """Plan the published config: the parameters, or the sentence that refuses it."""
    try:
        plan = run_plan(PlanConfig(model=name, dtype="bfloat16", mesh=Mesh()), published(name))
    except UsageError as refusal:
        return {"outcome": "refused", "reason": str(refusal)}
    return {"outcome": f"{plan.num_parameters:,}", "reason": ""}


def outcome_of(runner: Runner, run: str, name: str, folder: Path) -> dict[str, Any]:
    """Run a config, and say how it ended: of a violation the codes, and the known bugs that explain them all."""
    kind, dtype = RUNS[run]
    trace = folder / f"{run}-{name}"
    model = write_scaled_down(name, folder, dtype)
    found = ended(runner, kind, str(model), trace, dtype)
    if found["outcome"] == "died":  # what ranks that are kept refuse leaves a trace, and a run of a command none
        with Resources() as own:
            found = ended(Runner(own, lambda line: None), kind, str(model), folder / f"{run}-{name}-alone", dtype)
    found["reason"] = found["reason"].replace(str(model), name)
    if found["outcome"] == Verdict.VIOLATED.name.lower():
        report = report_of(store.read(trace), str(trace))
        said = {explanation(item, report.manifest).partition(";")[0] for item in report.violated}
        named = "unexplained" if "" in said else "; ".join(sorted(said))
        found["reason"] = f"{named} ({', '.join(item.code for item in report.violated)})"
    return {key: found[key] for key in ("outcome", "reason")}


def record(row: Mapping[str, Any]) -> None:
    """Replace what the ledger says of a config and a run."""
    kept = json.loads(LEDGER.read_text())["rows"] if LEDGER.exists() else []
    rows = {(item["config"], item["run"]): item for item in [*kept, row]}
    lines = ",\n".join("  " + json.dumps(rows[key]) for key in sorted(rows))
    command = "python -m tests.dist.published_table RUN"
    LEDGER.write_text(f'{{\n "command": "{command}",\n "rows": [\n{lines}\n ]\n}}\n')


def rows_of() -> dict[tuple[str, str], dict[str, Any]]:
    """(config, run) -> row of the ledger."""
    return {(row["config"], row["run"]): row for row in json.loads(LEDGER.read_text())["rows"]}


def table() -> str:
    """Markdown: a row for each config, and why the first run that does not hold ended so."""
    lines, rows = [f"| config | {' | '.join(HEADS)} |", "|" + " --- |" * (len(HEADS) + 1)], rows_of()
    for name in NAMES:
        found = [rows[name, run] for run in ("plan", *RUNS)]
        why = next((re.sub(_CODES, "", row["reason"]) for row in found if row["reason"]), "")
        lines.append(f"| {name} | {' | '.join(row['outcome'] for row in found)} | {why} |")
    return "\n".join(lines) + "\n"


def drawn(page: str) -> str:
    """The page's text with its table drawn anew."""
    begin = "<!-- table: published configs -->\n"
    head, rest = page.split(begin)
    return head + begin + table() + END + rest.split(END, maxsplit=1)[1]


def main(arguments: Sequence[str]) -> None:
    """Run what was asked for, one config after the other in warm processes; or draw the page."""
    run, *chosen = arguments
    if run == "page":
        PAGE.write_text(drawn(PAGE.read_text()))
        return
    if run == "plan":
        for name in chosen or NAMES:
            record({"config": name, "run": run, **planned(name)})
        return
    with Resources(warm=True) as resources, tempfile.TemporaryDirectory() as folder:
        runner = Runner(resources, lambda line: None)
        for name in chosen or NAMES:
            found = outcome_of(runner, run, name, Path(folder))
            record({"config": name, "run": run, **found, "versions": {item: installed(item) for item in TRAINER}})
            print(name, found["outcome"], found["reason"], flush=True)
            resources.stop_engines()


if __name__ == "__main__":
    main(sys.argv[1:])
