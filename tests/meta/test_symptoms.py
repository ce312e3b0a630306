"""The page of symptoms names checks that exist, and leads to `verifier.probe` by what a loop can record."""

from __future__ import annotations

import inspect
import re

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from verifier.core.check import REGISTRY
from verifier.core.condition import Parts
from verifier.probe import recorder

TEXT = (ROOT / "docs" / "symptoms.md").read_text()
FIRST = TEXT.split("## Symptoms\n")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split(" | ")] for line in FIRST.splitlines() if line.startswith("| ")][2:]
WORDS = (
    "garbled", "reward collapses", "gap of trainer", "KL spikes", "NaN", "LoRA", "after a resume", "stale cache",
    "async", "nothing learns", "entropy", "evaluation",
)  # fmt: skip
"""Of the threads in which teams report such runs."""
CODE = r"\b[A-Z]{3}\d{3}\b"


def test_every_code_is_a_check():
    assert sorted({code for code in re.findall(CODE, TEXT) if code not in REGISTRY}) == []


def test_users_words_lead_to_a_row_whose_own_run_is_recorded_first():
    assert [word for word in WORDS if not any(word in row[0] for row in ROWS)] == []
    assert [row[0] for row in ROWS if not re.search(CODE, row[1])] == []


def test_checks_of_a_recorded_loop_are_those_that_a_loop_can_give_evidence_of():
    parts = {code: item.applies for code, item in REGISTRY.items() if isinstance(item.applies, Parts)}
    judged = {code for code, applies in parts.items() if "loop" in applies.conditions}
    assert "WGT005" in judged
    assert {code for row in ROWS for code in re.findall(CODE, row[1])} <= judged


def test_calls_exist_with_these_arguments():
    kinds = (recorder.LoopRecorder, recorder)
    for row in ROWS:
        for name, words in re.findall(r"`(?:probe\.)?([a-z_]+)(?:\(([^)`]*)\))?`", row[1]):
            found = next((getattr(kind, name) for kind in kinds if hasattr(kind, name)), None)
            if name == "verifier_received":  # of the worker, which imports vLLM
                assert f"def {name}(" in (ROOT / "verifier" / "probe" / "recording_worker_vllm.py").read_text()
                continue
            if found is None:
                assert name in ("old", "keep_every"), name
                continue
            taken = inspect.signature(found).parameters
            assert [word for word in re.findall(r"(\w+)=", words) if word not in taken] == [], name
