"""What the upstream stack does to each family when no fix is on: `python -m tests.dist.as_shipped [FAMILY | ID...]`.

Each case is a round trip, once as shipped and, where a known bug applies, once more with every fix. A case leaves one
file in golden/as-shipped; `python -m tests.dist.as_shipped page` draws the table of docs/upstream.md from all of
them. What
tests/h100/test_as_shipped_gpu.py leaves in golden/gpu/as-shipped is drawn too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import VerifierError
from verifier.mesh import Mesh
from verifier.report import Report, report_of
from verifier.report.report import explanation, why_it_ended
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "golden" / "as-shipped", ROOT / "golden" / "gpu" / "as-shipped")
PAGE = ROOT / "docs" / "upstream.md"
BEGIN, END = "<!-- table: as shipped -->\n", "<!-- table: end -->\n"
CYCLES = 2
TP2, EP2 = Mesh(tp=2), Mesh(ep=2, dp=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedCase:
    """One round trip of the table."""

    family: str
    """Name of a tiny model without its "tiny:"."""
    engine: str
    mesh: Mesh
    dtype: str = "float32"
    lora_rank: int = 0

    @property
    def id(self) -> str:
        """Name of its file, without the fixes."""
        return f"cpu-{self.family}-{self.engine}-{self.dtype}" + ("-lora" if self.lora_rank else "")


CASES = (
    *(
        ShippedCase(family=family, engine=engine, mesh=TP2)
        for family in ("qwen3", "qwen3-tied", "qwen2", "llama")
        for engine in ("vllm", "hf")
    ),
    *(ShippedCase(family="qwen3-moe", engine=engine, mesh=EP2) for engine in ("vllm", "hf")),
    ShippedCase(family="qwen3", engine="vllm", mesh=TP2, lora_rank=8),
    ShippedCase(family="qwen3-moe", engine="vllm", mesh=EP2, dtype="bfloat16"),
    ShippedCase(family="deepseek-v3", engine="hf", mesh=EP2),
    ShippedCase(family="deepseek-v3", engine="hf", mesh=EP2, dtype="bfloat16"),
    ShippedCase(family="deepseek-v3-yarn", engine="hf", mesh=TP2),
    ShippedCase(family="nemotron-h", engine="hf", mesh=TP2),
    ShippedCase(family="nemotron-h", engine="hf", mesh=TP2, dtype="bfloat16"),
)


def measure(runner: Runner, case: ShippedCase, folder: Path) -> list[dict[str, Any]]:
    """Run a case as shipped, and with every fix if a known bug applies; a row for each."""
    found: list[dict[str, Any]] = []
    for fixes in ((), ("all",)):
        config = RoundtripConfig(
            model=f"tiny:{case.family}", trace=folder / f"{case.id}-{len(found)}", mesh=case.mesh, dtype=case.dtype,
            engine=EngineOptions(kind=case.engine, lora_rank=case.lora_rank), cycles=CYCLES, fixes=fixes,
        )  # fmt: skip
        found.append(row_of(runner, config, case.family))
        runner.resources.stop_engines()
        if not found[0]["bugs"]:
            break
    return found


def row_of(runner: Runner, config: RoundtripConfig, family: str) -> dict[str, Any]:
    """What a round trip found, in the words of its report; also of one that ended early."""
    failure = ""
    try:
        runner.roundtrip(config)
    except VerifierError as problem:
        failure = str(problem)
        if not (config.trace / "manifest.json").exists():
            raise
    report = report_of(store.read(config.trace), str(config.trace))
    return {
        "family": family,
        "tier": report.manifest.tier,
        "engine": config.engine.kind,
        "dtype": config.dtype,
        "mesh": config.mesh.label(),
        "options": [*config.engine.gpu_options(), *(["--engine-lora-rank"] if config.engine.lora_rank else [])],
        "fixes": list(config.fixes),
        "versions": report.manifest.versions,
        "bugs": [bug.issue for bug in report.manifest.upstream_bugs or ()],
        "verdict": report.verdict.name.lower(),
        "violated": _violated(report),
        "inconclusive": [item.code for item in report.outcomes if item.verdict is Verdict.INCONCLUSIVE],
        "num_checks": len(report.outcomes),
        "num_compared": sum(item.num_compared for item in report.outcomes),
        "failure": failure.strip().splitlines()[0] if failure else "",
        "ended_by": why_it_ended(report.manifest),
    }


def _violated(report: Report) -> dict[str, dict[str, Any]]:
    """Code -> how much differs, where it does first, and what explains it."""
    return {
        item.code: {
            "count": item.finding.count,
            "first": item.finding.first.what,
            "stage": item.finding.first_bad_stage.label,
            "explained_by": explanation(item, report.manifest),
        }
        for item in report.outcomes
        if item.finding is not None
    }


def write(found: Sequence[dict[str, Any]], folder: Path, name: str) -> None:
    """Leave a case's rows in a file of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    ).stdout.strip()
    text = json.dumps({"commit": commit, "rows": list(found)}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def rows() -> list[dict[str, Any]]:
    """Every row that was measured, the CPU tier's first."""
    files = [file for folder in FOLDERS if folder.is_dir() for file in sorted(folder.glob("*.json"))]
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def table(measured: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each run that does not hold, and the number of the others."""
    titles = ("tier", "family", "engine", "dtype", "mesh", "violated checks, by the bug that the report names")
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    bad = [row for row in measured if row["violated"] or row["failure"]]
    for row in bad:
        options = f" {' '.join(row['options'])}" if row["options"] else ""
        cells = (
            row["tier"], row["family"], row["engine"] + options, row["dtype"], row["mesh"],
            "; ".join([*_by_bug(row), *_rest(row)]),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    families = sorted({row["family"] for row in measured if row not in bad})
    fixed = sum(bool(row["fixes"]) for row in measured if row not in bad)
    others = f"The other {len(measured) - len(bad)} runs hold, {fixed} of them with `--fix all`: {', '.join(families)}."
    return "\n".join([*lines, "", textwrap.fill(others, 120, break_on_hyphens=False)]) + "\n"


def _by_bug(row: dict[str, Any]) -> list[str]:
    codes: dict[str, list[str]] = {}
    for code, found in sorted(row["violated"].items()):
        codes.setdefault(found["explained_by"].partition(";")[0] or "no known bug", []).append(code)
    return [f"{bug}: {', '.join(names)}" for bug, names in codes.items()]


def _rest(row: dict[str, Any]) -> list[str]:
    unsure = [f"{len(row['inconclusive'])} could not tell"] if row["inconclusive"] else []
    ended = [f"ended: {row['ended_by'].partition(';')[0] or row['failure']}"] if row["failure"] else []
    return unsure + ended


def draw() -> None:
    """Write the table into the page, in the order of tiers and families."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(head + BEGIN + table(rows()) + END + rest.split(END, maxsplit=1)[1], encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Measure the cases of these families or ids, or all; or draw the page."""
    if list(arguments) == ["page"]:
        draw()
        return
    with Resources(warm=True) as resources, tempfile.TemporaryDirectory() as folder:
        runner = Runner(resources, print)
        for case in CASES:
            if not arguments or {case.family, case.id} & set(arguments):
                found = measure(runner, case, Path(folder))
                write(found, FOLDERS[0], case.id)
                print([(row["fixes"], row["verdict"], sorted(row["violated"])) for row in found], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
