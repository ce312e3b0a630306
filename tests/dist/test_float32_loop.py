"""The loop of docs/probe.md, run as the page has it in float32: it holds, and the cause of a bug is the last line.

What this does not exercise: an engine other than transformers (test_foreign_loop.py has vLLM).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401 - fills the registry
from tests.dist.float32_loop import run
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

CAUSES = {
    "temperature": "LGP003 sampled-logprob-differs-from-oracle: rollout, version 0",
    "advantages": "ADV002 advantage-differs-from-estimator: advantage, version 1",
    "denominator": "LSS001 gradient-differs-from-oracle: loss, version 1",
    "swap": "WGT005 export-differs-from-live: export, version 1, `model.layers.0.mlp.gate_proj.weight`",
    "stale": "WGT005 export-differs-from-live: export, version 2, `lm_head.weight`",
}
"""Bug -> beginning of what the report's last line names."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    folder = tmp_path_factory.mktemp("first") / "checkpoint"
    run(folder.with_name("trace"), folder, steps=1)
    with Oracle(folder, 120.0) as running:
        yield running


def judged(folder: Path, oracle: Oracle | None, bug: str = "", seed: int = 0, steps: int = 3) -> Report:
    run(folder / "trace", folder / "checkpoint", bug=bug, seed=seed, steps=steps)
    if oracle is not None:
        add_oracle(folder / "trace", folder / "checkpoint", oracle)
    return report_of(read(folder / "trace"), "trace")


def require_held(report: Report) -> None:
    assert report.verdict is Verdict.HOLDS, render_text(report)


def test_the_page_holds(oracle: Oracle, tmp_path: Path) -> None:
    report = judged(tmp_path, oracle)
    require_held(report)
    codes = {item.code for item in report.outcomes}
    assert {"ADV002", "ADV003", "LGP001", "LGP003", "LGP009", "LSS001", "LSS002", "TRN001", "WGT005"} <= codes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_fifty_steps_hold(seed: int, tmp_path: Path) -> None:
    require_held(judged(tmp_path, None, seed=seed, steps=50))


@pytest.mark.parametrize("bug", CAUSES)
def test_a_bug_is_the_cause(bug: str, oracle: Oracle, tmp_path: Path) -> None:
    report = judged(tmp_path, oracle, bug)
    assert report.verdict is Verdict.VIOLATED
    cause = render_text(report).strip().splitlines()[-1]
    assert cause.startswith(f"cause: {CAUSES[bug]}"), render_text(report)
