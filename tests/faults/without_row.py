"""Faults of the catalogue on models without a row: `python -m tests.faults.without_row [FAULT...]`.

It runs the trials of `CASES` that golden/faults-without-row.json lacks, or those of the faults named, whose rows it
replaces.
`python -m tests.meta.measurement_tables` draws its table in docs/measurements.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import NO_ENGINE, Fault
from verifier.faults.matrix import line_of
from verifier.faults.trial import TrialResult, Trials
from verifier.mesh import Mesh
from verifier.platform.provenance import installed_versions, this_code

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "faults-without-row.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault on a model without a row."""

    fault: str
    model: str
    mesh: Mesh
    in_derivation: bool = False
    """The fault is there when the layout is derived too; else in the run that is judged alone."""
    engine: str = "hf"
    """NO_ENGINE for what is seen before anything is exported."""
    caught_by: tuple[str, ...] = ()
    """Codes of the checks that must be violated, where they are not the fault's own."""
    seen_in: Stage | None = None
    """First bad stage, where it is not the one in which the fault sits."""

    @property
    def name(self) -> str:
        """Id of the test."""
        where = "derivation, " if self.in_derivation else ""
        return f"{self.fault}, {where}{self.model}, {self.mesh.label()}, {self.engine}"

    @property
    def key(self) -> tuple[str, ...]:
        """Key of its row."""
        return self.model, self.mesh.label(), self.engine, str(self.in_derivation), self.fault

    @property
    def trial(self) -> Fault:
        """The catalogue's fault on this model."""
        found = CATALOG[self.fault]
        return replace(
            found, model=self.model, mesh=self.mesh, engine=self.engine, in_derivation=self.in_derivation,
            caught_by=self.caught_by or found.caught_by, stage=self.seen_in or found.stage,
        )  # fmt: skip


def _on(model: str, mesh: Mesh, *faults: str, **others: Any) -> list[Case]:
    return [Case(fault=fault, model=model, mesh=mesh, **others) for fault in faults]


_ALONE: dict[str, Any] = {"engine": NO_ENGINE}
_LOAD: dict[str, Any] = {**_ALONE, "caught_by": ("WGT001", "LGP001")}
_IN_DERIVATION: dict[str, Any] = {
    **_ALONE, "in_derivation": True, "caught_by": ("LGP001",), "seen_in": Stage.LOGPROB,
}  # fmt: skip
CASES = (
    *_on("tiny:deepseek_v2", Mesh(), "expert-left-at-init", **_LOAD),
    *_on("tiny:deepseek_v2", Mesh(),
         "adam-step-stale", "norms-decay", "scheduler-resumed-twice", "decay-stale-after-resume", **_ALONE),
    *_on("tiny:glm4_moe", Mesh(tp=2, ep=2),
         "expert-left-at-init", "score-bias-zeroed-after-load", "qkv-merged-head-major", **_LOAD),
    *_on("tiny:glm4_moe", Mesh(tp=2, ep=2),
         "expert-left-at-init", "score-bias-zeroed-after-load", "qkv-merged-head-major", **_IN_DERIVATION),
    *_on("tiny:glm4_moe", Mesh(tp=2, ep=2),
         "sequence-parallel-grads-not-reduced", "finalize-hook-missing",
         "experts-outside-gradient-norm", "score-bias-balanced", **_ALONE),
    *_on("tiny:mistral", Mesh(tp=2), "qkv-merged-head-major", **_LOAD),
    *_on("tiny:mistral", Mesh(tp=2), "logprob-gradient-in-owner-only", **_ALONE),
    *_on("tiny:mistral", Mesh(cp=2), "mean-of-means", **_ALONE),
    *_on("tiny:mistral", Mesh(tp=2), "export-buffer-used-again", "order-of-later-exports", "index-ends-early"),
    *_on("tiny:olmoe", Mesh(pp=2), "stage-names-remapped-twice", **_LOAD),
    *_on("tiny:olmoe", Mesh(pp=2), "stage-names-remapped-twice", **_IN_DERIVATION),
    *_on("tiny:glm4_moe", Mesh(tp=2, ep=2),
         "expert-left-at-init", "ep-rank-experts-swapped", "experts-not-gathered-over-ep", "expert-never-yielded"),
)  # fmt: skip
"""In the order in which trials share a clean run."""


def row_of(case: Case, result: TrialResult) -> dict[str, Any]:
    """The ledger's row of a trial."""
    return {
        "fault": case.fault, "model": case.model, "mesh": case.mesh.label(), "engine": case.engine,
        "in_derivation": case.in_derivation,
        "sits_in": CATALOG[case.fault].stage.label,
        "first_bad": result.first_bad.stage.label if result.first_bad else None, "caught": list(result.caught),
        "fired": result.fired, "healed": result.healed is Verdict.HOLDS and not result.healed_differs,
        "failures": result.failures, "commit": this_code().commit, "versions": installed_versions(),
    }  # fmt: skip


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], row["mesh"], row["engine"], str(row["in_derivation"]), row["fault"]


def recorded() -> list[dict[str, Any]]:
    """The rows of the ledger."""
    found: list[dict[str, Any]] = json.loads(LEDGER.read_text())["rows"] if LEDGER.exists() else []
    return found


def record(found: Iterable[Mapping[str, Any]]) -> None:
    """Replace what the ledger says of these trials."""
    rows = {_key(row): row for row in [*recorded(), *found]}
    lines = ",\n".join("  " + json.dumps(rows[key]) for key in sorted(rows))
    LEDGER.write_text(f'{{\n "command": "python -m tests.faults.without_row",\n "rows": [\n{lines}\n ]\n}}\n')


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each model, with and without the fault in the derivation."""
    lines = ["| model | injected in | caught in their own stage | in a later one |", "| --- | --- | --- | --- |"]
    for model, in_derivation in sorted({(row["model"], row["in_derivation"]) for row in rows}):
        of = [row for row in rows if (row["model"], row["in_derivation"]) == (model, in_derivation)]
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for row in of:
            names[row["first_bad"] == row["sits_in"]].add(f"`{row['fault']}`")
        where = "derivation, run" if in_derivation else "run"
        lines.append(f"| `{model}` | {where} | {', '.join(sorted(names[True]))} | {', '.join(sorted(names[False]))} |")
    own = sum(row["first_bad"] == row["sits_in"] for row in rows)
    healed = sum(row["healed"] for row in rows)
    return "\n".join(lines) + f"\n\nCaught in their own stage: {own} of {len(rows)}. Healed: {healed}.\n"


def main(arguments: Sequence[str]) -> None:
    """Run trials, and record each as it ends."""
    done = {_key(row) for row in recorded()}
    with Trials(lambda text: print(text, file=sys.stderr, flush=True)) as trials:
        for case in CASES:
            if case.fault in arguments or (not arguments and case.key not in done):
                result = trials.trial(case.trial)
                record([row_of(case, result)])
                print(case.name, line_of(result), result.crashed.partition("\n")[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
